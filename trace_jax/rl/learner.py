"""The learner: one policy update from a rollout, guided as the mode says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from trace_jax import model, sync
from trace_jax.config import Config
from trace_jax.model import Numerics
from trace_jax.model.layout import Layout
from trace_jax.model.remat import points_of
from trace_jax.modes import Mode
from trace_jax.rl.batches import (
    Batch,
    forward_rows,
    join,
    merge,
    response_rows,
    response_window,
    split,
    take,
)
from trace_jax.rl.corrections import correction_weights
from trace_jax.rl.logprobs import centering_term, chunked_logprobs, top_logprobs
from trace_jax.rl.losses import (
    aggregation_weights,
    algorithm,
    kl_to_reference,
    masked_mean,
    policy_loss,
)
from trace_jax.rl.mismatch import logprob_ledger
from trace_jax.rl.packing import Packing, pack
from trace_jax.rl.staleness import apply_staleness, ledger_by_lag
from trace_jax.rollout import Rollout


@struct.dataclass
class TrainState:
    """What training changes.

    Attributes:
      params: FP32 masters.
      opt_state: optax state, FP32 moments.
      version: int32; optimizer-visible policy version, one a rollout consumed.
      bad_steps: int32; non-finite optimizer steps in a row, each skipped.
      skipped: int32; all of them.
    """

    params: dict
    opt_state: optax.OptState
    version: jax.Array
    bad_steps: jax.Array
    skipped: jax.Array


def optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW on FP32 masters behind one clip of the summed gradient."""
    o = config.optim
    rate = o.learning_rate
    if o.warmup_steps:
        rate = optax.linear_schedule(0.0, o.learning_rate, o.warmup_steps)
    return optax.chain(
        optax.clip_by_global_norm(o.clip_norm),
        optax.adamw(rate, b1=o.b1, b2=o.b2, weight_decay=o.weight_decay),
    )


def new_state(params: dict, tx: optax.GradientTransformation) -> TrainState:
    zero = lambda: jnp.zeros((), jnp.int32)
    return TrainState(params, tx.init(params), zero(), zero(), zero())


def apply_gradients(state: TrainState, grads, tx) -> tuple[TrainState, dict]:
    """One optimizer step; a non-finite gradient changes nothing and is counted."""
    norm = optax.tree.norm(grads)
    ok = jnp.isfinite(norm)
    safe = jax.tree.map(lambda g: jnp.where(ok, g, 0.0), grads)
    updates, opt_state = tx.update(safe, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, old)
    bad = (~ok).astype(jnp.int32)
    state = state.replace(
        params=keep(params, state.params),
        opt_state=keep(opt_state, state.opt_state),
        bad_steps=(state.bad_steps + 1) * bad,
        skipped=state.skipped + bad,
    )
    return state, {"grad_norm": norm, "skipped": bad.astype(jnp.float32)}


