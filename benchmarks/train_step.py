"""Cost of a learner's step: `python -m benchmarks.train_step` (one H200, about 100 seconds).

Times whole updates (forward, backward, optimizer) of one model and batch in BF16, in QAT (fake
quantization of weights, activations and KV, no guidance) and guided by the compact plan (one
bit, last half of the layers), the full one (whole codes, every site and layer) and parity checks at
every site and layer. The updates take turns on one training state, so that a drifting clock hits
all alike; a row holds medians. Routes are replayed, with the skew that the kernels' benchmark
has; guidance is random bits.

The model is the configuration's with fewer layers, and its vocabulary in proportion: else the
head would hide what layers cost. Writes results/train_step_h200.json: a header (hardware,
versions, commit, command, batch) and rows {case, ms, ms_all, ratio_to_bf16, ratio_to_qat,
guidance_mb, temporary_gb, split}.
"""

import concurrent.futures
import datetime
import json
import pathlib
import sys
import tempfile
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from benchmarks.gpu_profile import by_kind, kernel_times
from trace_jax import fp4, model, modes
from trace_jax.config import Config, freeze
from trace_jax.fp4 import SiteGuidance
from trace_jax.model import Guidance
from trace_jax.rl.learner import Learner, TrainState, new_state
from trace_jax.rollout import Rollout

FLAGS = flags.FLAGS
CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/qwen3_30b_a3b.py", "Configuration whose model is timed."
)
flags.DEFINE_integer("layers", 6, "layers to keep; 0: all, and the whole vocabulary")
flags.DEFINE_integer("rows", 8, "sequences of a step")
flags.DEFINE_integer("length", 1024, "tokens of a sequence")
flags.DEFINE_string("remat", "full", "rl.remat of every case")
flags.DEFINE_integer("rounds", 7, "timed updates of each case")
flags.DEFINE_integer("top", 0, "kernels of each case's profile to print, longest first")
flags.DEFINE_string("commit", "", "commit to name in the header")
flags.DEFINE_string("out", "benchmarks/results/train_step_h200.json", "where to write the results")

ROUTING_SKEW = 0.8  # spread of the experts' logits, over Gumbel noise a token
CASES = {
    "bf16": ("bf16", {}),
    "qat": ("qat", {}),
    "guided, compact": ("trace", {"layers": "last:0.5", "sites": ("expert_in", "k", "v")}),
    "guided, full": ("trace", {"layers": "all", "sites": fp4.SITES, "bits": 4}),
    # What solving costs; random checks do not hold, so the rows are rounded to nearest after it.
    "guided, checks": (
        "trace",
        {"layers": "all", "sites": fp4.SITES, "checks": 0.05, "scale_bits": 1},
    ),
}
KINDS = (
    ("products", r"gemm|nvjet|cutlass|cublas|splitK|sm90_xmma|dot"),
    ("copies", r"Memcpy|Memset|copy|transpose"),
    ("sorts and scatters", r"sort|scatter|Sort"),
    ("reductions", r"reduce"),
    ("gathers", r"gather|dynamic"),
    ("elementwise", r"fusion|convert|select"),
)


class Case(NamedTuple):
    """A learner, and what its update is given besides the state."""

    learner: Learner
    given: tuple


def config_of(mode: str, guidance: dict) -> Config:
    """The configuration with a batch of `rows` sequences, for one update a step."""
    tree = CONFIG.value.copy_and_resolve_references()
    tree.mode = mode
    if FLAGS.layers:
        share = FLAGS.layers / tree.model.num_layers
        tree.model.vocab_size = max(round(share * tree.model.vocab_size / 128) * 128, 384)
        tree.model.num_layers = FLAGS.layers
    tree.task.max_prompt = FLAGS.length // 4
    tree.task.max_response = FLAGS.length - tree.task.max_prompt
    tree.rl.prompts_per_step, tree.rl.samples = FLAGS.rows // 2, 2
    tree.ledger.audit_rows = 1
    tree.rl.minibatches = tree.rl.micro_batches = 1
    tree.rl.remat = FLAGS.remat
    tree.guidance.update(guidance)
    return freeze(tree)


def case_of(mode: str, guidance: dict) -> Case:
    config = config_of(mode, guidance)
    resolved = modes.resolve(config)
    rollout = random_rollout(config, resolved)
    rows = jnp.arange(FLAGS.rows)
    advantages = jnp.where(rows % 2 == 0, 1.0, -1.0)
    return Case(Learner(config, resolved), (rollout, advantages, rows >= 0, None, None))


def random_rollout(config: Config, mode: modes.Mode) -> Rollout:
    """Sequences of full length, without padding; what was recorded is random."""
    rng = np.random.default_rng(0)
    shape, prompt = (FLAGS.rows, FLAGS.length), config.task.max_prompt
    at = jnp.broadcast_to(jnp.arange(FLAGS.length)[None], shape)
    full = jnp.full(FLAGS.rows, FLAGS.length, jnp.int32)
    tokens = rng.integers(1, config.model.vocab_size, shape)
    return Rollout(
        tokens=jnp.asarray(tokens, jnp.int32),
        prompt_length=jnp.full(FLAGS.rows, prompt, jnp.int32),
        length=full,
        logp=jnp.where(at >= prompt, -np.log(config.model.vocab_size), 0.0).astype(jnp.float32),
        mask=at >= prompt,
        finished=full > 0,
        guidance=random_guidance(config, mode, shape),
        routes=random_routes(config.model, shape),
        audit={},
    )


