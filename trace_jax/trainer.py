"""The trainer of a run: what is compiled, the state that checkpoints hold, one iteration."""

import copy
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import fp4, model, modes, sync
from trace_jax.actor import Actor
from trace_jax.audit import first_rows
from trace_jax.checkpoint import Checkpointer
from trace_jax.clock import Clock
from trace_jax.config import Config, ConfigError, require
from trace_jax.draws import STRIDE, Draw, fill
from trace_jax.evaluate import Evaluator
from trace_jax.ledger import code_ledger
from trace_jax.parallel import (
    ACTOR,
    LEARNER,
    check_params,
    make_mesh,
    named_rows,
    row_ways,
    shard_params,
    shard_rows,
    split_meshes,
    to_host,
    token_layout,
)
from trace_jax.play import shard_record
from trace_jax.pretrained import run_params
from trace_jax.rl.advantages import group_advantages, group_stats, informative_groups
from trace_jax.rl.learner import Learner, TrainState, new_state
from trace_jax.rl.packing import Packing, packing_counts
from trace_jax.rollout import Rollout
from trace_jax.rollout.data_parallel import refusal
from trace_jax.rollout_queue import RolloutQueue, check_groups


class TrainingStopped(RuntimeError):
    """The run ended early on purpose; the message says why and how to go on."""


