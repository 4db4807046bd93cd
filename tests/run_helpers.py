"""A tiny run, and engines, learners and warm starts that runs of equal settings share.

They are pure functions of their settings and take nearly all of the time to compile.
"""

import dataclasses
from functools import cache, partial

import jax
import numpy as np
from helpers import SHAPE

from trace_jax import actor, evaluate, loop, trainer
from trace_jax import config as settings
from trace_jax.config import Config, default, freeze
from trace_jax.metrics import read_metrics
from trace_jax.parallel import make_mesh, to_host
from trace_jax.rl.learner import Learner
from trace_jax.rollout import Engine, engine, make_engine
from trace_jax.warmup import WarmStart

QUICK = {"xla_backend_optimization_level": 0}  # halves the compile time, changes no meaning
STEPS = 4
LOW = 64


def tiny(mode: str = "trace", **groups) -> Config:
    return freeze(tiny_tree(mode, **groups))


def tiny_tree(mode: str = "trace", **groups):
    """Two layers, four experts; groups of settings by name, such as rl={"steps": 2}."""
    config = default(**SHAPE | {"num_layers": 2})
    config.mode = mode
    config.task.datasets = (("chain_sum", 1.0, (("min_terms", 2), ("max_terms", 2))),)
    config.task.max_prompt, config.task.max_response = 12, 4
    config.warmup.steps, config.warmup.batch_size = 3, 8
    config.rl.steps, config.rl.prompts_per_step, config.rl.samples = STEPS, 8, 4
    config.guidance.layers = "all"
    config.optim.learning_rate = 1e-2
    config.eval.problems, config.eval.samples = 8, 2
    config.ledger.audit_rows = 4
    config.checkpoint.every = 2
    for name, values in groups.items():
        config[name].update(values)
    return config


def low_tokens(rollout, prompts, tokenizer, samples):
    """A reward that any model can move: the share of response tokens below LOW."""
    mask = to_host(rollout.mask)
    share = ((to_host(rollout.tokens) < LOW) & mask).sum(1) / np.maximum(mask.sum(1), 1)
    rewards = share.astype(np.float32).reshape(-1, samples)
    return rewards, np.broadcast_to(prompts.live[:, None], rewards.shape)


@cache
def shared_engine(config) -> Engine:
    built = Engine(config)
    built._generate = jax.jit(partial(engine._generate, config), compiler_options=QUICK)
    return built


def _shared_or_continuous(kind: str, config, **settings):
    return shared_engine(config) if kind == "batch" else make_engine(kind, config, **settings)


@cache
def _shared_learner(config, mode, layout) -> Learner:
    learner = Learner(config, mode, layout)
    for name, donated in (("update", 0), ("score", ()), ("audit", ())):
        run = jax.jit(
            getattr(learner, f"_{name}"), donate_argnums=donated, compiler_options=QUICK
        )
        setattr(learner, name, run)
    return learner


def shared_learner(config: Config, mode, layout=None) -> Learner:
    """One learner for all configurations that differ in what a learner does not read."""
    same = dict(mode="bf16", seed=0, data_seed=0, warmup=settings.WarmupConfig())
    steps = dataclasses.replace(config.rl, steps=0)
    checkpoint = settings.CheckpointConfig()
    return _shared_learner(
        dataclasses.replace(config, rl=steps, checkpoint=checkpoint, **same), mode, layout
    )


@cache
def _shared_warm_start(config: Config, layout):
    warm = WarmStart(config, layout)
    warm.step = jax.jit(warm._step, donate_argnums=0, compiler_options=QUICK)
    return warm


def shared_warm_start(config: Config, layout=None):
    rl, checkpoint = dataclasses.replace(config.rl, steps=0), settings.CheckpointConfig()
    config = dataclasses.replace(config, rl=rl, checkpoint=checkpoint)
    return _shared_warm_start(config, layout)


def share_compiled(patch) -> None:
    """Lets runs share what they compile, on one device."""
    for module in (actor, evaluate):
        patch.setattr(module, "make_engine", _shared_or_continuous)
    patch.setattr(trainer, "Learner", shared_learner)
    patch.setattr(loop, "WarmStart", shared_warm_start)
    patch.setattr(trainer, "make_mesh", lambda c: make_mesh(c, jax.devices()[:1]))


def rows_of(folder) -> list[dict]:
    """Metrics without what is measured by the clock."""
    clock = lambda key: key.startswith("seconds/") or key == "tokens_per_second"
    return [{k: v for k, v in row.items() if not clock(k)} for row in read_metrics(folder)]
