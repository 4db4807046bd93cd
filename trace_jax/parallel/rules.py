"""Logical layout of parameters: one table, matched on the parameter's path."""

import re

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

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
    """Partition of a parameter; an axis that does not divide its dimension is left whole.

    The contraction axis of expert weights (the last) is never cut, so no
    quantized block is.
    """
    name = path_name(path)
    axes = next(axes for pattern, axes in PARAM_RULES if re.search(pattern, name))
    fits = lambda axis, size: axis is not None and size % mesh.shape[axis] == 0
    pairs = zip(axes, shape[: len(axes)], strict=True)
    return P(*(axis if fits(axis, size) else None for axis, size in pairs))
