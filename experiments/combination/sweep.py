"""Does guidance go with corrections of the objective? See README.md."""

from experiments.studies import study

OVERRIDES = (("rollout.engine_noise", 0.01),)
CORRECTIONS = {
    "no correction": {"rl.correction": "none"},
    "token ratio capped at 5": {},
    "icepop": {"rl.correction": "icepop"},
    "sequence mask": {"rl.correction": "sequence_mask"},
}
ROWS = [
    (f"{mode}, {name}", "", {"mode": mode, "rl.correction": "tis"} | plan | settings)
    for mode, plan in (("qat", {}), ("trace", {"guidance.layers": "last:0.5"}))
    for name, settings in CORRECTIONS.items()
]
ROWS += [("trace, routes not replayed", "trace", {"rl.routing_replay": False})]


def get_config():
    return study("configs/study_50m.py", ROWS, overrides=OVERRIDES)
