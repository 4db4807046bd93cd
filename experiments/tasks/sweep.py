"""Do the three kinds of task train under FP4 with guidance? See README.md."""

from experiments.studies import study

SHORT = {"rl.steps": 8, "eval.problems": 32}  # programs are judged in sandboxes, one by one
CODE = SHORT | {"base": "configs/quickstart_coding.py"}
ROWS = [
    ("reasoning: words backward", "trace", {}),
    ("code: programs from examples", "trace", CODE),
    ("episodes: mazes of four rooms", "trace", {"base": "configs/quickstart_multiturn.py"}),
]


def get_config():
    return study("configs/quickstart.py", ROWS, seeds=1)