class Trainer:
    """One run: everything compiled, and the state that checkpoints hold."""

    def __init__(self, config: Config, workdir: Path):
        self.config, self.workdir = config, Path(workdir)
        if config.rollout.devices:
            self.mesh, actor_mesh = split_meshes(config.mesh, config.rollout.devices)
        else:
            self.mesh = actor_mesh = make_mesh(config.mesh)
        _check_rows(config, self.mesh, actor_mesh)
        shapes = jax.eval_shape(lambda key: model.init(config.model, key), jax.random.key(0))
        check_params(shapes, self.mesh)
        self.mode = modes.resolve(config)
        self.actor = Actor(config, self.mode, actor_mesh, self.mesh)
        self.learner = Learner(config, self.mode, token_layout(self.mesh))
        self.queue = RolloutQueue(config.rl.max_version_lag)
        evaluator = functools.cache(
            lambda precision: Evaluator(config, precision, self.mesh, self.actor.tokenizer)
        )
        self.evaluate = evaluator(modes.fp4_precision(config))
        self.evaluate_own = evaluator(self.mode.rollout)
        self.evaluate_bf16 = evaluator(modes.bf16_precision(config))
        every = fp4.GuidancePlan(layers="all", sites=fp4.SITES)
        layers = model.planned_layers(config.model, self.mode.trainer, every)
        self.code_ledger = jax.jit(functools.partial(code_ledger, layers=layers))
        self.checkpoints = Checkpointer(self.workdir / "checkpoints", config.checkpoint.keep)
        self.audits = Checkpointer(self.workdir / "audit", 1)
        planned = model.planned_layers(config.model, self.mode.trainer, self.mode.plan)
        plan = dataclasses.replace(self.mode.plan, sites=tuple(planned))
        self.bytes_per_token = fp4.guidance_bytes_per_token(config.model, plan)

    def again(self, config: Config, workdir: Path) -> "Trainer":
        """A trainer with another seed and folder, and this one's compiled programs.

        Raises:
          ConfigError: `config` differs in more than its seed.
        """
        same = dataclasses.replace(config, seed=self.config.seed) == self.config
        require(same, "programs are shared among seeds alone; write the same settings otherwise")
        twin = copy.copy(self)
        twin.config, twin.workdir = config, Path(workdir)
        twin.actor = copy.copy(self.actor)
        twin.actor.config = config
        twin.queue = RolloutQueue(config.rl.max_version_lag)
        twin.checkpoints = Checkpointer(twin.workdir / "checkpoints", config.checkpoint.keep)
        twin.audits = Checkpointer(twin.workdir / "audit", 1)
        return twin

    # --- state -------------------------------------------------------------------

    def fresh_params(self):
        init = jax.jit(lambda key: model.init(self.config.model, key))
        return shard_params(init(jax.random.key(self.config.seed)), self.mesh)

    def initial_params(self):
        """FP32 parameters that the run begins with: those of init.checkpoint, else random."""
        if not self.config.init.checkpoint:
            return self.fresh_params()
        return shard_params(run_params(self.config, self.mesh), self.mesh)

    def start(self, params) -> dict:
        """State of RL at step 0; the reference is what RL starts from."""
        params = shard_params(params, self.mesh)
        state = {"train": shard_params(new_state(params, self.learner.tx), self.mesh)}
        if self.config.rl.kl_coef:
            state["reference"] = jax.tree.map(jnp.copy, params)
        return state

    def save(self, step: int, state: dict, before: dict) -> Path:
        draws = self.queue.judged(lambda launched: self.actor.judge(launched, Clock()))
        if draws:
            kept = ("rollout", "rewards", "valid")
            state = state | {"queue": [{k: getattr(d, k) for k in kept} for d in draws]}
        metadata = {"step": step, "before": before, "queue": [d.counts for d in draws]}
        return self.checkpoints.save(step, state, metadata)

    def restore(self, like: dict) -> tuple[int, dict, dict]:
        """(step, state, evaluation before RL) of the newest checkpoint; the queue is refilled."""

        def with_queue(metadata):
            waiting = len(metadata["queue"])
            return like | ({"queue": [self.actor.draw_like()] * waiting} if waiting else {})

        state, metadata = self.checkpoints.restore(None, with_queue)
        step, samples = metadata["step"], self.config.rl.samples
        kept = zip(state.pop("queue", []), metadata["queue"], strict=True)
        draws = [Draw(**arrays, counts=counts) for arrays, counts in kept]
        for at, draw in enumerate(draws, step):
            check_groups(draw.rollout, self.actor.prompts(at), samples, self.queue.version_of(at))
        self.queue.load(draws)
        return step, state, metadata["before"]

    # --- the recorded rollout of experiments.audit ---

    def record_audit(self, step: int, train: TrainState) -> None:
        """Saves a few sequences sampled by the policy of checkpoint `step`."""
        params, version = self.actor.sync(train.params), np.int32(train.version)
        rollout = self.actor.generate(params, self.actor.prompts(step), step, version)
        rows = first_rows(rollout, self.config.ledger.audit_rows)
        self.audits.save(step, rows, {"step": step})
        self.audits.wait()

    def load_audit(self) -> Rollout:
        return self.audits.restore(None, self.actor.rollout_like(self.config.ledger.audit_rows))[0]

    # --- one iteration -------------------------------------------------------------

    def iteration(self, step: int, state: dict) -> tuple[dict, dict]:
        """Rollout, rewards, ledger, update: (new state, metrics)."""
        clock, c = Clock(), self.config
        train: TrainState = state["train"]
        with clock.part("sync") as ready:
            params = self.actor.sync(train.params)
            ready((params, self.actor.take(params)))
        version = int(train.version)
        launch = lambda at: self.actor.launch(params, at, version, clock)
        judge = lambda launched: self.actor.judge(launched, clock)
        self.queue.fill(step, launch)
        first = self.queue.take(step, judge)
        drawn = first
        if self.learner.settings["dynamic_sampling"]:
            drawn = fill(first, lambda i: judge(launch(step + i * STRIDE)))
            drawn = drawn._replace(rollout=shard_record(drawn.rollout, self.mesh))
        with clock.part("ledger") as ready:
            codes = self.code_ledger(
                first.rollout, *self.learner.audit(train.params, first.rollout, train.version)
            )
            ready(codes)
        rollout, lag = drawn.rollout, version - to_host(drawn.rollout.version)
        with clock.part("train") as ready:
            advantages, live = self._advantages(drawn.rewards, drawn.valid, lag)
            packing, packed = self._packing(rollout)
            old, ref = self._fixed_logprobs(train, state, rollout, packing)
            head = self.learner.sampler_head(params, rollout) if c.rl.score_centering else None
            train, metrics = self.learner.update(
                train, rollout, advantages, live, old, ref, head, packing
            )
            ready(metrics)
        self._check(train, step)
        codes = codes | _agreement_by_lag(codes, version - to_host(first.rollout.version))
        metrics = jax.device_get({**metrics, **codes})
        metrics = _named(metrics) | packed | self._measured(first, drawn, lag, clock)
        return {**state, "train": train}, metrics | {"weights/bytes": sync.weight_bytes(params)}

    def _measured(self, first: Draw, drawn: Draw, lag: np.ndarray, clock: Clock) -> dict:
        """Metrics of what was drawn, and of the time; `lag` int [N], in versions."""
        # Of the first draw: groups that were drawn again are not a fair sample.
        stats = {k: float(v) for k, v in group_stats(first.rewards, first.valid).items()}
        stats["mean"] = stats.pop("reward_mean")
        # A rollout that others ran beside has no time of its own.
        parts = clock.seconds.values() if self.queue.lag else [clock.seconds["rollout"]]
        return {
            **{f"reward/{k}": v for k, v in stats.items()},
            **{f"seconds/{part}": s for part, s in clock.seconds.items()},
            **{f"rollout/{k}": v for k, v in drawn.counts.items()},
            "rollout/lag": float(lag.mean()),
            "rollout/stale_groups": int((lag > self.queue.lag).sum()) // self.config.rl.samples,
            "tokens_per_second": drawn.counts["sampled_tokens"] / sum(parts),
            "guidance/bytes_per_token": self.bytes_per_token,
        }

    def _advantages(self, rewards, valid, lag):
        """Advantages FP32 [N] and rows that count, bool [N]: no group beyond the lag does."""
        scale = self.learner.settings["scale"]
        advantages = group_advantages(rewards, valid, scale=scale)
        valid = live = valid & (lag.reshape(valid.shape) <= self.queue.lag)
        if self.learner.settings["dynamic_sampling"]:
            # DAPO: groups that stayed flat do not dilute the token mean either.
            live = valid & np.asarray(informative_groups(rewards, valid))[:, None]
        return shard_rows((advantages.reshape(-1), jnp.asarray(live).reshape(-1)), self.mesh)

    def _packing(self, rollout: Rollout) -> tuple[Packing | None, dict]:
        """How the learner's forward packs the sequences, and what that leaves of the padding."""
        lengths = to_host(rollout.length)
        packing = self.learner.packing(lengths)
        if packing is None:
            return None, {}
        counts = packing_counts(packing, lengths, rollout.tokens.shape[1])
        return shard_rows(packing, self.mesh), {f"packing/{k}": v for k, v in counts.items()}

    def _fixed_logprobs(self, train, state, rollout, packing):
        """Log-probs that must not move during the update: the ratio's, the reference's."""
        c, old, ref = self.config.rl, None, None
        if c.minibatches > 1 and c.old_logprobs == "learner":
            old = self.learner.score(train.params, rollout, train.version, packing)
        if c.kl_coef:
            ref = self.learner.score(state["reference"], rollout, train.version, packing)
        return old, ref

    def _check(self, train: TrainState, step: int) -> None:
        limit = self.config.optim.max_bad_steps
        if int(train.bad_steps) >= limit:
            raise TrainingStopped(
                f"{limit} optimizer steps in a row were not finite, up to step {step}; the newest "
                f"checkpoint is of step {self.checkpoints.latest_step()}. Write a smaller "
                "optim.learning_rate and another --workdir"
            )


