"""What a study's sweep.py says: which runs, from which base, shown in which columns."""

import functools
import importlib.util
import itertools
from pathlib import Path
from typing import NamedTuple

import ml_collections

from trace_jax.config import Config, freeze

ROOT = Path(__file__).resolve().parent.parent
# heading, key of a result row, digits
COLUMNS = (
    ("accuracy, FP4", "accuracy_after", 3),
    ("accuracy, BF16", "accuracy_bf16", 3),
    ("before RL, FP4", "accuracy_before", 3),
    ("mean gap", "gap_mean", 4),
    ("KL (k3)", "k3_mean", 5),
    ("codes agree", "agreement_mean", 4),
    ("guidance bytes a token", "guidance_bytes_per_token", 0),
    ("collapsed", "collapsed", 1),
    ("seconds", "seconds", 0),
)
# for studies of many rows on a CPU: the quickstart's model, half of its steps and answers
SMALL = "configs/quickstart.py"
SMALLER = (("rl.steps", 30), ("rl.prompts_per_step", 16), ("eval.problems", 128))
# parity checks for 5 % of the values in doubt, and a bit a block scale
CHECKS = {"guidance.checks": 0.05, "guidance.scale_bits": 1}


class Run(NamedTuple):
    """One run of a study: its configuration, and the flags that make it from the base."""

    label: str
    seed: int
    config: Config
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        slug = "".join(c if c.isalnum() else "-" for c in self.label)
        return f"{slug}-{self.seed}"


def study(base: str, rows, *, seeds: int = 3, columns=COLUMNS, overrides=(), name: str = "results"):
    """A sweep's ConfigDict.

    Args:
      base: configuration file, from the repository's root.
      rows: (label, method, {setting: value}) each; the settings override the method's, and
        a "base" among them is the row's own configuration file.
      seeds: each row runs with seeds 0 to seeds - 1.
      columns: of the table; see COLUMNS.
      overrides: (setting, value) pairs that hold for every row.
      name: of the section of README.md that has the table, and of the picture.
    """
    lines = tuple((label, method, tuple(own.items())) for label, method, own in rows)
    return ml_collections.ConfigDict(
        {
            "base": base,
            "rows": lines,
            "seeds": seeds,
            "columns": tuple(columns),
            "overrides": tuple(overrides),
            "name": name,
        }
    )


def runs_of(sweep: ml_collections.ConfigDict) -> list[Run]:
    """Every run, seed by seed; a bad setting is refused here, before anything runs.

    Raises:
      ValueError: two rows of one label, or a configuration that cannot work.
    """
    labels = [label for label, *_ in sweep.rows]
    if len(set(labels)) < len(labels):
        raise ValueError(f"the rows' labels repeat: {', '.join(labels)}; write one name each")
    out = []
    for seed, (label, method, own) in itertools.product(range(sweep.seeds), sweep.rows):
        settings = dict(sweep.overrides) | dict(own) | {"seed": seed, "method": method}
        base = settings.pop("base", sweep.base)
        config = _configured(base, settings)
        given = tuple(f"--config.{path}={value}" for path, value in settings.items())
        out.append(Run(label, seed, config, (f"--config={base}", *given)))
    return out


def _configured(base: str, settings: dict) -> Config:
    tree = _base(base)
    for path, value in settings.items():
        *groups, key = path.split(".")
        here = tree
        for name in groups:
            here = here[name]
        here[key] = value
    return freeze(tree, settings)


def _base(path: str) -> ml_collections.ConfigDict:
    return _module(path).get_config()


@functools.cache
def _module(path: str):
    found = ROOT / path
    if not found.is_file():
        found = Path(path)
    spec = importlib.util.spec_from_file_location(found.stem, found)
    if spec is None or not found.is_file():
        raise ValueError(f"there is no configuration file {path}; write its path as base")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
