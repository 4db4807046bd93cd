"""The training loop: warm start, then rollout, reward, guided update, ledger, sync."""

import contextlib
import dataclasses
import functools
import io
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import fp4, model, modes, sync
from trace_jax.audit import first_rows
from trace_jax.checkpoint import Checkpointer
from trace_jax.config import Config, require, to_dict
from trace_jax.draws import STRIDE, Draw, fill
from trace_jax.evaluate import Evaluator
from trace_jax.ledger import code_ledger
from trace_jax.metrics import MetricWriter, ProgressLine, read_metrics
from trace_jax.parallel import (
    any_of,
    check_params,
    is_first,
    join,
    make_mesh,
    once,
    row_ways,
    rows_sharding,
    shard_params,
    shard_rows,
    to_host,
)
from trace_jax.play import Played, Player, engine_shape, episode_counts, shard_record
from trace_jax.pretrained import run_params, run_tokenizer
from trace_jax.rl.advantages import group_advantages, group_stats, informative_groups
from trace_jax.rl.learner import Learner, TrainState, new_state
from trace_jax.rollout import Engine, EngineConfig, Rollout, make_engine
from trace_jax.rollout.record import map_rows
from trace_jax.rollout.sampling import request_keys
from trace_jax.rollout_queue import Launched, RolloutQueue, check_groups
from trace_jax.runs import create_run_dir
from trace_jax.scoring import choose, episode_rewards, make_prompts, problem_set, score
from trace_jax.warmup import WarmStart, encode_examples


class TrainingStopped(RuntimeError):
    """The run ended early on purpose; the message says why and how to go on."""


@dataclasses.dataclass
class Result:
    """Outcome of `train`."""

    params: dict
    before: dict[str, float]  # held-out accuracy under FP4 inference
    after: dict[str, float]
    own: dict[str, float]  # after, in the formats that the mode's own rollout uses
    bf16: dict[str, float]  # after, unquantized
    last: dict  # the last iteration's metrics
    checkpoint: Path
    seconds: float


