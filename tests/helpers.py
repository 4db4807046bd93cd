"""A tiny model, its policies and its compiled forwards, shared by the model and rollout tests.

Compiling takes nearly all of these tests' time, so everything that compiles is
built once a session and on few shapes.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import fp4, model, sync
from trace_jax.fp4 import GuidancePlan, PrecisionPolicy, Rule
from trace_jax.model import ModelConfig
from trace_jax.rollout import Engine, EngineConfig
from trace_jax.rollout.sampling import request_keys

# A byte-level MoE as configurations write it.
SHAPE = dict(
    vocab_size=259,
    num_layers=4,
    hidden=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    expert_dim=32,
    num_experts=4,
    top_k=2,
)
LAYERS, VOCAB = 3, 41
# Neither the head size nor the inner width is a multiple of a block (BR-030).
MOE = ModelConfig(
    vocab_size=VOCAB,
    num_layers=LAYERS,
    hidden=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    expert_dim=40,
    num_experts=4,
    top_k=2,
)
DENSE = dataclasses.replace(MOE, num_experts=0, top_k=0)
TURNED = dataclasses.replace(DENSE, head_dim=32)
CONFIGS = {"moe": MOE, "dense": DENSE}

PRECISIONS = {
    name: PrecisionPolicy(rules).resolve(LAYERS)
    for name, rules in {
        "bf16": (),
        "nvfp4": (Rule("*", "nvfp4"),),
        "mxfp4": (Rule("*", "mxfp4"),),
        # Three segments: NVFP4, BF16, NVFP4 with values of the cache in BF16.
        "mixed": (
            Rule("*", "nvfp4"),
            Rule("*", "bf16", layers=(1,)),
            Rule("v", "bf16", layers=(2,)),
        ),
        "fp8": (Rule("*", "nvfp4"), Rule("[kv]", "fp8")),
    }.items()
}
WINDOW = 4
PRECISIONS["window"] = PrecisionPolicy((Rule("*", "nvfp4"),), kv_window=WINDOW).resolve(LAYERS)
# Needs heads of a power of two.
PRECISIONS["rotated"] = PrecisionPolicy((Rule("*", "nvfp4"),), 3, rotate_v=True).resolve(LAYERS)

FULL = GuidancePlan(layers="all", sites=fp4.SITES, bits=4)
ONE_BIT = dataclasses.replace(FULL, bits=1)
REPLAY = dataclasses.replace(FULL, rounding="replay")
LAST_HALF = dataclasses.replace(ONE_BIT, layers="last:0.5")

PROMPTS, WIDTH, SAMPLES, RESPONSE = 3, 10, 2, 5
ROWS, LENGTH = PROMPTS * SAMPLES, WIDTH + RESPONSE
PROMPT_LENGTHS = np.array([10, 1, 4], np.int32)
TEMPERATURE, EOS = 1.6, (13, 21)


_init = jax.jit(model.init, static_argnums=0)
to_rollout = jax.jit(sync.to_rollout, static_argnums=1)


@cache
def params_of(config: ModelConfig, seed: int = 0) -> dict:
    """Random FP32 parameters with logits and routes that are far from uniform, norms from 1."""
    params = _init(config, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def spread(path, a):
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return a * rng.uniform(0.5, 1.5, a.shape).astype(np.float32)
        return a * (20.0 if "embed" in name or "router" in name else 1.0)

    return jax.tree_util.tree_map_with_path(spread, params)


@cache
def rollout_params_of(config: ModelConfig, policy: str, seed: int = 0) -> dict:
    return to_rollout(params_of(config, seed), PRECISIONS[policy])


def random_tokens(rows: int, length: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, length), 1, VOCAB, jnp.int32)


def prompts(seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """PROMPTS right-padded prompts of unequal lengths."""
    inside = np.arange(WIDTH)[None] < PROMPT_LENGTHS[:, None]
    return jnp.where(inside, random_tokens(PROMPTS, WIDTH, seed), 0), jnp.asarray(PROMPT_LENGTHS)


def keys(seed: int = 0, iteration: int = 0) -> jax.Array:
    """Request keys of PROMPTS x SAMPLES requests."""
    ids = jnp.arange(ROWS, dtype=jnp.int32)
    return request_keys(seed, iteration, ids // SAMPLES, ids % SAMPLES)


@partial(jax.jit, static_argnames=("config", "numerics", "noise"))
def forward(config, numerics, params, tokens, **arguments):
    """model.Output and FP32 logits."""
    out = model.apply(config, params, tokens, numerics, **arguments)
    return out, model.logits(params, out.hidden)


def audited(config: ModelConfig, policy: str, plan=fp4.NO_GUIDANCE, **what) -> model.Numerics:
    """Numerics that leave every row's whole codes."""
    return model.numerics(config, PRECISIONS[policy], plan=plan, audit_rows=ROWS, **what)


