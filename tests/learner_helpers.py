"""Tiny learners that the learner's tests share, and a rollout of experts beside engine noise."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from helpers import params_of

from trace_jax import modes, sync
from trace_jax.config import Config, default, freeze
from trace_jax.rl.learner import Learner
from trace_jax.rollout import Engine, EngineConfig, Rollout
from trace_jax.rollout.sampling import request_keys

PROMPTS, SAMPLES, PROMPT, RESPONSE = 8, 2, 6, 5
ROWS, LENGTH = PROMPTS * SAMPLES, PROMPT + RESPONSE
# The first half of the rows is short, so that a mean of micro-batch means is far off.
LENGTHS = np.array([7, 8] * 4 + [11, 10] * 4, np.int32)
QUICK = {"xla_backend_optimization_level": 0}  # halves the compile time, changes no meaning
MOE = dict(num_layers=2, hidden=32, head_dim=16, expert_dim=32, num_experts=4, top_k=2)
PLAN = {"layers": "all", "sites": ("expert_in", "expert_mid", "k", "v"), "bits": 4}
VERSION = 3


def config_of(mode="bf16", model=None, **groups) -> Config:
    """A tiny configuration; groups of settings by name, such as rl={"micro_batches": 2}."""
    shape = dict(num_layers=1, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, expert_dim=16)
    config = default(vocab_size=259, **shape | (model or {}))
    config.mode = mode
    config.task.max_prompt, config.task.max_response = PROMPT, RESPONSE
    config.ledger.audit_rows = 1
    config.optim.learning_rate = 1e-3
    config.optim.clip_norm = 0.05  # in force: the gradients are longer
    # Token means: where a wrong mean shows.
    config.rl.algorithm = "dapo"
    config.rl.prompts_per_step, config.rl.samples = PROMPTS, SAMPLES
    for name, settings in groups.items():
        config[name].update(settings)
    return freeze(config)


def learner_of(config: Config) -> Learner:
    learner = Learner(config, modes.resolve(config))
    learner.update = jax.jit(learner._update, compiler_options=QUICK)  # states are used again
    learner.score = jax.jit(learner._score, compiler_options=QUICK)
    return learner


@cache
def moe(mode: str, on_stale: str = "obey", replay: bool = True, **rl) -> Learner:
    guidance = PLAN | {"on_stale": on_stale}
    return learner_of(
        config_of(mode, MOE, guidance=guidance, rl={"routing_replay": replay} | rl)
    )


@cache
def moe_rollout() -> Rollout:
    """A rollout whose engine is 1 % off at every site."""
    config = moe("trace").config
    mode = modes.resolve(config)
    engine = Engine(
        EngineConfig(
            model=config.model,
            precision=mode.rollout,
            eos_ids=(258,),
            max_response=RESPONSE,
            samples=SAMPLES,
            plan=mode.plan,
            audit_rows=1,
            noise=0.01,
        )
    )
    params = sync.to_rollout(params_of(config.model), mode.rollout)
    tokens = jax.random.randint(jax.random.key(5), (PROMPTS, PROMPT), 1, 256, jnp.int32)
    slots = jnp.arange(ROWS, dtype=jnp.int32)
    keys = request_keys(0, 0, slots // SAMPLES, slots % SAMPLES)
    lengths = jnp.asarray([PROMPT, 3] * (PROMPTS // 2), jnp.int32)
    return engine(params, tokens, lengths, keys, version=VERSION, noise_seed=1)


def moe_logp(learner: Learner, rolled=None, version=VERSION) -> np.ndarray:
    rolled = moe_rollout() if rolled is None else rolled
    return np.asarray(learner.score(params_of(learner.config.model), rolled, version))
