"""A run's programs compiled for TPUs that are not here, from shapes alone."""

import importlib.util
import os
import re
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trace_jax import model, modes, sync
from trace_jax.config import Config
from trace_jax.parallel import ACTOR, LEARNER, make_mesh, rows_sharding, token_layout
from trace_jax.parallel.rules import param_spec
from trace_jax.planning.hlo import Collective, collectives
from trace_jax.rl.learner import Learner, new_state
from trace_jax.rollout import Engine, EngineConfig, Rollout
from trace_jax.rollout.engine import decode_step, prefill
from trace_jax.rollout.record import map_rows

PROGRAMS = ("learner", "prefill", "decode")
QUICK = {"exec_time_optimization_effort": -1.0}  # of the compiler: minutes less, to be read only


class Compiled(NamedTuple):
    """What the compiler says of a program on one device.

    Attributes:
      arguments, temporary, outputs: bytes; outputs that reuse donated arguments are not counted.
      flops: as XLA counts, each loop's body once.
      collectives: see hlo.collectives.
      seconds: of compiling.
      refused: the compiler's word on memory that does not suffice; the rest is then 0.
      shardings: of the outputs.
    """

    arguments: int = 0
    temporary: int = 0
    outputs: int = 0
    flops: float = 0.0
    collectives: tuple[Collective, ...] = ()
    seconds: float = 0.0
    refused: str = ""
    shardings: object = None


def tpu_mesh(config: Config, topology: str):
    """The configured mesh over the chips of "v6e:8x8".

    Raises:
      ValueError: libtpu is not installed, or knows no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "TPU programs are compiled with libtpu, which is not installed; install it (pip "
            "install libtpu) or write --programs=none for arithmetic alone"
        )
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # of several types, by version
        raise ValueError(f"topology {topology}: {str(error).splitlines()[0]}") from error
    return make_mesh(config.mesh, found.devices)


def compile_for(mesh, function, *arguments) -> Compiled:
    """Compiles a jitted function of shapes for the devices of a mesh."""
    start = time.perf_counter()
    with jax.default_device(mesh.devices.flat[0]):  # what ops ask for the platform
        lowered = function.lower(*arguments)
    try:
        program = lowered.compile(compiler_options=QUICK)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = re.search(r"Ran out of memory[^\n]*", str(error))
        return Compiled(
            seconds=time.perf_counter() - start, refused=text.group() if text else str(error)[:200]
        )
    memory, costs = program.memory_analysis(), program.cost_analysis()
    return Compiled(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        float(costs.get("flops", 0.0)),
        tuple(collectives(program.as_text(), dict(mesh.shape))),
        time.perf_counter() - start,
        shardings=program.output_shardings,
    )


# --- shapes and where they lie ----------------------------------------------------------


def placed(tree, mesh):
    """Parameters, or what is shaped like them, as the learner's lie; axes of 1 are whole."""

    def place(path, a):
        spec = param_spec(path, tuple(0 if n == 1 else n for n in a.shape), mesh)
        cut = (None if n == 1 else over for n, over in zip(a.shape, spec, strict=False))
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P(*cut)))

    return jax.tree_util.tree_map_with_path(place, tree)


def by_rows(a, axis: int, mesh, role=LEARNER):
    """A shape whose rows lie on `axis`."""
    sharding = rows_sharding(a.shape, axis, mesh, role)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def master_shapes(config: Config):
    return jax.eval_shape(partial(model.init, config.model), jax.random.key(0))


def engine_config(config: Config, layout=None) -> EngineConfig:
    mode = modes.resolve(config)
    return EngineConfig(
        config.model,
        mode.rollout,
        eos_ids=(0,),
        max_response=config.task.max_response,
        samples=config.rl.samples,
        temperature=config.rollout.temperature,
        plan=mode.plan,
        layout=layout,
    )


def prompt_shapes(config: Config):
    """Prompts, their lengths and the requests' keys, as an engine takes them."""
    prompts = config.rl.prompts_per_step
    return (
        jax.ShapeDtypeStruct((prompts, config.task.max_prompt), jnp.int32),
        jax.ShapeDtypeStruct((prompts,), jnp.int32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), config.rows)),
    )


def rollout_shapes(config: Config) -> Rollout:
    """The record that a rollout of `config` leaves."""
    precision = modes.resolve(config).rollout
    params = jax.eval_shape(partial(sync.to_rollout, precision=precision), master_shapes(config))
    return jax.eval_shape(Engine(engine_config(config)), params, *prompt_shapes(config))


# --- the programs -----------------------------------------------------------------------


def learner_program(config: Config, mesh) -> tuple[Callable, tuple]:
    """The update of the loop, its state donated, and its arguments."""
    learner = Learner(config, modes.resolve(config), token_layout(mesh))
    build = lambda params: new_state(params, learner.tx)
    state = placed(jax.eval_shape(build, master_shapes(config)), mesh)
    rollout = map_rows(partial(by_rows, mesh=mesh), rollout_shapes(config))
    row = lambda dtype: by_rows(jax.ShapeDtypeStruct((config.rows,), dtype), 0, mesh)
    return learner.update, (state, rollout, row(jnp.float32), row(bool), None, None)


def prefill_program(config: Config, mesh) -> tuple[Callable, tuple]:
    """The prompts of a rollout of the batch engine; the weights are decoded already."""
    cfg, precision = engine_config(config, token_layout(mesh, ACTOR)), modes.resolve(config).rollout
    decoded = lambda params: sync.decode_weights(sync.to_rollout(params, precision))
    params = placed(jax.eval_shape(decoded, master_shapes(config)), mesh)
    rows = (by_rows(a, 0, mesh, ACTOR) for a in prompt_shapes(config))
    run = jax.jit(lambda params, prompts, lengths, keys: prefill(
        cfg, params, prompts, lengths, keys, 0, None
    ))  # fmt: skip
    return run, (params, *rows)


def decode_program(config: Config, mesh, shardings) -> tuple[Callable, tuple]:
    """One token of every sequence; `shardings`: as `prefill_program` leaves the state."""
    cfg = engine_config(config, token_layout(mesh, ACTOR))
    first, arguments = prefill_program(config, mesh)
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        jax.eval_shape(first, *arguments),
        shardings,
    )
    run = lambda params, keys, state: decode_step(cfg, params, keys, None, state)
    return jax.jit(run, donate_argnums=2), (arguments[0], arguments[-1], state)


def compile_programs(config: Config, topology: str, names: tuple[str, ...]) -> dict[str, Compiled]:
    """{name: Compiled} of some PROGRAMS; a decode step needs its prefill, which then is there."""
    mesh, done = tpu_mesh(config, topology), {}
    if "learner" in names:
        done["learner"] = compile_for(mesh, *_flat(learner_program(config, mesh)))
    if "prefill" in names or "decode" in names:
        done["prefill"] = compile_for(mesh, *_flat(prefill_program(config, mesh)))
    if "decode" in names and not done["prefill"].refused:
        program = decode_program(config, mesh, done["prefill"].shardings)
        done["decode"] = compile_for(mesh, *_flat(program))
    return done


def _flat(program: tuple[Callable, tuple]) -> tuple:
    function, arguments = program
    return function, *arguments
