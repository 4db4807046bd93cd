"""Learner and engine on N devices against one: `python -m benchmarks.scale` (all GPUs of a host).

In one run the same global batch is generated and learned from by one device, by all of them with
rows cut over "data", by all of them with experts cut over "expert" (tokens travel to their
experts), and "split": the last half generates while the first half learns from the rollout
before. A row has the median seconds of a refit (weights to the rollout's formats, and to its
devices), of a rollout in which every row draws its whole budget, of the record's way to the
learner, of a learner's step (forward, backward, optimizer), guided by what that rollout left, and
of an iteration of all of it; tokens drawn a second of an iteration; bytes of record and guidance;
its speed-up over one device and that over the devices (efficiency); and the loss, which must not
depend on the devices. `split` is where the time went, a device, from the profiler; empty without
a GPU.

On a machine with 2 GPUs, or with `--devices=2` on one with more; for a study 2, 4 and 8:

    python -m benchmarks.scale --config=configs/qwen3_30b_a3b.py --layers=4 --devices=2
    python -m benchmarks.scale_plot benchmarks/results/scale_*gpu.json

The state of one device must fit it: FP32 masters, moments and gradients are 16 bytes a parameter.
On CPU, to see that it runs:

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m benchmarks.scale \
        --config=configs/quickstart.py --prompts=8 --samples=2 --repeats=1

Writes results/scale_{n}gpu.json (scale_{n}cpu.json): a header and the rows.
"""

import concurrent.futures
import dataclasses
import datetime
import gc
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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import config_flags

from benchmarks.gpu_profile import by_kind, kernel_times
from trace_jax import model, modes, sync
from trace_jax.config import Config, MeshConfig, freeze
from trace_jax.parallel import (
    ACTOR,
    make_mesh,
    rows_sharding,
    shard_params,
    shard_rows,
    split_meshes,
    token_layout,
)
from trace_jax.play import shard_record
from trace_jax.rl.learner import Learner, new_state
from trace_jax.rollout import EngineConfig, make_engine
from trace_jax.rollout.data_parallel import refusal
from trace_jax.rollout.sampling import request_keys

FLAGS = flags.FLAGS
CONFIG = config_flags.DEFINE_config_file(
    "config", "configs/qwen3_30b_a3b.py", "Configuration whose model and budgets are timed."
)
flags.DEFINE_integer("layers", 0, "layers to keep; 0: all")
flags.DEFINE_integer("devices", 0, "devices to use; 0: all")
flags.DEFINE_integer("prompts", 64, "prompts of the global batch, a multiple of the devices")
flags.DEFINE_integer("samples", 8, "responses a prompt")
flags.DEFINE_integer("repeats", 5, "timed repeats of each part; the median counts")
flags.DEFINE_string("engine", "batch", "batch, or continuous (not over experts)")
flags.DEFINE_string("commit", "", "commit to name in the header")
flags.DEFINE_string("out", "", "where to write; default: benchmarks/results/scale_{n}{kind}.json")

KINDS = (
    ("collectives", r"nccl|all.?reduce|all.?gather|all.?to.?all|reduce.?scatter|SendRecv"),
    ("products", r"gemm|nvjet|cutlass|cublas|splitK|sm90_xmma|dot|expert"),
)


class Case(NamedTuple):
    """A way to use devices: its name, the learner's mesh and the actor's, which may be one."""

    name: str
    mesh: Mesh
    actor: Mesh

    @property
    def apart(self) -> bool:
        return self.mesh != self.actor

    @property
    def devices(self) -> list:
        meshes = (self.mesh, self.actor)
        return list(dict.fromkeys(d for mesh in meshes for d in mesh.devices.flat))


