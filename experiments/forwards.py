"""One rollout recorded whole, and the trainer's forward under any plan beside it. No training."""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trace_jax import fp4, model, sync
from trace_jax.config import Config, freeze
from trace_jax.fp4 import SITES, GuidancePlan, LayerPrecision
from trace_jax.ledger import code_ledger
from trace_jax.model import ModelConfig
from trace_jax.model.specs import Guidance
from trace_jax.rl.batches import response_window
from trace_jax.rl.logprobs import chunked_logprobs
from trace_jax.rl.mismatch import logprob_ledger
from trace_jax.rollout import Engine, EngineConfig, Rollout
from trace_jax.rollout.sampling import request_keys
from trace_jax.trainer import Trainer

Formats = tuple[LayerPrecision, ...]


class Subject(NamedTuple):
    """A policy and what it is asked: `samples` responses to each of P prompts.

    `params` are a learner's; prompts int32 [P, L] right-padded, lengths int32 [P].
    """

    model: ModelConfig
    params: dict
    prompts: jax.Array
    lengths: jax.Array
    samples: int
    max_response: int
    eos_ids: tuple[int, ...]
    temperature: float = 1.0
    chunk: int = 4096  # tokens whose logits exist at a time

    @property
    def rows(self) -> int:
        return self.prompts.shape[0] * self.samples


def subject_of(trainer: Trainer, params: dict, step: int) -> Subject:
    """Parameters of a run on the prompts that it has at an RL step."""
    config, prompts = trainer.config, trainer.actor.prompts(step)
    return Subject(
        config.model,
        params,
        prompts.tokens,
        prompts.lengths,
        config.rl.samples,
        config.task.max_response,
        trainer.actor.tokenizer.eos_ids,
        config.rollout.temperature,
        config.rl.logprob_chunk,
    )


def of_run(folder: Path) -> tuple[Subject, Config, int]:
    """The newest policy of a run on the prompts of its next step, its settings and that step."""
    config = freeze(json.loads((folder / "config.json").read_text()))
    trainer = Trainer(config, folder)
    step, state, _ = trainer.restore(trainer.start(trainer.fresh_params()))
    return subject_of(trainer, state["train"].params, step), config, step


def sampler(subject: Subject, formats: Formats, noise: float):
    """A function (seed, step, noise seed) -> Rollout, every code recorded; compiles once."""
    engine = Engine(
        EngineConfig(
            subject.model,
            formats,
            subject.eos_ids,
            subject.max_response,
            samples=subject.samples,
            temperature=subject.temperature,
            audit_rows=subject.rows,
            noise=noise,
        )
    )
    params = jax.jit(lambda p: sync.to_rollout(p, formats))(subject.params)
    count = subject.prompts.shape[0]
    slots = jnp.repeat(jnp.arange(count), subject.samples)
    samples = jnp.tile(jnp.arange(subject.samples), count)

    def sample(seed: int, step: int = 0, noise_seed: int = 1) -> Rollout:
        keys = request_keys(seed, step, slots, samples)
        return engine(params, subject.prompts, subject.lengths, keys, noise_seed=noise_seed)

    return sample


def comparison(subject: Subject, formats: Formats, guide: GuidancePlan, replay: bool = True):
    """A function Rollout -> row: the trainer's forward under one plan against a rollout.

    Args:
      formats: the trainer's.
      replay: whether it takes the rollout's routes.

    The row has gap_mean, gap_p99, gap_max, kl_k3, tokens; for each quantized site
    agreement_SITE of its worst layer and agreement_SITE_layers; bytes_per_token.
    """
    planned = model.planned_layers(subject.model, formats, guide)
    measure = jax.jit(lambda p, r: _measure(subject, formats, guide, planned, replay, p, r))
    sent = dataclasses.replace(guide, sites=tuple(planned))
    size = fp4.guidance_bytes_per_token(subject.model, sent) if planned else 0.0

    def compare(rollout: Rollout) -> dict:
        ledger, codes = jax.device_get(measure(subject.params, rollout))
        row = {k: float(ledger[k]) for k in ("gap_mean", "gap_p99", "gap_max", "kl_k3")}
        row |= {"tokens": int(rollout.mask.sum()), "bytes_per_token": size}
        for site in SITES:
            layers = range(subject.model.num_layers)
            shares = [codes.get(f"agreement/{site}/layer{i}") for i in layers]
            if shares[0] is not None:
                row[f"agreement_{site}"] = min(float(s) for s in shares)
                row[f"agreement_{site}_layers"] = [round(float(s), 5) for s in shares]
        return row

    return compare


def _measure(subject, formats, guide, planned, replay, params, rollout: Rollout):
    """The ledger of the log-probs and that of the codes."""
    c = subject.model
    numerics = model.numerics(c, formats, plan=guide, guide=bool(planned), audit_rows=subject.rows)
    sites = {
        site: fp4.compact(
            rollout.audit[site].codes[jnp.array(layers)],
            rollout.audit[site].scale_bytes[jnp.array(layers)],
            guide,
        )
        for site, layers in planned.items()
    }
    width = None
    if guide.guard is not None:
        width = jnp.full(rollout.tokens.shape, guide.guard, jnp.float32)
    out = model.apply(
        c,
        params,
        rollout.tokens,
        numerics,
        valid=rollout.valid,
        guidance=Guidance(sites, rollout.guidance.recorded, rollout.version) if planned else None,
        guard=width,
        routes=rollout.routes.astype(jnp.int32) if replay and c.num_experts else None,
    )
    start, length = rollout.prompt_length, subject.max_response
    logp, _ = chunked_logprobs(
        response_window(out.hidden, start - 1, length),
        model.unembedding(params, out.hidden.dtype),
        response_window(rollout.tokens, start, length),
        temperature=subject.temperature,
        chunk=subject.chunk,
    )
    inside = jnp.arange(length)[None] < (rollout.length - start)[:, None]
    mask = response_window(rollout.mask, start, length) & inside
    sampled = response_window(rollout.logp, start, length)
    ledger = logprob_ledger(logp, sampled, mask, jnp.zeros(subject.rows))
    return ledger, code_ledger(rollout, out.record.audit, out.record.routes)
