"""Whole batches through the continuous engine: `Engine`'s interface, fewer slots than rows."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.fp4 import LayerPrecision
from trace_jax.kernels import cuda_build, dispatch
from trace_jax.model import ModelConfig, pools
from trace_jax.rollout import memory
from trace_jax.rollout.continuous import ContinuousEngine
from trace_jax.rollout.engine import EngineConfig
from trace_jax.rollout.programs import CacheConfig, ProgramConfig
from trace_jax.rollout.record import Rollout

logger = logging.getLogger(__name__)
PAGE, CHUNK = 64, 256


class ContinuousBatches:
    """Generates responses with a fixed number of slots; compiles once a batch shape.

    With `turns`, rows whose prompt begins with what the same row had at the last turn, under
    the same weights, are continued in place: that is how episodes run.

    Args:
      config: as for the batch engine.
      slots: sequences that decode together; 0: as many as a batch has rows.
      turns: rows are continued from call to call.
    """

    def __init__(self, config: EngineConfig, slots: int = 0, *, turns: bool = False):
        self.config, self.slots, self.turns = config, slots, turns
        self._engine: ContinuousEngine | None = None
        self._shape, self._weights, self._held = None, None, {}

    def __call__(
        self, params, prompts, lengths, keys, *, version=0, noise_seed=0, turn=0
    ) -> Rollout:
        """See `Engine.__call__`: the same arguments, the same Rollout.

        With `turns`, rows of a later `turn` go on in place; one that is given no more than
        it has is over, and keeps what it has.
        """
        prompts, lengths = np.asarray(prompts), np.asarray(lengths)
        samples, new = self.config.samples, self.config.max_response
        width = prompts.shape[1] + new
        self._prepare(params, len(prompts) * samples, prompts.shape[1], int(version))
        run = self._engine
        run.noise_seed = noise_seed
        if not self.turns:
            return run.generate(prompts, lengths, keys, samples, new)
        rows = [prompts[row, : lengths[row]].tolist() for row in range(len(prompts))]
        if turn == 0:
            for held in self._held.values():
                run.scheduler.let_go(held)
            self._held = {}
        for row, tokens in enumerate(rows):
            self._go_on(row, tokens, keys[row])
        while not run.scheduler.idle:
            run.step()
        rollout = run.rollout([self._held[row] for row in range(len(rows))], width)
        return _of_this_turn(rollout, jnp.asarray(lengths))

    def _go_on(self, row: int, tokens: list[int], key) -> None:
        run, new, held = self._engine, self.config.max_response, self._held.get(row)
        if held is not None and held.tokens[: len(tokens)] == tokens:
            return  # over already
        known = held is not None and tokens[: len(held.tokens)] == held.tokens
        if known and len(tokens) > len(held.tokens):
            run.extend(held, tokens[len(held.tokens) :], new)
            return
        if held is not None:
            run.scheduler.let_go(held)
        self._held[row] = run.submit(row, tokens, key, new, hold=True)

    def _prepare(self, params, rows: int, width: int, version: int) -> None:
        if self._shape != (rows, width):
            self._engine, self._shape, self._weights = (
                self._build(rows, width, params),
                (rows, width),
                None,
            )
        # One small leaf stands for all: a sync makes every leaf anew.
        mark = params["final_norm"]["weight"]
        if not self.turns or mark is not self._weights or version != self._engine.version:
            self._engine.load(params, version)
            self._weights, self._held = mark, {}

    def _build(self, rows: int, width: int, params) -> ContinuousEngine:
        c = self.config
        programs = program_config(c, rows, width, slots=self.slots, turns=self.turns)
        kernels = _kernels_fit(c.model, c.precision)
        cache = dataclasses.replace(programs.cache, kernels=kernels)
        programs = dataclasses.replace(programs, cache=cache)
        free = memory.free_bytes()
        if free is not None:
            # Rollout parameters are there already; what is laid out anew is about as large.
            weights = sum(a.nbytes for a in jax.tree.leaves(params))
            plan = memory.plan_memory(programs, weights, free, rows=rows)
            logger.info("rollout engine: %s", plan)
            fits = dataclasses.replace(cache, pages=min(cache.pages, plan.pages))
            programs = dataclasses.replace(programs, cache=fits)
        return ContinuousEngine(programs, rows)


def program_config(
    c: EngineConfig, rows: int, width: int, *, slots: int, turns: bool
) -> ProgramConfig:
    """Programs for `rows` sequences with prompts of up to `width`, in plain layouts.

    `slots`: sequences that decode together, 0 for all. `turns`: every sequence may go on.
    """
    slots = min(slots or rows, rows)
    length = width + c.max_response
    cache = CacheConfig(
        slots=max(slots, c.audit_rows),
        pages=rows * (-(-length // PAGE) + 1),
        length=length,
        page=PAGE,
        steps=min(16, c.max_response),
        chunk=min(CHUNK, -(-width // PAGE) * PAGE),
        prefill_rows=min(8, rows),
        # Of the prompts whose samples run together and of the next, and of every episode.
        kept=-(-slots // c.samples) + 1 + (rows if turns else 0),
    )
    return ProgramConfig(
        c.model, c.precision, cache, c.eos_ids, c.temperature, c.plan, c.audit_rows, c.noise
    )


def _of_this_turn(rollout: Rollout, lengths) -> Rollout:
    """What was drawn in this call counts as the response; all before it as the prompt."""
    here = jnp.arange(rollout.tokens.shape[1])[None] >= lengths[:, None]
    return rollout.replace(
        prompt_length=lengths.astype(jnp.int32),
        mask=rollout.mask & here,
        logp=jnp.where(here, rollout.logp, 0.0),
    )


def _kernels_fit(model: ModelConfig, precision: tuple[LayerPrecision, ...]) -> bool:
    """Whether this machine's kernels can run the model; says once why not."""
    reasons = {cuda_build.hopper_refusal()} | {
        pools.kernel_refusal(model, precision[i], PAGE) for i in model.attention_layers
    }
    if model.hidden % 16 or model.expert_dim % 16:
        reasons.add(f"widths {model.hidden} and {model.expert_dim} are no multiples of 16")
    reasons.discard(None)
    if reasons and dispatch.platform() == "gpu":
        logger.info("rollout engine: plain XLA, since %s", "; ".join(sorted(reasons)))
    return not reasons
