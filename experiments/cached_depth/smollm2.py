"""Which layers need guidance on SmolLM2 made into a MoE? See README.md."""

from experiments.studies import study

OVERRIDES = (("rollout.engine_noise", 0.01),)
DEPTHS = ("last:0.25", "last:0.5", "first:0.5")
ROWS = [("qat (no guidance)", "qat", {})]
ROWS += [(f"one bit, {depth}", "trace_all", {"guidance.layers": depth}) for depth in DEPTHS]
ROWS += [("one bit, all", "trace_all", {})]


def get_config():
    return study("configs/smollm2_moe.py", ROWS, overrides=OVERRIDES, name="smollm2")