def cases(devices: list) -> list[Case]:
    axes = {
        "one device": (devices[:1], MeshConfig(data=1)),
        "data": (devices, MeshConfig(data=len(devices))),
        "expert": (devices, MeshConfig(data=1, expert=len(devices))),
    }
    meshes = {name: make_mesh(config, chosen) for name, (chosen, config) in axes.items()}
    half = len(devices) // 2
    split = split_meshes(MeshConfig(data=len(devices) - half), half, devices)
    return [Case(name, mesh, mesh) for name, mesh in meshes.items()] + [Case("split", *split)]


def config_of() -> Config:
    tree = CONFIG.value.copy_and_resolve_references()
    if FLAGS.layers:
        tree.model.num_layers = FLAGS.layers
        if tree.model.windows:
            tree.model.windows = tree.model.windows[: FLAGS.layers]
    tree.rl.prompts_per_step, tree.rl.samples = FLAGS.prompts, FLAGS.samples
    tree.rl.minibatches = tree.rl.micro_batches = 1
    tree.rollout.engine = FLAGS.engine
    return freeze(tree)


class Run:
    """Everything of one case on its devices, and one function for each part that is timed."""

    def __init__(self, config: Config, case: Case):
        self.config, self.mesh, self.actor = config, case.mesh, case.actor
        self.apart = case.apart
        mode = modes.resolve(config)
        layout = token_layout(self.actor, ACTOR)
        self.learner = Learner(config, mode, token_layout(self.mesh))
        self.engine = make_engine(
            FLAGS.engine,
            EngineConfig(
                config.model,
                mode.rollout,
                eos_ids=(),
                max_response=config.task.max_response,
                samples=FLAGS.samples,
                plan=mode.plan,
                layout=layout,
            ),
            mesh=self.actor,
            slots=config.rollout.slots,
        )
        self._sync = jax.jit(lambda params: sync.to_rollout(params, mode.rollout))
        init = jax.jit(lambda key: model.init(config.model, key))
        params = shard_params(init(jax.random.key(0)), self.mesh)
        self.state = shard_params(new_state(params, self.learner.tx), self.mesh)
        self.given = self._prompts()
        self.params = self.made = self.rollout = self.metrics = None
        self.beside = concurrent.futures.ThreadPoolExecutor(1)

    def _prompts(self):
        rng, width = np.random.default_rng(0), self.config.task.max_prompt
        tokens = rng.integers(1, self.config.model.vocab_size, (FLAGS.prompts, width))
        rows = jnp.arange(FLAGS.prompts * FLAGS.samples, dtype=jnp.int32)
        keys = request_keys(0, 0, rows // FLAGS.samples, rows % FLAGS.samples)
        lengths = np.full(FLAGS.prompts, width, np.int32)
        return shard_rows((tokens.astype(np.int32), lengths, keys), self.actor, ACTOR)

    def refit(self):
        params = self._sync(self.state.params)
        if self.apart:
            params = jax.device_put(params, NamedSharding(self.actor, P()))
        self.params = jax.block_until_ready(params)

    def generate(self):
        version = np.int32(self.state.version)
        self.made = jax.block_until_ready(self.engine(self.params, *self.given, version=version))

    def transfer(self):
        self.rollout = jax.block_until_ready(shard_record(self.made, self.mesh))

    def learn(self):
        rows = FLAGS.prompts * FLAGS.samples
        advantages = np.random.default_rng(1).normal(size=rows).astype(np.float32)
        by_row = rows_sharding((rows,), 0, self.mesh)
        given = jax.device_put((advantages, np.ones(rows, bool)), by_row)
        self.state, metrics = self.learner.update(self.state, self.rollout, *given, None, None)
        self.metrics = jax.device_get(metrics)

    def iteration(self):
        """All of it; apart, the next rollout is made while this one is learned from."""
        if not self.apart:
            return [getattr(self, part)() for part in PARTS[:-1]]
        version = np.int32(self.state.version)
        making = self.beside.submit(self.engine, self.params, *self.given, version=version)
        self.learn()
        self.made = jax.block_until_ready(making.result())
        self.transfer()
        self.refit()


PARTS = ("refit", "generate", "transfer", "learn", "iteration")


def measure(config: Config, case: Case) -> dict:
    """Median seconds of each part; the first pass compiles and gives the loss."""
    run, first, times = Run(config, case), {}, {part: [] for part in PARTS}
    for part in PARTS:
        start = time.perf_counter()
        getattr(run, part)()
        first[part] = round(time.perf_counter() - start, 3)
        if part == "learn":
            loss = {name: float(run.metrics[name]) for name in ("loss", "grad_norm")}
    for _ in range(FLAGS.repeats):
        for part in PARTS:
            start = time.perf_counter()
            getattr(run, part)()
            times[part].append(time.perf_counter() - start)
    held = lambda tree: max(
        sum(s.data.nbytes for a in jax.tree.leaves(tree) for s in a.addressable_shards
            if s.device == device)
        for device in case.devices
    )  # fmt: skip
    drawn = FLAGS.prompts * FLAGS.samples * config.task.max_response
    size = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree))
    return {
        "case": case.name,
        "devices": len(case.devices),
        "mesh": dict(run.mesh.shape),
        "generating": run.actor.size,
        "tokens_per_second": drawn / float(np.median(times["iteration"])),
        "record_bytes": size(run.rollout),
        "guidance_bytes": size(run.rollout.guidance.sites),
        **{f"{part}_s": float(np.median(times[part])) for part in PARTS},
        **{f"{part}_s_all": [round(t, 5) for t in times[part]] for part in PARTS},
        "first_pass_s": first,
        **loss,
        "state_bytes_a_device": held(run.state),
        "rollout_params_bytes_a_device": held(run.params),
        "split": {part: split(getattr(run, part), len(case.devices)) for part in PARTS},
    }


