"""The learner: advantages, losses, train/rollout corrections and the mismatch ledger."""
