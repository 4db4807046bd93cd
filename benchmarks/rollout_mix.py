"""Requests that come and go, for benchmarks.rollout: admission, prefill and decode together."""

import dataclasses
import time

import jax
import numpy as np

from benchmarks.rollout_model import COMPACT, precision_of, random_params
from trace_jax import fp4
from trace_jax.kernels import kv_pages
from trace_jax.rollout.continuous import ContinuousEngine
from trace_jax.rollout.programs import CacheConfig, ProgramConfig


def run_mix(text: str, config) -> dict:
    """Tokens a second of whole requests: random prompts, log-normal response lengths.

    `text`: precision:slots:requests:prompt.
    """
    precision, *numbers = text.split(":")
    slots, requests, prompt = map(int, numbers)
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(5.0, 1.0, requests)), 8, 2048).astype(int)
    length = prompt + int(lengths.max())
    pages_each = -(-length // kv_pages.PAGE)
    cache = CacheConfig(
        slots=slots, pages=slots * pages_each + 1, length=length, steps=16, chunk=512,
        prefill_rows=4, kernels=True,
    )  # fmt: skip
    plan = COMPACT if "guidance" in precision else fp4.NO_GUIDANCE
    format_ = precision.split("+")[0]
    formats_ = precision_of(format_, config.num_layers)
    engine = ContinuousEngine(
        ProgramConfig(config, formats_, cache, eos_ids=(), plan=plan), requests, record_on="host"
    )
    engine.load(random_params(config, format_))
    keys = jax.random.split(jax.random.key(2), requests)

    def submit(rows):
        for row in rows:
            tokens = rng.integers(1, config.vocab_size, prompt)
            engine.submit(row, tokens, keys[row], int(lengths[row]))

    submit([int(np.argmin(lengths))])  # compiles
    while not engine.scheduler.idle:
        engine.step()
    engine.counts = type(engine.counts)()
    start = time.perf_counter()
    submit(range(requests))
    while not engine.scheduler.idle:
        engine.step()
    seconds = time.perf_counter() - start
    counts = engine.counts
    steps = counts.dispatches * cache.steps
    return {
        "precision": precision, "batch": slots, "context": prompt,
        "regime": f"{requests} requests, long-tailed",
        "tokens_per_s": round(counts.drawn / seconds, 1), "seconds": round(seconds, 3),
        "slots_busy": round(1 - counts.idle_steps / (steps * slots), 4),
        "longest_share": round(float(lengths.mean() / lengths.max()), 4),
        "counts": dataclasses.asdict(counts), "preemptions": engine.scheduler.preemptions,
        "compilations": engine.compilations(),
    }  # fmt: skip
