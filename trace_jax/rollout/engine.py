"""Prefill and multi-token decode as one compiled program a batch shape."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax import model, sync
from trace_jax.fp4 import NO_GUIDANCE, GuidancePlan, LayerPrecision
from trace_jax.model import NOT_RECORDED, ModelConfig
from trace_jax.model.layout import Layout
from trace_jax.model.specs import Guidance
from trace_jax.rollout.record import Rollout, widen, write_at
from trace_jax.rollout.sampling import sample


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static settings of a rollout.

    Attributes:
      model: shape of the model.
      precision: formats a layer.
      plan: guidance to record.
      max_response: tokens a response may have, its EOS included.
      samples: responses a prompt.
      temperature: 0 is greedy (evaluation only).
      eos_ids: tokens that end a response.
      audit_rows: sequences whose whole codes are kept.
      noise: relative noise at the sites (emulates a foreign engine).
      layout: how rows lie over devices, for the batch engine; None on one.
    """

    model: ModelConfig
    precision: tuple[LayerPrecision, ...]
    eos_ids: tuple[int, ...]
    max_response: int
    samples: int = 1
    temperature: float = 1.0
    plan: GuidancePlan = NO_GUIDANCE
    audit_rows: int = 0
    noise: float = 0.0
    layout: Layout | None = None

    @property
    def numerics(self) -> model.Numerics:
        return self._numerics(self.audit_rows)

    @property
    def prefill_numerics(self) -> model.Numerics:
        # Prompts are prefilled once for all their samples.
        return self._numerics(-(-self.audit_rows // self.samples))

    def _numerics(self, audit_rows: int) -> model.Numerics:
        settings = dict(plan=self.plan, record=True, audit_rows=audit_rows, layout=self.layout)
        return model.numerics(self.model, self.precision, **settings)


class _State(NamedTuple):
    """Loop state; `position` is where each row's newest token stands, S once it has ended."""

    step: jax.Array
    position: jax.Array
    cache: tuple
    out: Rollout


class Engine:
    """Generates responses with fixed settings; compiles once a batch shape."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self._generate = jax.jit(partial(_generate, config))

    def __call__(
        self, params, prompts, lengths, keys, *, version=0, noise_seed=0, turn=0
    ) -> Rollout:
        """Samples `config.samples` responses a prompt.

        Args:
          params: rollout parameters (see sync.to_rollout).
          prompts: int32 [P, L] right-padded. lengths: int32 [P], at least 1.
          keys: [P * samples] request keys; the samples of a prompt are adjacent.
          version: policy version of `params`.
          noise_seed: seed of the emulated engine noise.
          turn: of an episode; every turn is prefilled anew here.

        Returns:
          Rollout of N = P * samples rows and S = L + max_response tokens.
        """
        return self._generate(params, prompts, lengths, keys, version, noise_seed)


def _generate(cfg: EngineConfig, params, prompts, lengths, keys, version, noise_seed) -> Rollout:
    params = sync.decode_weights(params)
    noise_key = jax.random.key(noise_seed) if cfg.noise else None
    state = prefill(cfg, params, prompts, lengths, keys, version, noise_key)

    def unfinished(state: _State):
        end = state.out.tokens.shape[1]
        return (state.step < cfg.max_response - 1) & jnp.any(state.position < end)

    step = partial(decode_step, cfg, params, keys, noise_key)
    return jax.lax.while_loop(unfinished, step, state).out


def prefill(cfg, params, prompts, lengths, keys, version, noise_key) -> _State:
    """Runs the prompts, lays out the buffers, draws the first tokens."""
    count, width = prompts.shape
    end = width + cfg.max_response
    valid = jnp.arange(width)[None] < lengths[:, None]
    cache = model.empty_cache(cfg.model, cfg.precision, count, end)
    out = model.apply(
        cfg.model,
        params,
        prompts,
        cfg.prefill_numerics,
        valid=valid,
        cache=cache,
        noise_key=noise_key,
        noise=cfg.noise,
    )
    last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    logits = model.logits(params, last)

    repeat = lambda a, axis: jnp.repeat(a, cfg.samples, axis=axis)
    by_layer = lambda a: widen(repeat(a, 1), end)
    rows = count * cfg.samples
    routes = jnp.where(valid[None, :, :, None], out.record.routes, NOT_RECORDED)
    lengths = repeat(lengths, 0)
    tokens, logp = sample(repeat(logits, 0), keys, lengths, cfg.temperature)
    empty = Rollout(
        tokens=widen(repeat(jnp.where(valid, prompts, 0), 0), end, 0),
        prompt_length=lengths,
        length=lengths,
        logp=jnp.zeros((rows, end), jnp.float32),
        mask=jnp.zeros((rows, end), bool),
        finished=jnp.zeros(rows, bool),
        guidance=Guidance(
            jax.tree.map(by_layer, out.record.sites),
            widen(repeat(valid, 0), end, 0),
            jnp.full(rows, version, jnp.int32),
        ),
        routes=widen(repeat(routes, 1), end, fill=NOT_RECORDED).astype(jnp.int16),
        audit=jax.tree.map(lambda a: by_layer(a)[:, : cfg.audit_rows], out.record.audit),
    )
    state = _State(jnp.int32(0), lengths, jax.tree.map(lambda a: repeat(a, 1), out.cache), empty)
    return _append(cfg, state, tokens, logp)


def _append(cfg, state: _State, tokens, logp) -> _State:
    """Puts the newly drawn tokens at `position`; ended rows have position S and take none."""
    out, at = state.out, state.position
    end = out.tokens.shape[1]
    active = at < end
    ended = active & jnp.any(tokens[:, None] == jnp.asarray(cfg.eos_ids)[None], axis=-1)
    put = lambda buffer, value: write_at(buffer, value[:, None], at, axis=0)
    out = out.replace(
        tokens=put(out.tokens, tokens),
        logp=put(out.logp, logp),
        mask=put(out.mask, active),
        length=out.length + active,
        finished=out.finished | ended,
    )
    return state._replace(position=jnp.where(ended, end, at), out=out)


def decode_step(cfg, params, keys, noise_key, state: _State) -> _State:
    """Feeds each row's newest token, keeps its record, draws the next one."""
    out, at = state.out, state.position
    end = out.tokens.shape[1]
    active = at < end
    newest = jnp.take_along_axis(out.tokens, jnp.minimum(at, end - 1)[:, None], axis=1)
    step_key = None if noise_key is None else jax.random.fold_in(noise_key, state.step + 1)
    fed = model.apply(
        cfg.model,
        params,
        newest,
        cfg.numerics,
        positions=at[:, None],
        valid=active[:, None],
        cache=state.cache,
        noise_key=step_key,
        noise=cfg.noise,
    )
    put = lambda buffer, value: write_at(buffer, value.astype(buffer.dtype), at)
    audit_at = at[: cfg.audit_rows]
    guidance = out.guidance.replace(
        sites=jax.tree.map(put, out.guidance.sites, fed.record.sites),
        recorded=write_at(out.guidance.recorded, active[:, None], at, axis=0),
    )
    out = out.replace(
        guidance=guidance,
        routes=put(out.routes, fed.record.routes),
        audit=jax.tree.map(lambda b, v: write_at(b, v, audit_at), out.audit, fed.record.audit),
    )
    tokens, logp = sample(model.logits(params, fed.hidden[:, 0]), keys, at + 1, cfg.temperature)
    moved = state._replace(
        step=state.step + 1, position=jnp.where(active, at + 1, end), cache=fed.cache, out=out
    )
    return _append(cfg, moved, tokens, logp)
