"""Decode speed of the continuous engine: `python -m benchmarks.rollout` (one H200).

Weights are random, pages and states are filled with random values, and every slot decodes
through the engine's own dispatches, host work included. FP4 (NVFP4 experts, their two inputs
and KV) and BF16 run in the same engine with the same kernels' twins, in one run. Writes
results/rollout_h200.json: a header (hardware, versions, commit, copy bandwidth of the same
run) and rows {model, precision, batch, context, regime, tokens_per_s, step_ms,
share_of_ceiling, ratio_to_bf16, split, guidance}.

A case is precision:batch:context:regime, with precision bf16, nvfp4 or nvfp4+guidance (the
compact plan: one bit, all planned layers, to the host). Ratios compare rows of one regime;
of "50 tokens/s a sequence" the largest batches whose step takes at most 20 ms. The row "refit"
is the time from BF16 parameters to FP4 in the kernels' layout. Rows are written as they come,
and a case that does not fit the device is named in "skipped".
"""

import concurrent.futures
import dataclasses
import datetime
import gc
import json
import pathlib
import tempfile
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from benchmarks.gpu_profile import by_kind, kernel_times
from benchmarks.rollout_mix import run_mix
from benchmarks.rollout_model import COMPACT, precision_of, random_params
from benchmarks.rollout_refit import refit
from trace_jax import fp4
from trace_jax.config import freeze
from trace_jax.kernels import cuda_build, dispatch, kv_pages
from trace_jax.kernels.kv_pages import KVPages
from trace_jax.model.pools import Stored
from trace_jax.rollout import store
from trace_jax.rollout.continuous import ContinuousEngine
from trace_jax.rollout.programs import CacheConfig, ProgramConfig, Slots, decode, empty_pools
from trace_jax.rollout.sequence import Sequence

FLAGS = flags.FLAGS
CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/qwen3_30b_a3b.py", "Configuration whose model is timed."
)
flags.DEFINE_integer("layers", 0, "layers to keep, for a quick look; 0: all")
flags.DEFINE_integer("steps", 32, "decode steps of a dispatch")
flags.DEFINE_integer("dispatches", 4, "timed dispatches of a case; the median counts")
flags.DEFINE_string(
    "mix",
    "",
    "instead of the cases: precision:slots:requests:prompt, responses of long-tailed length "
    "through admission, prefill and decode; the row joins those in --out",
)
flags.DEFINE_integer("top", 0, "kernels of the profile to print, longest first")
flags.DEFINE_list(
    "cases", [], 'precision:batch:context:regime, and "refit"; default: those of the table and it'
)
flags.DEFINE_string("commit", "", "commit to name in the rows")
flags.DEFINE_string("out", "benchmarks/results/rollout_h200.json", "where to write the results")

CASES = (
    "bf16:64:2048:batch 64",
    "nvfp4:64:2048:batch 64",
    "bf16:64:8192:batch 64",
    "nvfp4:64:8192:batch 64",
    "nvfp4+guidance:64:8192:batch 64, guided",
    "bf16:48:2048:50 tokens/s a sequence",
    "bf16:56:2048:50 tokens/s a sequence",
    "nvfp4:320:2048:50 tokens/s a sequence",
    "nvfp4:384:2048:50 tokens/s a sequence",
    "nvfp4:416:2048:50 tokens/s a sequence",
    "nvfp4:256:2048:batch 256",
    "bf16:88:8192:own largest batch",
    "nvfp4:496:8192:own largest batch",
)
FASTEST_MS = {"50 tokens/s a sequence": 20.0}  # a step of these regimes may take no longer


@dataclasses.dataclass(frozen=True)
class Case:
    precision: str
    batch: int
    context: int
    regime: str

    @classmethod
    def parse(cls, text: str) -> "Case":
        precision, batch, context, regime = text.split(":")
        if precision not in ("bf16", "nvfp4", "nvfp4+guidance"):
            raise app.UsageError(f"{text}: write bf16, nvfp4 or nvfp4+guidance")
        return cls(precision, int(batch), int(context), regime)

    @property
    def format(self) -> str:
        return self.precision.split("+")[0]