def split(act, devices: int) -> dict[str, float]:
    """Milliseconds by kind of kernel, the mean of the devices; empty without a GPU."""
    if jax.devices()[0].platform != "gpu":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            act()
            wall = 1e3 * (time.perf_counter() - start)
        times = kernel_times(folder)
        return by_kind({k: (ms / devices, n) for k, (ms, n) in times.items()}, KINDS, wall)


def compare(rows: list[dict]) -> None:
    """Speed-ups over one device, and how far the loss is from its."""
    one = next(row for row in rows if row["case"] == "one device")
    for row in rows:
        for part in PARTS:
            row[f"{part}_speedup"] = round(one[f"{part}_s"] / row[f"{part}_s"], 3)
        row["efficiency"] = round(row["iteration_speedup"] / row["devices"], 3)
        row["loss_off_by"] = abs(row["loss"] - one["loss"])


def main(_):
    devices = jax.devices()[: FLAGS.devices or None]
    if len(devices) < 2:
        raise app.UsageError(f"{len(devices)} device is visible; run this where there are two")
    config, rows, skipped = config_of(), [], {}
    for case in cases(devices):
        if FLAGS.engine == "continuous" and (reason := refusal(case.actor)):
            skipped[case.name] = reason
            continue
        rows.append(measure(config, case))
        compare(rows)
        print({k: v for k, v in rows[-1].items() if not k.endswith("_all")}, flush=True)
        gc.collect()
    device = devices[0]
    header = {
        "hardware": f"{len(devices)} x {device.device_kind}",
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": FLAGS.commit,
        "command": " ".join(["python -m benchmarks.scale", *sys.argv[1:]]),
        "model": dataclasses.asdict(config.model),
        "prompts": FLAGS.prompts,
        "samples": FLAGS.samples,
        "engine": FLAGS.engine,
    }
    name = f"scale_{len(devices)}{device.platform}.json"
    path = pathlib.Path(FLAGS.out or f"benchmarks/results/{name}")
    path.write_text(
        json.dumps({**header, "skipped": skipped, "rows": rows}, indent=1, default=str) + "\n"
    )


if __name__ == "__main__":
    app.run(main)