class Clock:
    """Seconds by part; a part ends when its arrays are ready."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str):
        start, ready = time.perf_counter(), []
        yield ready.append
        jax.block_until_ready(ready)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Interrupt:
    """First Ctrl-C: finish the step and save. Second: stop at once."""

    def __init__(self):
        self.asked = False

    def __enter__(self):
        def handle(signum, frame):
            if self.asked:
                raise KeyboardInterrupt
            self.asked = True
            print("\nstopping after this step; Ctrl-C again stops at once", file=sys.stderr)

        try:
            self._old = signal.signal(signal.SIGINT, handle)
        except ValueError:  # not the main thread: nothing to catch
            self._old = None
        return self

    def __exit__(self, *_):
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)


class Actor:
    """Rollouts of a mode: sync, prompts, sampling, rewards."""

    def __init__(self, config: Config, mode: modes.Mode, mesh):
        self.config, self.mesh = config, mesh
        self.tokenizer = run_tokenizer(config)
        self.problems = problem_set(config, "train")
        self.engine = make_engine(
            config.rollout.engine,
            EngineConfig(
                model=config.model,
                precision=mode.rollout,
                eos_ids=self.tokenizer.eos_ids,
                temperature=config.rollout.temperature,
                plan=mode.plan,
                audit_rows=config.ledger.audit_rows,
                noise=config.rollout.engine_noise,
                **engine_shape(config, config.rl.samples),
            ),
            slots=config.rollout.slots,
            turns=config.task.multiturn,
        )
        self.player = Player(config, self.engine, self.tokenizer, config.rl.samples, mesh)
        self.sync = jax.jit(lambda params: sync.to_rollout(params, mode.rollout))

    def prompts(self, step: int):
        count = self.config.rl.prompts_per_step
        problems = choose(self.problems, step, count, self.config.data_seed)
        return make_prompts(problems, self.tokenizer, self.config)

    def generate(self, params, prompts, step: int, version) -> Rollout:
        return self.play(params, prompts, step, version).rollout

    def play(self, params, prompts, step: int, version) -> Played:
        """`params` are rollout parameters. Samples depend on (seed, step, prompt, sample)."""
        samples = self.config.rl.samples
        slots = np.arange(len(prompts.problems), dtype=np.int32)
        keys = request_keys(
            self.config.seed,
            step,
            jnp.repeat(slots, samples),
            jnp.tile(jnp.arange(samples, dtype=jnp.int32), len(slots)),
        )
        noise_seed = (self.config.seed * 1_000_003 + step) % 2**31
        return self.player(params, prompts, keys, version=version, noise_seed=noise_seed)

    def judge(self, played: Played, prompts):
        """Rewards FP32 [P, samples], valid bool [P, samples], and what to count."""
        samples = self.config.rl.samples
        if played.transcripts is None:
            return *score(played.rollout, prompts, self.tokenizer, samples), {}
        return (
            *episode_rewards(played.transcripts, prompts, samples),
            episode_counts(played.transcripts),
        )


class Trainer:
    """One run: everything compiled, and the state that checkpoints hold."""

    def __init__(self, config: Config, workdir: Path):
        self.config, self.workdir = config, Path(workdir)
        self.mesh = make_mesh(config.mesh)
        _check_rows(config, self.mesh)
        shapes = jax.eval_shape(lambda key: model.init(config.model, key), jax.random.key(0))
        check_params(shapes, self.mesh)
        self.mode = modes.resolve(config)
        self.actor = Actor(config, self.mode, self.mesh)
        self.learner = Learner(config, self.mode, row_ways(self.mesh))
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
        draws = self.queue.judged(lambda launched: self._judge(launched, Clock()))
        if draws:
            kept = ("rollout", "rewards", "valid")
            state = state | {"queue": [{k: getattr(d, k) for k in kept} for d in draws]}
        metadata = {"step": step, "before": before, "queue": [d.counts for d in draws]}
        return self.checkpoints.save(step, state, metadata)

    def restore(self, like: dict) -> tuple[int, dict, dict]:
        """(step, state, evaluation before RL) of the newest checkpoint; the queue is refilled."""

        def with_queue(metadata):
            waiting = len(metadata["queue"])
            return like | ({"queue": [self._draw_like()] * waiting} if waiting else {})

        state, metadata = self.checkpoints.restore(None, with_queue)
        step, samples = metadata["step"], self.config.rl.samples
        kept = zip(state.pop("queue", []), metadata["queue"], strict=True)
        draws = [Draw(**arrays, counts=counts) for arrays, counts in kept]
        for at, draw in enumerate(draws, step):
            check_groups(draw.rollout, self.actor.prompts(at), samples, self.queue.version_of(at))
        self.queue.load(draws)
        return step, state, metadata["before"]

    def _rollout_like(self, rows: int) -> Rollout:
        """Shapes, dtypes and layout of a rollout's first `rows` sequences."""
        train = jax.eval_shape(lambda: new_state(self.fresh_params(), self.learner.tx))
        prompts = self.actor.prompts(0)

        def sampled(params):
            keys = jax.random.split(jax.random.key(0), self.config.rows)
            plain = Engine(self.actor.engine.config)  # of the same shapes, and can be traced
            rollout = plain(params, *self.actor.player.opening(prompts), keys)
            return first_rows(rollout, rows)

        def placed(a, axis):
            return jax.ShapeDtypeStruct(
                a.shape, a.dtype, sharding=rows_sharding(a.shape, axis, self.mesh)
            )

        return map_rows(placed, jax.eval_shape(lambda p: sampled(self.actor.sync(p)), train.params))

    def _draw_like(self) -> dict:
        rl = self.config.rl
        shape = (rl.prompts_per_step, rl.samples)
        return {
            "rollout": self._rollout_like(self.config.rows),
            "rewards": np.zeros(shape, np.float32),
            "valid": np.zeros(shape, bool),
        }

    # --- the recorded rollout of experiments.audit ---

    def record_audit(self, step: int, train: TrainState) -> None:
        """Saves a few sequences sampled by the policy of checkpoint `step`."""
        params, version = self.actor.sync(train.params), np.int32(train.version)
        rollout = self.actor.generate(params, self.actor.prompts(step), step, version)
        rows = first_rows(rollout, self.config.ledger.audit_rows)
        self.audits.save(step, rows, {"step": step})
        self.audits.wait()

    def load_audit(self) -> Rollout:
        return self.audits.restore(None, self._rollout_like(self.config.ledger.audit_rows))[0]

    # --- one iteration -------------------------------------------------------------

    def iteration(self, step: int, state: dict) -> tuple[dict, dict]:
        """Rollout, rewards, ledger, update: (new state, metrics)."""
        clock, c = Clock(), self.config
        train: TrainState = state["train"]
        with clock.part("sync") as ready:
            params = self.actor.sync(train.params)
            ready(params)
        version = int(train.version)
        launch = lambda at: self._launch(params, at, version, clock)
        judge = lambda launched: self._judge(launched, clock)
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
            old, ref = self._fixed_logprobs(train, state, rollout)
            head = self.learner.sampler_head(params, rollout) if c.rl.score_centering else None
            train, metrics = self.learner.update(train, rollout, advantages, live, old, ref, head)
            ready(metrics)
        self._check(train, step)
        codes = codes | _agreement_by_lag(codes, version - to_host(first.rollout.version))
        metrics = jax.device_get({**metrics, **codes})
        metrics = _named(metrics) | self._measured(first, drawn, lag, clock)
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

    def _launch(self, params, step: int, version: int, clock: Clock) -> Launched:
        """Prompts of one step, and their rollout dispatched; `params` are of `version`."""
        with clock.part("prompts"):
            prompts = self.actor.prompts(step)
        with clock.part("rollout"):
            played = self.actor.play(params, prompts, step, np.int32(version))
        return Launched(step, version, prompts, played)

    def _judge(self, launched: Launched, clock: Clock) -> Draw:
        """Waits for a rollout and gives it its rewards."""
        _, version, prompts, played = launched
        rollout, samples = played.rollout, self.config.rl.samples
        with clock.part("rollout") as ready:
            ready(rollout)
        check_groups(rollout, prompts, samples, version)
        with clock.part("reward"):
            rewards, valid, counts = self.actor.judge(played, prompts)
        mask, finished = to_host(rollout.mask), to_host(rollout.finished)
        counts |= {
            "dropped_prompts": prompts.dropped,
            "unscored": int((~valid).sum()) - prompts.dropped * samples,
            "finished": float(finished.mean()),
            "response_length": int(mask.sum()) / len(mask),
            "sampled_tokens": int(mask.sum()),
        }
        return Draw(rollout, rewards, valid, counts)

    def _advantages(self, rewards, valid, lag):
        """Advantages FP32 [N] and rows that count, bool [N]: no group beyond the lag does."""
        scale = self.learner.settings["scale"]
        advantages = group_advantages(rewards, valid, scale=scale)
        valid = live = valid & (lag.reshape(valid.shape) <= self.queue.lag)
        if self.learner.settings["dynamic_sampling"]:
            # DAPO: groups that stayed flat do not dilute the token mean either.
            live = valid & np.asarray(informative_groups(rewards, valid))[:, None]
        return shard_rows((advantages.reshape(-1), jnp.asarray(live).reshape(-1)), self.mesh)

    def _fixed_logprobs(self, train, state, rollout):
        """Log-probs that must not move during the update: the ratio's, the reference's."""
        c, old, ref = self.config.rl, None, None
        if c.minibatches > 1 and c.old_logprobs == "learner":
            old = self.learner.score(train.params, rollout, train.version)
        if c.kl_coef:
            ref = self.learner.score(state["reference"], rollout, train.version)
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
    """The learner's scalars under their names in metrics.jsonl; lags that no row has are left out.
    """
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