def fill(stored: Stored) -> Stored:
    """Random keys and values in every page of a layer, and random states."""
    random = lambda a: jax.random.normal(jax.random.key(2), a.shape, a.dtype)
    rings = isinstance(stored.state, KVPages)
    state = fill_pages(stored.state) if rings else jax.tree.map(random, stored.state)
    return Stored(None if stored.pages is None else fill_pages(stored.pages), state)


def fill_pages(pool: KVPages) -> KVPages:
    """Random keys and values in every page, from a few hundred different pages."""
    few = min(256, pool.data.shape[0])
    shape = (few, kv_pages.PAGE, pool.kv_heads, pool.head_size)
    k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(2))
    small = pool.replace(data=pool.data[:few])
    small = kv_pages.write_pages(small, jnp.arange(few), k, v).data
    return pool.replace(data=small[jnp.arange(pool.data.shape[0]) % few])


# --- one case ---------------------------------------------------------------------------


class Decoder(ContinuousEngine):
    """The engine, keeping records of the timed tokens alone: the context's never were."""

    first = 0  # position of the first token fed

    def _keep(self, record, rows, positions) -> None:
        super()._keep(record, rows, positions - self.first)

    def _empty_store(self):
        # Shapes of the compiled program: prefill is not traced.
        like = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((*a.shape[1:3], 1, *a.shape[3:]), a.dtype),
            self._decode.out_info[1].record,
        )
        return store.empty_store(like, self.rows, self.record_length, 0, host=True)


