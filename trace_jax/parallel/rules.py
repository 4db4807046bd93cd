"""Logical layout of parameters: one table, matched on the parameter's path."""

import re

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from trace_jax.config import ConfigError

# (path pattern, mesh axis of each dimension), first match wins. Stacked layers lead.
PARAM_RULES = (
    (r"layers/moe/(gate_up|down)$", (None, "expert", "fsdp", None)),
    (r"layers/attention/[qkv]/weight$", (None, "tensor", "fsdp")),
    (r"layers/attention/kv_up$", (None, "tensor", None)),
    (r"layers/(attention|linear_attention)/o/weight$", (None, "fsdp", "tensor")),
    # Queries, keys and values of linear attention are one parameter: its rows stay whole.
    (r"layers/attention/(q_down|kv_down)/weight$", (None, None, "fsdp")),
    (r"layers/linear_attention/(qkv|gate)/weight$", (None, None, "fsdp")),
    (r"layers/(mlp|moe/shared)/(gate|up)/weight$", (None, "tensor", "fsdp")),
    (r"layers/(mlp|moe/shared)/down/weight$", (None, "fsdp", "tensor")),
    (r"(embed|unembed)$", ("tensor", "fsdp")),
    (r".*", ()),
)


def path_name(path) -> str:
    """'layers/moe/down' of a tree path; optimizer wrappers in front are dropped."""
    keys = [str(getattr(k, "key", "")) for k in path]
    names = [k for k in keys if k]
    start = next((i for i, k in enumerate(names) if k in ("layers", "embed", "unembed")), 0)
    return "/".join(names[start:])


def param_spec(path, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Partition of a parameter.

    The contraction axis of expert weights (the last) is never cut, so no
    quantized block is, whatever its length and theirs.

    Raises:
      ConfigError: a mesh axis that does not divide its dimension; says what would.
    """
    name = path_name(path)
    axes = next(axes for pattern, axes in PARAM_RULES if re.search(pattern, name))
    for at, (axis, size) in enumerate(zip(axes, shape[: len(axes)], strict=True)):
        ways = 1 if axis is None else mesh.shape[axis]
        if size % ways:
            fits = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
            raise ConfigError(
                f"mesh.{axis} is {ways}, which does not divide dimension {at} of {name} "
                f"{list(shape)}, {size}; write one of {', '.join(fits)}, or another model.* size"
            )
    return P(*axes)


def check_params(shapes, mesh: Mesh) -> None:
    """Refuses, before any work, parameters that the mesh would not divide."""
    jax.tree_util.tree_map_with_path(lambda path, a: param_spec(path, a.shape, mesh), shapes)
