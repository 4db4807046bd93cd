"""What is cut over which axis of the mesh: names of dimensions, and one table of them a role."""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trace_jax.config import ConfigError

Role = Mapping[str, tuple[str, ...]]

# Mesh axes of each named dimension; a name that is not there is never cut. What one role leaves
# is laid out as the other takes it when it crosses: the same, but for the context axis.
LEARNER: Role = MappingProxyType(
    {
        "rows": ("data", "fsdp", "expert"),
        "length": ("context",),
        "experts": ("expert",),
        "heads": ("tensor",),
        "inner": ("tensor",),
        "vocab": ("tensor",),
        "hidden": ("fsdp",),
        "outputs": ("fsdp",),
    }
)
# A step of generation has one token a row: there is no length to cut.
ACTOR: Role = MappingProxyType(
    LEARNER | {"rows": ("data", "fsdp", "expert", "context"), "length": ()}
)

# (path pattern, name of each dimension), first match wins. Stacked layers lead. "blocks": the
# contraction axis of expert weights, whose quantized blocks lie whole on a device.
PARAM_RULES = (
    (r"layers/moe/(gate_up|down)$", ("layers", "experts", "outputs", "blocks")),
    (r"layers/attention/[qkv]/weight$", ("layers", "heads", "hidden")),
    (r"layers/attention/kv_up$", ("layers", "heads", "latent")),
    (r"layers/(attention|linear_attention)/o/weight$", ("layers", "hidden", "heads")),
    (r"layers/attention/(q_down|kv_down)/weight$", ("layers", "latent", "hidden")),
    # Queries, keys and values of linear attention are one parameter: its rows stay whole.
    (r"layers/linear_attention/(qkv|gate)/weight$", ("layers", "joined", "hidden")),
    (r"layers/(mlp|moe/shared)/(gate|up)/weight$", ("layers", "inner", "hidden")),
    (r"layers/(mlp|moe/shared)/down/weight$", ("layers", "hidden", "inner")),
    (r"(embed|unembed)$", ("vocab", "hidden")),
    (r".*", ()),
)


def path_name(path) -> str:
    """'layers/moe/down' of a tree path; optimizer wrappers in front are dropped."""
    keys = [str(getattr(k, "key", "")) for k in path]
    names = [k for k in keys if k]
    start = next((i for i, k in enumerate(names) if k in ("layers", "embed", "unembed")), 0)
    return "/".join(names[start:])


def param_spec(path, shape: tuple[int, ...], mesh: Mesh, role: Role = LEARNER) -> P:
    """Partition of a parameter.

    The contraction axis of expert weights (the last) is never cut, so no
    quantized block is, whatever its length and theirs.

    Raises:
      ConfigError: a mesh axis that does not divide its dimension; says what would.
    """
    name = path_name(path)
    names = next(names for pattern, names in PARAM_RULES if re.search(pattern, name))
    axes = [role.get(dimension, ()) for dimension in names]
    for at, (over, size) in enumerate(zip(axes, shape[: len(axes)], strict=True)):
        ways = math.prod(mesh.shape[axis] for axis in over)
        if size % ways:
            fits = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
            raise ConfigError(
                f"mesh.{' x mesh.'.join(over)} is {ways}, which does not divide dimension {at} of "
                f"{name} {list(shape)}, {size}; write one of {', '.join(fits)}, or another "
                "model.* size"
            )
    return P(*(over[0] if len(over) == 1 else over or None for over in axes))


def check_params(shapes, mesh: Mesh) -> None:
    """Refuses, before any work, parameters that the mesh would not divide."""
    jax.tree_util.tree_map_with_path(lambda path, a: param_spec(path, a.shape, mesh), shapes)
