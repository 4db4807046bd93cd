"""What does each byte of guidance buy? See README.md."""

from experiments.studies import study

OVERRIDES = (("rollout.engine_noise", 0.01),)
PLANS = {
    "scales alone": {"guidance.bits": 0},
    "one bit": {},
    "one bit, 2-bit scales": {"guidance.scale_bits": 2},
    "one bit, guard 0.1": {"guidance.guard": 0.1},
    "one bit, without expert_mid": {"guidance.sites": ("expert_in", "k", "v")},
    "one bit, K and V alone": {"guidance.sites": ("k", "v")},
    "one bit, 1-bit scales": {"guidance.scale_bits": 1},
    "checks for 10 % in doubt": {"guidance.checks": 0.1, "guidance.scale_bits": 1},
    "checks for 20 % in doubt": {"guidance.checks": 0.2, "guidance.scale_bits": 1},
    "whole codes": {"guidance.bits": 4},
    "replayed codes": {"guidance.bits": 4, "guidance.rounding": "replay"},
}
ROWS = [("qat (no guidance)", "qat", {})]
ROWS += [(name, "trace_all", plan) for name, plan in PLANS.items()]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES)