def empty_cache(config: ModelConfig, policy: str) -> tuple:
    """For ROWS sequences, with two slots more than they need."""
    return model.empty_cache(config, PRECISIONS[policy], ROWS, LENGTH + 2)


def decode(config: ModelConfig, policy: str, kv_cache: tuple, tokens: jax.Array):
    """Feeds tokens [ROWS, steps] one at a time: logits [ROWS, steps, vocab], audit, cache."""
    numerics, params = audited(config, policy), rollout_params_of(config, policy)
    step_logits, audits = [], []
    for step in range(tokens.shape[1]):
        at = jnp.full((ROWS, 1), step, jnp.int32)
        token = tokens[:, step : step + 1]
        out, logits = forward(config, numerics, params, token, positions=at, cache=kv_cache)
        kv_cache = out.cache
        step_logits.append(logits)
        audits.append(out.record.audit)
    join = lambda *parts, axis: np.concatenate([np.asarray(p) for p in parts], axis)
    audit = jax.tree.map(partial(join, axis=2), *audits)
    return join(*step_logits, axis=1), audit, kv_cache


@cache
def engine(policy: str = "nvfp4", config: ModelConfig = MOE, **settings) -> Engine:
    """The engine of `policy`; it keeps whole codes of all rows."""
    settings = {"plan": FULL, "audit_rows": ROWS, "temperature": TEMPERATURE} | settings
    return Engine(
        EngineConfig(config, PRECISIONS[policy], EOS, RESPONSE, samples=SAMPLES, **settings)
    )


@cache
def rollout(policy: str = "nvfp4", config: ModelConfig = MOE, *, seed: int = 0, **settings):
    """A rollout of the shared prompts; `seed` is that of the parameters."""
    run = engine(policy, config, **settings)
    return run(rollout_params_of(config, policy, seed), *prompts(), keys(), version=3)


def guidance_of(rolled, plan: GuidancePlan, config=MOE, policy="nvfp4") -> model.Guidance:
    """What `plan` would have kept of a rollout whose whole codes are at hand."""
    planned = model.planned_layers(config, PRECISIONS[policy], plan)
    sites = {
        site: fp4.compact(
            rolled.audit[site].codes[np.array(layers)],
            rolled.audit[site].scale_bytes[np.array(layers)],
            plan,
        )
        for site, layers in planned.items()
    }
    return model.Guidance(sites, rolled.guidance.recorded, rolled.version)


def signless(codes) -> np.ndarray:
    """Codes with -0 written as +0."""
    codes = np.asarray(codes)
    return np.where(codes == 8, 0, codes)


def agreement(mine, theirs, where) -> dict[str, float]:
    """{site: share of codes that agree} over tokens `where` [B, S]; sites of two audits."""
    where = np.asarray(where)
    return {
        site: float(np.mean((signless(mine[site].codes) == signless(theirs[site].codes))[:, where]))
        for site in theirs
    }


# --- heads of a model ---


def numpy_logprobs(hidden, unembed, targets, temperature):
    logits = np.asarray(hidden, np.float64) @ np.asarray(unembed, np.float64).T / temperature
    logits -= logits.max(-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(logp, targets[..., None], -1)[..., 0]
    return picked, -(np.exp(logp) * logp).sum(-1)


def head_example(n, t, d, v, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden, unembed = rng.normal(size=(n, t, d)), rng.normal(size=(v, d))
    return hidden.astype(dtype), unembed.astype(dtype), rng.integers(0, v, (n, t))