def programs_of(case: Case, config, steps: int) -> ProgramConfig:
    room = steps * (FLAGS.dispatches + 4)
    length = case.context + room
    pages = case.batch * -(-length // kv_pages.PAGE) + 1
    cache = CacheConfig(
        slots=case.batch, pages=pages, length=length, steps=steps, chunk=64, prefill_rows=1,
        kernels=True,
    )  # fmt: skip
    plan = COMPACT if "guidance" in case.precision else fp4.NO_GUIDANCE
    precision = precision_of(case.format, config.num_layers)
    return ProgramConfig(config, precision, cache, eos_ids=(), plan=plan)


def compile_decode(programs: ProgramConfig, params):
    """The decode program of a case, compiled from shapes alone."""
    c, shape = programs.cache, jax.ShapeDtypeStruct
    ints = lambda *s: shape(s, jnp.int32)
    told = Slots(
        table=ints(c.slots, c.table_pages), position=ints(c.slots),
        known=ints(c.slots, c.steps + 1), count=ints(c.slots), limit=ints(c.slots),
        keys=jax.eval_shape(lambda: jax.random.split(jax.random.key(0), c.slots)),
    )  # fmt: skip
    pools = jax.eval_shape(lambda: empty_pools(programs))
    step = jax.jit(partial(decode, programs), donate_argnums=1)
    return step.lower(params, pools, told, None).compile()


def compile_all(cases, config, shapes) -> dict[Case, concurrent.futures.Future]:
    """Decode programs of all cases, compiled side by side."""
    if cuda_build.hopper_refusal() is None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            names = [p.stem for p in cuda_build.SOURCES.glob("*.cu")]
            list(pool.map(cuda_build.build, names))
    pool = concurrent.futures.ThreadPoolExecutor(len(cases))
    return {
        case: pool.submit(
            compile_decode, programs_of(case, config, FLAGS.steps), shapes[case.format]
        )
        for case in cases
    }


def occupy(engine: ContinuousEngine, case: Case) -> None:
    """A running sequence of `context` tokens in every slot, pages and states filled."""
    filled = jax.jit(fill, donate_argnums=0)
    engine._pools = tuple(filled(stored) for stored in engine._pools)
    engine._keys[:] = np.asarray(
        jax.random.key_data(jax.random.split(jax.random.key(1), case.batch))
    )
    length = engine.config.cache.length
    engine.first, engine.record_length = case.context - 1, length - case.context + 1
    for row in range(case.batch):
        s = Sequence(row, [1 + row] * case.context, length)
        s.pages = engine.scheduler.pool.take(-(-length // kv_pages.PAGE))
        s.stored = case.context - 1
        engine.scheduler.submit(s)


def timed(engine: ContinuousEngine, steps: int) -> tuple[list[float], dict]:
    """Milliseconds a decode step, one a dispatch, after one that compiles; and their split."""
    engine.step()
    times = []
    for _ in range(FLAGS.dispatches):
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start) / steps)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            engine.step()
            wall = 1e3 * (time.perf_counter() - start) / steps
        return times, by_kind(kernel_times(folder, steps, FLAGS.top), KINDS, wall)


KINDS = (
    ("experts", r"expert|route"),
    ("attention", r"paged|attention|merge"),
    ("kv append", r"append|kv_|token_rows"),
    ("dense products", r"gemm|nvjet|cutlass|cublas|splitK|sm90_xmma"),
)


def ceiling_ms(case: Case, config, engine, copy: float) -> float:
    """Milliseconds a step if all that must be read were read at copy bandwidth (bytes / us)."""
    params = engine._params
    dense = sum(a.nbytes for a in jax.tree.leaves({**params, "layers": ()}) if a.ndim)
    dense -= params["embed"].nbytes if "unembed" in params else 0
    experts = 0
    for layer in params["layers"]:
        moe = sum(a.nbytes for n in ("gate_up", "down") for a in jax.tree.leaves(layer["moe"][n]))
        dense += sum(a.nbytes for a in jax.tree.leaves(layer)) - moe
        experts += moe
    hit = 1 - (1 - config.top_k / config.num_experts) ** case.batch
    cache = sum(
        stored_bytes(case, stored, window, engine.config.cache.pages)
        for stored, window in zip(
            engine._pools, config.windows or [0] * config.num_layers, strict=True
        )
    )
    return (dense + hit * experts + cache) / copy / 1e3


def stored_bytes(case: Case, stored: Stored, window: int, pages: int) -> float:
    """Bytes of a layer's keys, values and states that a step must move."""
    held = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree))
    seen = min(case.context, window or case.context)
    read = held(stored.pages) / (pages * kv_pages.PAGE) * case.batch * seen
    # States of linear attention are read and written, rings of recent tokens only read.
    return read + held(stored.state) * (1 if isinstance(stored.state, KVPages) else 2)


