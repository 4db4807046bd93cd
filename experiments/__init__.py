"""Commands: train, quickstart, compare, audit, and the studies."""