def _check_rows(config: Config, mesh) -> None:
    """Refuses before any work what would not divide over the devices later."""
    ways = row_ways(mesh)
    parts = config.rl.minibatches * config.rl.micro_batches
    require(
        config.rollout.engine == "batch" or mesh.size == 1,
        f"rollout.engine is 'continuous', which runs on one device so far, and the mesh has "
        f"{mesh.size}; write rollout.engine='batch'",
    )
    require(
        not config.task.multiturn or jax.process_count() == 1,
        f"task.kind is {config.task.kind!r}, whose episodes one process plays so far; leave "
        "distributed.* out",
    )
    counts = {
        "rl.prompts_per_step": config.rl.prompts_per_step,
        "eval.problems": config.eval.problems,
    }
    if config.warmup.steps and not config.warmup.init_from:
        counts["warmup.batch_size"] = config.warmup.batch_size
    for path, count in counts.items():
        require(
            count % ways == 0,
            f"{path} is {count}; write a multiple of the data x fsdp = {ways} devices of the mesh",
        )
    prompts = config.rl.prompts_per_step
    require(
        prompts % (ways * parts) == 0,
        f"rl.prompts_per_step is {prompts}; write a multiple of the data x fsdp = {ways} devices "
        f"times rl.minibatches * rl.micro_batches = {parts}: each piece takes whole groups of "
        "every device",
    )


