"""A tiny run in a process of its own: python child_run.py FOLDER SETTINGS.

SETTINGS are groups of `run_helpers.tiny` as JSON. A run that was begun in FOLDER goes on. The
device count comes with XLA_FLAGS.
"""

import json
import sys

import jax

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_numpy_rank_promotion", "raise")

import run_helpers  # noqa: E402
from run_helpers import low_tokens, tiny  # noqa: E402

from trace_jax import actor, evaluate, loop, trainer  # noqa: E402
from trace_jax.rl.learner import Learner  # noqa: E402
from trace_jax.warmup import WarmStart  # noqa: E402


def quick(function, **options):
    return jax.jit(function, compiler_options=run_helpers.QUICK, **options)


class QuickLearner(Learner):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.update = quick(self._update, donate_argnums=0)
        self.score, self.audit = quick(self._score), quick(self._audit)


class QuickWarmStart(WarmStart):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.step = quick(self._step, donate_argnums=0)


def main(folder: str, groups: str) -> None:
    for module in (actor, evaluate):
        module.make_engine = run_helpers._shared_or_continuous
    trainer.Learner, loop.WarmStart, actor.score = QuickLearner, QuickWarmStart, low_tokens
    result = loop.train(tiny(**json.loads(groups)), folder, resume=True, stream=sys.stdout)
    print("finished", json.dumps(result.after), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
