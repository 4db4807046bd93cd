"""Ops on FP4 data: one op a file, each with the plain-XLA version that defines it."""