def warm_start(trainer: Trainer, stream=None) -> dict:
    """Parameters after the supervised warm start (FP32); resumes from its own checkpoint."""
    config, w = trainer.config, trainer.config.warmup
    warm = WarmStart(config)
    problems, tokenizer = trainer.actor.problems, trainer.actor.tokenizer
    begin = lambda params: shard_params(warm.init(params), trainer.mesh)
    if w.init_from:
        taken = Checkpointer(Path(w.init_from) / "warmup", 1)
        return taken.restore(None, begin(trainer.fresh_params()))[0].params
    saved = Checkpointer(trainer.workdir / "warmup", 1)
    if saved.empty():
        state, first = begin(trainer.initial_params()), 0
    else:
        state, metadata = saved.restore(None, begin(trainer.fresh_params()))
        first = metadata["step"]
    if first >= w.steps:
        return state.params
    with (
        Interrupt() as interrupt,
        ProgressLine(w.steps, first, "warm start", stream=stream) as progress,
    ):
        for step in range(first, w.steps):
            chosen = choose(problems, step, w.batch_size, config.data_seed)
            examples = encode_examples(chosen, tokenizer, config)
            state, metrics = warm.step(state, *shard_rows(examples, trainer.mesh))
            if (step + 1) % max(w.steps // 10, 1) == 0:
                progress.update(step, jax.device_get(metrics))
            else:
                progress.advance()
            asked = any_of(interrupt.asked)
            if asked or step + 1 == w.steps:
                saved.save(step + 1, state, {"step": step + 1})
            if asked:
                saved.wait()
                _stop(trainer, f"warm start, step {step + 1}")
    saved.wait()
    return state.params


def train(
    config: Config, workdir, *, resume: bool = False, params: dict | None = None, stream=None
) -> Result:
    """Runs a configuration to its end, or goes on where it stopped.

    Args:
      workdir: run folder; see `runs.create_run_dir` for what it accepts.
      resume: go on from the newest checkpoint in `workdir`.
      params: FP32 parameters to start RL from, in place of the warm start.
      stream: where the progress goes; standard error by default.

    Raises:
      TrainingStopped: Ctrl-C, after a save, or too many non-finite steps in a row.
      ConfigError, ValueError, CheckpointError: one line that says what to write.
    """
    begun = time.perf_counter()
    join(config.distributed)
    stream = stream if is_first() else io.StringIO()
    trainer = Trainer(config, workdir)
    if config.warmup.init_from and params is None and trainer.checkpoints.empty():
        Checkpointer(Path(config.warmup.init_from) / "warmup", 1).read_metadata()  # or refuses
    if resume:
        done = trainer.checkpoints.latest_step() or 0
        require(
            done <= config.rl.steps,
            f"rl.steps is {config.rl.steps} and the run is at step {done} already; write {done} or "
            "more",
        )
    once(lambda: create_run_dir(trainer.workdir, to_dict(config), resume))
    if not trainer.checkpoints.empty():
        first, state, before = trainer.restore(trainer.start(trainer.fresh_params()))
    else:
        state = trainer.start(warm_start(trainer, stream) if params is None else params)
        first, before = 0, trainer.evaluate(state["train"].params)
        trainer.save(0, state, before)
    state, last = _loop(trainer, state, first, before, stream)
    final = state["train"]
    trainer.record_audit(config.rl.steps, final)
    judged = functools.cache(lambda evaluate: evaluate(final.params))
    after, own, bf16 = map(judged, (trainer.evaluate, trainer.evaluate_own, trainer.evaluate_bf16))
    path = trainer.checkpoints.directory / str(config.rl.steps)
    return Result(final.params, before, after, own, bf16, last, path, time.perf_counter() - begun)


def _loop(trainer: Trainer, state: dict, first: int, before: dict, stream):
    c = trainer.config
    row = next(reversed(read_metrics(trainer.workdir)), {})  # if no step is left to run
    with (
        MetricWriter(trainer.workdir, first) if is_first() else contextlib.nullcontext() as writer,
        ProgressLine(c.rl.steps, first, "RL", stream=stream) as progress,
        Interrupt() as interrupt,
        trainer.checkpoints,
    ):
        for step in range(first, c.rl.steps):
            trainer.checkpoints.check()
            state, metrics = trainer.iteration(step, state)
            done = step + 1
            if c.eval.every and done % c.eval.every == 0:
                scores = trainer.evaluate(state["train"].params)
                metrics |= {f"eval/{k}": v for k, v in scores.items()}
            row = writer.write(step, metrics) if writer else {"step": step, **metrics}
            progress.update(step, row)
            asked = any_of(interrupt.asked)
            if done % c.checkpoint.every == 0 or asked or done == c.rl.steps:
                trainer.save(done, state, before)
            if asked and done < c.rl.steps:
                trainer.checkpoints.wait()
                _stop(trainer, f"step {done}")
    return state, row


def _stop(trainer: Trainer, where: str):
    raise TrainingStopped(
        f"stopped at {where}; saved. Go on with the same command and --resume "
        f"--workdir={trainer.workdir}"
    )
