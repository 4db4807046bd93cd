"""One mesh for actor and learner; plain jit with shardings does the rest."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trace_jax.config import ConfigError, MeshConfig
from trace_jax.model.layout import Layout
from trace_jax.parallel.rules import LEARNER, Role, param_spec

AXES = ("data", "fsdp", "expert", "tensor", "context")


def axis_sizes(config: MeshConfig, count: int) -> tuple[int, ...]:
    """Sizes of AXES over `count` devices.

    Raises:
      ConfigError: the sizes do not multiply to `count`.
    """
    sizes = [getattr(config, axis) for axis in AXES]
    known = math.prod(s for s in sizes if s > 0)
    if -1 in sizes:
        if count % known:
            raise ConfigError(
                f"mesh: {count} devices do not divide into {known}; "
                f"write axis sizes whose product divides {count}"
            )
        sizes[sizes.index(-1)] = count // known
    if math.prod(sizes) != count:
        raise ConfigError(
            f"mesh: axes {dict(zip(AXES, sizes, strict=True))} need {math.prod(sizes)} devices, "
            f"there are {count}; write one axis as -1 to take what is left"
        )
    return tuple(sizes)


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """Mesh over `devices` (default: all) with the configured axes; see `axis_sizes`."""
    devices = jax.devices() if devices is None else list(devices)
    grid = np.asarray(devices).reshape(axis_sizes(config, len(devices)))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def to_host(a) -> np.ndarray:
    """The whole array as NumPy; of an array of several processes, on each of them.

    Copies rather than computes, where one process holds it all: a computation would queue up
    behind the rollouts that the device is busy with.
    """
    if isinstance(a, jax.Array) and not (a.is_fully_addressable or a.is_fully_replicated):
        a = jax.device_put(a, NamedSharding(a.sharding.mesh, P()))
    return np.asarray(a)


def put(a, sharding: NamedSharding) -> jax.Array:
    """An array of this process, the same on every one, or a global array, laid out."""
    if sharding.is_fully_addressable or not getattr(a, "is_fully_addressable", True):
        return jax.device_put(a, sharding)
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(a), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(a))
    return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])


def shard_params(params, mesh: Mesh):
    """Parameters (or any tree shaped like them) placed by `rules.param_spec`."""

    def place(path, a):
        return put(a, NamedSharding(mesh, param_spec(path, a.shape, mesh)))

    return jax.tree_util.tree_map_with_path(place, params)


def token_layout(mesh: Mesh, role: Role = LEARNER) -> Layout:
    """How the tokens of a role's forward lie."""
    return Layout(mesh, role["rows"], role["length"])


def rows_sharding(
    shape: tuple[int, ...], axis: int, mesh: Mesh, role: Role = LEARNER
) -> NamedSharding:
    """Of an array whose rows lie on `axis`: cut as the role says, or whole if not divisible."""
    over = role["rows"] if shape[axis] % row_ways(mesh, role) == 0 else None
    return NamedSharding(mesh, P(*(None,) * axis, over))


def named_rows(role: Role = LEARNER) -> str:
    """The axes that rows are cut over, for messages."""
    return " x ".join(role["rows"])


def row_ways(mesh: Mesh, role: Role = LEARNER) -> int:
    """Parts that rows are cut into."""
    return token_layout(mesh, role).row_ways


def shard_rows(tree, mesh: Mesh, role: Role = LEARNER):
    """Arrays [N, ...] with N cut as the role says.

    Raises:
      ConfigError: N does not divide; says what would.
    """
    ways = row_ways(mesh, role)

    def place(a):
        if a.shape[0] % ways:
            raise ConfigError(
                f"a batch of {a.shape[0]} rows does not divide over {named_rows(role)} = {ways} "
                f"devices; write sizes (rl.prompts_per_step, eval.problems, warmup.batch_size) "
                f"that are multiples of {ways}"
            )
        return put(a, rows_sharding(a.shape, 0, mesh, role))

    return jax.tree.map(place, tree)