def _named(metrics: dict) -> dict[str, float]:
    """The learner's scalars as metrics.jsonl names them, without the lags that no row has."""
    lags = {k.split("/")[1] for k in metrics if k.startswith("mismatch/lag")}
    absent = tuple(f"mismatch/{k}/" for k in lags if not metrics[f"mismatch/{k}/tokens"])
    named = {k if "/" in k else f"train/{k}": float(v) for k, v in metrics.items()}
    named["mismatch/k3"] = named.pop("mismatch/kl_k3")
    return {k: v for k, v in named.items() if not k.startswith(absent)}


def _agreement_by_lag(codes: dict, lag: np.ndarray) -> dict:
    """The agreement of the audit rows, which one version drew, under their lag."""
    if "agreement/mean" not in codes or not lag[0]:
        return {}
    return {f"agreement/lag{lag[0]}": codes["agreement/mean"]}


def _check_rows(config: Config, mesh, actor_mesh) -> None:
    """Refuses before any work what would not divide over the devices later."""
    generating = row_ways(actor_mesh, ACTOR)
    require(
        config.rl.prompts_per_step % generating == 0,
        f"rl.prompts_per_step is {config.rl.prompts_per_step}; write a multiple of the "
        f"{generating} devices that generate",
    )
    parts = config.rl.minibatches * config.rl.micro_batches
    if config.rollout.engine == "continuous" and (reason := refusal(actor_mesh)):
        raise ConfigError(reason)
    require(
        not config.task.multiturn or jax.process_count() == 1,
        f"task.kind is {config.task.kind!r}, whose episodes one process plays so far; leave "
        "distributed.* out",
    )
    counts = {
        "rl.prompts_per_step": (config.rl.prompts_per_step, LEARNER),
        "eval.problems": (config.eval.problems, ACTOR),
    }
    if config.warmup.steps and not config.warmup.init_from:
        counts["warmup.batch_size"] = config.warmup.batch_size, LEARNER
    for path, (count, role) in counts.items():
        cut = f"{named_rows(role)} = {row_ways(mesh, role)}"
        require(
            count % row_ways(mesh, role) == 0,
            f"{path} is {count}; write a multiple of the {cut} devices of the mesh",
        )
    prompts, ways = config.rl.prompts_per_step, row_ways(mesh)
    require(
        prompts % (ways * parts) == 0,
        f"rl.prompts_per_step is {prompts}; write a multiple of the {named_rows()} = {ways} "
        f"devices times rl.minibatches * rl.micro_batches = {parts}: each piece takes whole "
        "groups of every device",
    )
