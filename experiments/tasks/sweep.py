"""Do the three kinds of task train under FP4 with guidance? See README.md."""

from experiments.studies import study

ROWS = [
    ("reasoning: words backward", "trace", {}),
    ("code: programs from examples", "trace", {"base": "configs/quickstart_coding.py"}),
    ("episodes: mazes of four rooms", "trace", {"base": "configs/quickstart_multiturn.py"}),
]


def get_config():
    return study("configs/quickstart.py", ROWS, seeds=1)
