"""A run from its beginning to its end: warm start, RL, evaluation; stops and goes on."""

import contextlib
import dataclasses
import functools
import io
import time
from pathlib import Path

import jax

from trace_jax.checkpoint import Checkpointer
from trace_jax.config import Config, require, to_dict
from trace_jax.interrupt import Interrupt
from trace_jax.metrics import MetricWriter, ProgressLine, read_metrics
from trace_jax.parallel import any_of, is_first, join, once, shard_params, shard_rows, token_layout
from trace_jax.runs import create_run_dir
from trace_jax.scoring import choose
from trace_jax.trainer import Trainer, TrainingStopped
from trace_jax.warmup import WarmStart, encode_examples


@dataclasses.dataclass
class Result:
    """Outcome of `train`."""

    params: dict
    before: dict[str, float]  # held-out accuracy under FP4 inference
    after: dict[str, float]
    own: dict[str, float]  # after, in the formats that the mode's own rollout uses
    bf16: dict[str, float]  # after, unquantized
    last: dict  # the last iteration's metrics
    checkpoint: Path | None  # None where none was asked for
    seconds: float


def warm_start(trainer: Trainer, stream=None) -> dict:
    """Parameters after the supervised warm start (FP32); resumes from its own checkpoint."""
    config, w = trainer.config, trainer.config.warmup
    warm = WarmStart(config, token_layout(trainer.mesh))
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


def warm(config: Config, workdir) -> None:
    """The warm start alone, for other runs to begin with (`warmup.init_from`)."""
    trainer = Trainer(config, workdir)
    create_run_dir(trainer.workdir, to_dict(config), trainer.workdir.exists())
    warm_start(trainer)


def train(
    config: Config,
    workdir,
    *,
    resume: bool = False,
    params: dict | None = None,
    like: Trainer | None = None,
    stream=None,
) -> Result:
    """Runs a configuration to its end, or goes on where it stopped.

    Args:
      workdir: run folder; see `runs.create_run_dir` for what it accepts.
      resume: go on from the newest checkpoint in `workdir`.
      params: FP32 parameters to start RL from, in place of the warm start.
      like: trainer of the same configuration with another seed, whose programs are used.
      stream: where the progress goes; standard error by default.

    Raises:
      TrainingStopped: Ctrl-C, after a save, or too many non-finite steps in a row.
      ConfigError, ValueError, CheckpointError: one line that says what to write.
    """
    begun = time.perf_counter()
    join(config.distributed)
    stream = stream if is_first() else io.StringIO()
    trainer = like.again(config, workdir) if like else Trainer(config, workdir)
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
        if config.checkpoint.every:
            trainer.save(0, state, before)
    state, last = _loop(trainer, state, first, before, stream)
    final = state["train"]
    trainer.record_audit(config.rl.steps, final)
    judged = functools.cache(lambda evaluate: evaluate(final.params))
    after, own, bf16 = map(judged, (trainer.evaluate, trainer.evaluate_own, trainer.evaluate_bf16))
    path = trainer.checkpoints.directory / str(config.rl.steps) if config.checkpoint.every else None
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
            due = c.checkpoint.every and (done % c.checkpoint.every == 0 or done == c.rl.steps)
            if due or asked:
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
