"""Does guidance go with corrections of the objective? See README.md."""

from experiments.studies import SMALL, SMALLER, study

OVERRIDES = (*SMALLER, ("rollout.engine_noise", 0.01))
PLAIN = {"rl.correction": "none"}
OBJECTIVES = {
    "token ratio capped at 5": {},  # what both methods have
    "no correction": PLAIN,
    "score centering": PLAIN | {"rl.score_centering": 128},
    "gspo": PLAIN | {"rl.algorithm": "gspo"},
}
ROWS = [
    (f"{method}, {name}", method, settings)
    for method in ("qat", "trace")
    for name, settings in OBJECTIVES.items()
]
ROWS += [("trace, routes not replayed", "trace", {"rl.routing_replay": False})]


def get_config():
    return study(SMALL, ROWS, seeds=3, overrides=OVERRIDES)