def random_guidance(config: Config, mode: modes.Mode, shape: tuple[int, int]) -> Guidance:
    """Random bits, and block scales as those of values around 1, everywhere recorded."""
    numerics = model.numerics(config.model, mode.trainer, plan=mode.plan, record=True)
    params = jax.eval_shape(lambda key: model.init(config.model, key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    left = jax.eval_shape(
        lambda p, t: model.apply(config.model, p, t, numerics).record.sites, params, tokens
    )

    @jax.jit
    def draw():
        bits = lambda a: jax.random.bits(jax.random.key(1), a.shape, jnp.uint8)
        scales = lambda a: jax.random.randint(jax.random.key(2), a.shape, 112, 126).astype(a.dtype)
        return {
            site: SiteGuidance(None if a.bits is None else bits(a.bits), scales(a.scales))
            for site, a in left.items()
        }

    recorded = jnp.broadcast_to(jnp.arange(shape[1])[None] < shape[1] - 1, shape)
    return Guidance(draw(), recorded, jnp.zeros(shape[0], jnp.int32))


def random_routes(config: model.ModelConfig, shape: tuple[int, int]) -> jax.Array:
    experts = max(config.num_experts, 1)
    keys = jax.random.split(jax.random.key(3), config.num_layers)

    def layer(key):
        skew = ROUTING_SKEW * jax.random.normal(key, (experts,))
        logits = skew[None, None] + jax.random.gumbel(jax.random.fold_in(key, 1), (*shape, experts))
        return jax.lax.top_k(logits, config.slots)[1].astype(jnp.int16)

    return jax.jit(lambda: jax.lax.map(layer, keys))()


def compile_all(cases: dict[str, Case], state) -> dict:
    """Every case's update, compiled side by side from shapes."""

    def compiled(case: Case):
        return case.learner.update.lower(state, *case.given).compile()

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        return dict(zip(cases, pool.map(compiled, cases.values()), strict=True))


def time_in_turns(programs: dict, cases: dict[str, Case], state: TrainState):
    """(state, {case: milliseconds of each round}); a first round that warms up is not kept."""
    times = {name: [] for name in cases}
    for _ in range(FLAGS.rounds + 1):
        for name, case in cases.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(programs[name](state, *case.given))
            times[name].append(1e3 * (time.perf_counter() - start))
    return state, {name: ms[1:] for name, ms in times.items()}


def split_of(program, case: Case, state: TrainState):
    """(state, milliseconds by kind of kernel) of one more update."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(program(state, *case.given))
            wall = 1e3 * (time.perf_counter() - start)
        times = kernel_times(folder, top=FLAGS.top)
    return state, by_kind(times, KINDS, wall)


def ratio(times: dict[str, list[float]], name: str, base: str) -> float:
    """Median over the rounds of one case's time to another's in the same round."""
    return round(float(np.median(np.divide(times[name], times[base]))), 4)


def row_of(name: str, case: Case, program, times: dict, split: dict) -> dict:
    guidance = jax.tree.leaves(case.given[0].guidance.sites)
    row = {
        "case": name,
        "ms": round(float(np.median(times[name])), 3),
        "ms_all": [round(ms, 3) for ms in times[name]],
        "ratio_to_bf16": ratio(times, name, "bf16"),
        "ratio_to_qat": ratio(times, name, "qat"),
        "guidance_mb": round(sum(a.nbytes for a in guidance) / 1e6, 3),
        "temporary_gb": round(program.memory_analysis().temp_size_in_bytes / 1e9, 3),
        "split": split,
    }
    print(row, flush=True)
    return row


def main(_):
    cases = {name: case_of(*case) for name, case in CASES.items()}
    config, tx = cases["bf16"].learner.config, cases["bf16"].learner.tx
    build = lambda key: new_state(model.init(config.model, key), tx)
    shapes = jax.eval_shape(build, jax.random.key(0))
    start = time.perf_counter()
    programs = compile_all(cases, shapes)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    state = jax.jit(build)(jax.random.key(0))
    state, times = time_in_turns(programs, cases, state)
    rows = []
    for name, case in cases.items():
        state, split = split_of(programs[name], case, state)
        rows.append(row_of(name, case, programs[name], times, split))
    write(config, int(state.skipped), rows)


def write(config: Config, skipped: int, rows: list[dict]) -> None:
    header = {
        "hardware": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": FLAGS.commit,
        "command": " ".join(["python -m benchmarks.train_step", *sys.argv[1:]]),
        "model": pathlib.Path(config_flags.get_config_filename(FLAGS["config"])).stem,
        "layers": config.model.num_layers,
        "vocab_size": config.model.vocab_size,
        "tokens": FLAGS.rows * FLAGS.length,
        "length": FLAGS.length,
        "remat": FLAGS.remat,
        "skipped_updates": skipped,
    }
    path = pathlib.Path(FLAGS.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