def run_case(case: Case, config, params, compiled, copy: float) -> dict:
    engine = Decoder(programs_of(case, config, FLAGS.steps), case.batch, record_on="host")
    engine._decode = compiled.result()
    engine.load(params)
    start = time.perf_counter()
    try:
        occupy(engine, case)
        times, parts = timed(engine, FLAGS.steps)
        share = ceiling_ms(case, config, engine, copy) / float(np.median(times))
    finally:  # a case that does not fit leaves its memory to the next one
        for pool in jax.tree.leaves(engine._pools):
            pool.delete()
    ms = float(np.median(times))
    row = {
        **_whose(config),
        "precision": case.precision,
        "batch": case.batch,
        "context": case.context,
        "regime": case.regime,
        "tokens_per_s": round(1e3 * case.batch / ms, 1),
        "step_ms": round(ms, 4),
        "step_ms_all": [round(t, 4) for t in times],
        "share_of_ceiling": round(share, 4),
        "ratio_to_bf16": None,
        "split": parts,
        "guidance_bytes_per_token": fp4.guidance_bytes_per_token(config, engine.config.plan),
    }
    print(f"{case}: {ms:.3f} ms, {row['tokens_per_s']} tokens/s, "
          f"{row['share_of_ceiling']:.3f} of ceiling, {parts}, "
          f"{time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
    return row


def _model_name() -> str:
    return pathlib.Path(config_flags.get_config_filename(FLAGS["config"])).stem


def _whose(config) -> dict:
    """What every row begins with."""
    return {"model": _model_name(), "commit": FLAGS.commit, "layers": config.num_layers}


# --- all of them ------------------------------------------------------------------------


def copy_bandwidth() -> float:
    """Bytes read and written a microsecond by a copy of 2 GiB."""
    flip = jax.jit(lambda a: a ^ jnp.uint32(1))
    words = 2**29 if dispatch.platform() == "gpu" else 2**20
    a = jax.block_until_ready(flip(jnp.zeros(words, jnp.uint32)))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(10):
            a = flip(a)
        jax.block_until_ready(a)
        times.append((time.perf_counter() - start) / 10)
    return 2 * a.nbytes / np.median(times) / 1e6


def main(_):
    config = freeze(CONFIG.value).model
    if FLAGS.layers:
        windows = config.windows[: FLAGS.layers]
        config = dataclasses.replace(config, num_layers=FLAGS.layers, windows=windows)
    if FLAGS.mix:
        path = pathlib.Path(FLAGS.out)
        have = json.loads(path.read_text()) if path.exists() else {"rows": []}
        have["rows"].append({**_whose(config), **run_mix(FLAGS.mix, config)})
        print(have["rows"][-1], flush=True)
        path.write_text(json.dumps(have, indent=1) + "\n")
        return
    copy = copy_bandwidth()
    print(f"copy {copy / 1e6:.3f} TB/s", flush=True)
    cases = [Case.parse(text) for text in FLAGS.cases or CASES if text != "refit"]
    formats = [f for f in ("bf16", "nvfp4") if any(case.format == f for case in cases)]
    shapes = {f: jax.eval_shape(lambda f=f: random_params(config, f)) for f in formats}
    compiled, rows = compile_all(cases, config, shapes), []
    skipped = {}
    for format_ in formats:
        params = random_params(config, format_)
        for case in cases:
            if case.format != format_:
                continue
            try:
                rows.append(run_case(case, config, params, compiled.pop(case), copy))
            except jax.errors.JaxRuntimeError as error:
                skipped[":".join(map(str, dataclasses.astuple(case)))] = str(error).splitlines()[0]
                print(f"{case} skipped: {error}", flush=True)
            gc.collect()
            compare(rows)
            write(copy, rows, skipped)
        del params
        gc.collect()
    if not FLAGS.cases or "refit" in FLAGS.cases:
        rows.append({**_whose(config), **refit(config)})
        print(rows[-1], flush=True)
        write(copy, rows, skipped)


def compare(rows: list[dict]) -> None:
    """Fills in the ratio of every row to the best BF16 row of its regime."""
    in_time = lambda row: row["step_ms"] <= FASTEST_MS.get(row["regime"], float("inf"))
    for row in rows:
        twins = [
            other["tokens_per_s"]
            for other in rows
            if other["precision"] == "bf16"
            and other["context"] == row["context"]
            and other["regime"].split(",")[0] == row["regime"].split(",")[0]
            and in_time(other)
        ]
        if twins and in_time(row):
            row["ratio_to_bf16"] = round(row["tokens_per_s"] / max(twins), 3)


def write(copy: float, rows: list[dict], skipped: dict) -> None:
    """Rows of this model in place of its former ones; those of others and of mixes stay."""
    device = jax.devices()[0]
    header = {
        "hardware": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": FLAGS.commit,
        "command": "python -m benchmarks.rollout",
        "copy_TB_s": round(copy / 1e6, 3),
    }
    path = pathlib.Path(FLAGS.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    have = json.loads(path.read_text())["rows"] if path.exists() else []
    have = [r for r in have if r["model"] != _model_name() or "counts" in r]
    text = json.dumps({**header, "skipped": skipped, "rows": rows + have}, indent=1)
    path.write_text(text + "\n")


if __name__ == "__main__":
    app.run(main)