class Learner:
    """Compiled functions of one configuration: `update`, `score`, `audit`, `sampler_head`.

    Args:
      layout: how tokens lie over devices, None on one; mini- and micro-batches take rows of
        each device.
    """

    def __init__(self, config: Config, mode: Mode, layout: Layout | None = None):
        self.config, self.mode = config, mode
        self.ways = 1 if layout is None else layout.row_ways
        self.settings = algorithm(config.rl.algorithm)
        self.tx = optimizer(config)
        guided = bool(model.planned_layers(config.model, mode.trainer, mode.plan))
        build = partial(
            model.numerics,
            config.model,
            mode.trainer,
            plan=mode.plan,
            guide=guided,
            layout=layout,
        )
        self.guided = guided
        self.numerics = build()
        self.audit_numerics = build(audit_rows=config.ledger.audit_rows)
        self.rollout_numerics = model.numerics(config.model, mode.rollout, layout=layout)
        self.update = jax.jit(self._update, donate_argnums=0)
        self.score = jax.jit(self._score)
        self.audit = jax.jit(self._audit)
        self.sampler_head = jax.jit(self._sampler_head)

    # --- forward ---------------------------------------------------------------

    def _forward(self, params, batch: Batch, numerics: Numerics, remat=None) -> model.Output:
        rows = forward_rows(batch, self.ways)
        tokens = rows.pop("tokens")
        return model.apply(self.config.model, params, tokens, numerics, **rows, remat=remat)

    @property
    def _head(self) -> dict:
        c = self.config
        # A chunk gathers the unembedding and sums its gradient over the devices: no more of them
        # than the logits' memory on each asks for.
        chunk = c.rl.logprob_chunk * self.ways
        return {"temperature": c.rollout.temperature, "chunk": chunk, "ways": self.ways}

    def _logprobs(self, params, batch: Batch, remat=None):
        """Log-probs, entropy and centring term (or None) FP32 [N, R] of the response tokens,
        and the balance loss."""
        out = self._forward(params, batch, self.numerics, remat)
        hidden = response_rows(out.hidden, batch, self.ways)
        targets = response_window(batch.tokens, batch.prompt_length, batch.mask.shape[1])
        unembedding = model.unembedding(params, out.hidden.dtype)
        logp, entropy = chunked_logprobs(hidden, unembedding, targets, **self._head)
        centre = None
        if batch.sampler is not None:
            centre = centering_term(hidden, unembedding, *batch.sampler, **self._head)
        return logp, entropy, centre, out.balance

    def _score(self, params, rollout: Rollout, version, packing=None) -> jax.Array:
        """FP32 [N, R] log-probs of the sampled tokens under `params`, no gradient."""
        batch = self._batch(rollout, jnp.zeros(rollout.tokens.shape[0]), version)
        parts = split(batch._replace(packing=packing), self.pieces, self.ways)
        logp = jax.lax.map(lambda part: self._logprobs(params, part)[0], parts)
        return merge(logp, self.ways)

    def _sampler_head(self, params, rollout: Rollout):
        """The sampler's likeliest tokens at each response token: (int32, FP32) [N, R, k].

        Args:
          params: rollout parameters. Its forward is run again in the rollout's formats on
            the rollout's routes: engine noise, where there is any, is not in it.
        """
        params = sync.decode_weights(params)
        out = model.apply(
            self.config.model,
            params,
            rollout.tokens,
            self.rollout_numerics,
            valid=rollout.valid,
            routes=rollout.routes.astype(jnp.int32) if self.config.model.num_experts else None,
        )
        width = self.config.task.max_response
        hidden = response_window(out.hidden, rollout.prompt_length - 1, width)
        unembedding = model.unembedding(params, out.hidden.dtype)
        return top_logprobs(hidden, unembedding, self.config.rl.score_centering, **self._head)

    def _audit(self, params, rollout: Rollout, version):
        """The trainer's whole codes and routes on the rollout's audit rows."""
        rows = self.config.ledger.audit_rows
        batch = self._batch(rollout, jnp.zeros(rollout.tokens.shape[0]), version)
        batch = take(batch, lambda a, axis: jax.lax.slice_in_dim(a, 0, rows, axis=axis))
        # Routes are the live router's here: their agreement is what is asked.
        free = batch._replace(routes=None)
        live = self._forward(params, free, self.numerics).record.routes
        return self._forward(params, batch, self.audit_numerics).record.audit, live

    # --- batch -------------------------------------------------------------------

    @property
    def pieces(self) -> int:
        """Micro-batches of a whole rollout."""
        return self.config.rl.minibatches * self.config.rl.micro_batches

    def packing(self, lengths: np.ndarray) -> Packing | None:
        """How sequences of `lengths` int [N] share the forward's rows; None: one a row."""
        c = self.config
        if not c.rl.pack_length:
            return None
        return pack(lengths, c.max_length, c.rl.pack_length, self.ways * self.pieces)

    def _batch(
        self, rollout: Rollout, advantages, version, old=None, ref=None, live=None, sampler=None
    ) -> Batch:
        """`live` bool [N]: rows that count; the others have no loss."""
        width = self.config.task.max_response
        window = partial(response_window, prompt_length=rollout.prompt_length, width=width)
        inside = jnp.arange(width)[None] < (rollout.length - rollout.prompt_length)[:, None]
        mask = window(rollout.mask) & inside
        if live is not None:
            mask = mask & live[:, None]
        guidance, guard = None, None
        if self.guided:
            guidance, guard = apply_staleness(rollout.guidance, self.mode.plan, version)
        replay = self.config.rl.routing_replay and self.config.model.num_experts
        return Batch(
            tokens=rollout.tokens,
            valid=rollout.valid,
            prompt_length=rollout.prompt_length,
            mask=mask,
            logp_rollout=window(rollout.logp),
            advantages=advantages,
            weights=jnp.zeros(mask.shape, jnp.float32),
            old_logp=old,
            ref_logp=ref,
            sampler=sampler,
            routes=rollout.routes.astype(jnp.int32) if replay else None,
            guidance=guidance,
            guard=guard,
        )

    # --- update ------------------------------------------------------------------

    def _loss(self, params, batch: Batch):
        rl, s = self.config.rl, self.settings
        logp, entropy, centre, balance = self._logprobs(params, batch, points_of(rl.remat))
        fixed = jax.lax.stop_gradient(logp)
        # The ratio measures how far the policy has moved since `old`; the correction,
        # what lay between the rollout and `old`. Together they count every gap once.
        old = fixed if batch.old_logp is None else batch.old_logp
        correction, corrected = correction_weights(
            old, batch.logp_rollout, batch.mask, kind=rl.correction, cap=rl.correction_cap
        )
        loss, metrics = policy_loss(
            logp,
            old,
            batch.advantages,
            batch.mask,
            batch.weights * correction,
            clip_low=s["clip_low"],
            clip_high=s["clip_high"],
            level=s["level"],
            dual_clip=s["dual_clip"],
        )
        if centre is not None:
            centred = batch.weights * batch.advantages[:, None] * centre
            loss = loss + jnp.sum(jnp.where(batch.mask, centred, 0.0))
        if batch.ref_logp is not None:
            kl = kl_to_reference(logp, batch.ref_logp, batch.mask, batch.weights)
            loss = loss + rl.kl_coef * kl
        # Every micro-batch adds its share, so that the sum is one mean.
        loss = loss + rl.balance_coef * balance / rl.micro_batches
        metrics |= {f"correction/{k}": v for k, v in corrected.items()}
        metrics["entropy"] = masked_mean(entropy, batch.mask)
        metrics["balance"] = balance
        return loss, (metrics, fixed)

    def _step(self, state: TrainState, batch: Batch):
        """One optimizer step over `batch`, micro-batch by micro-batch."""
        weights = aggregation_weights(
            batch.mask, self.settings["aggregation"], max_length=self.config.task.max_response
        )
        micro = split(batch._replace(weights=weights), self.config.rl.micro_batches, self.ways)

        def add(total, part):
            (loss, aux), grads = jax.value_and_grad(self._loss, has_aux=True)(state.params, part)
            return jax.tree.map(jnp.add, total, (loss, grads)), aux

        zero = (jnp.float32(0.0), jax.tree.map(jnp.zeros_like, state.params))
        (loss, grads), (metrics, logp) = jax.lax.scan(add, zero, micro)
        state, stepped = apply_gradients(state, grads, self.tx)
        metrics = join(metrics)
        return state, ({**metrics, **stepped, "loss": loss}, merge(logp, self.ways))

    def _update(
        self,
        state: TrainState,
        rollout: Rollout,
        advantages,
        live,
        old,
        ref,
        sampler=None,
        packing=None,
    ):
        """One update: `rl.minibatches` optimizer steps on one rollout.

        Args:
          state: donated.
          advantages: FP32 [N]. live: bool [N], rows that were scored.
          old, ref: FP32 [N, R] or None; None for `old` means the learner's own
            log-probs of the same forward (ratio exactly 1).
          sampler: what `sampler_head` gives, with rl.score_centering; else None.
          packing: what `packing` gives.

        Returns:
          new state (version + 1), metrics with the mismatch ledger of the first pass
          over each row.
        """
        if self.config.rl.old_logprobs == "rollout":
            width = self.config.task.max_response
            old = response_window(rollout.logp, rollout.prompt_length, width)
        batch = self._batch(rollout, advantages, state.version, old, ref, live, sampler)
        batch = batch._replace(packing=packing)
        lag = state.version - rollout.version
        steps = split(batch, self.config.rl.minibatches, self.ways)
        state, (metrics, logp) = jax.lax.scan(self._step, state, steps)
        metrics = join(metrics)
        compared = (merge(logp, self.ways), batch.logp_rollout, batch.mask, advantages)
        ledger = logprob_ledger(*compared)
        if most := self.config.rl.max_version_lag:
            ledger |= ledger_by_lag(*compared, lag, most)
        metrics |= {f"mismatch/{k}": v for k, v in ledger.items()}
        metrics["bad_steps"] = state.bad_steps
        return state.replace(version=state.version + 1), metrics
