"""What a rollout's layers store: pools of pages that sequences share, and a state each.

`KVPlane` pools take any format and run anywhere; `KVPages` pools hold the layout of the GPU
and TPU kernels. What a layer keeps of a sequence as a whole is its state: the last tokens
(recent), or what linear attention carries on.
"""

from typing import Any, NamedTuple

from trace_jax.fp4 import FP8, E4M3Rows, Format, LayerPrecision
from trace_jax.kernels import kv_pages
from trace_jax.kernels.kv_pages import KVPages
from trace_jax.kernels.kv_units import KV_FORMAT
from trace_jax.model import linear_attention, recent
from trace_jax.model.config import LayerKind, ModelConfig
from trace_jax.model.kv_planes import KVPlane, empty_plane


class Stored(NamedTuple):
    """What one layer stores.

    Attributes:
      pages: a pool that sequences share: {"k", "v"} planes, or KVPages; None without softmax
        attention.
      state: of each sequence of a batch, in its order: rings of recent tokens, or the state of
        linear attention; None where there is neither.
    """

    pages: dict[str, KVPlane] | KVPages | None
    state: Any = None


def empty_state(
    config: ModelConfig, precision: LayerPrecision, kind: LayerKind, batch: int, kernel: bool
):
    """States of one layer before the first token of `batch` sequences; None if it has none."""
    if kind.linear:
        return linear_attention.empty_state(config, (batch,))
    if precision.kv_window:
        return recent.empty_rings(config, precision, batch, kernel)
    return None


def empty_pool(
    config: ModelConfig, precision: LayerPrecision, pages: int, page: int, kernel: bool
) -> dict[str, KVPlane] | KVPages:
    """An empty pool of one layer with softmax attention.

    Args:
      pages, page: pages, and tokens of each.
      kernel: in the kernels' layout.

    Raises:
      ValueError: attention, formats, page or head size that the kernels' layout does not take.
    """
    if not kernel:
        shapes = config.site_shapes()
        plane = lambda site, rows, width: empty_plane(
            (pages, page, rows), width, getattr(precision, site), config.dtype
        )
        return {site: plane(site, shapes[site].rows, shapes[site].width) for site in "kv"}
    reason = kernel_refusal(config, precision, page)
    if reason is not None:
        raise ValueError(f"KV pages: {reason}")
    kind = _kind(precision.k)
    return kv_pages.new_pages(pages, config.num_kv_heads, config.head_dim, kind)


def kernel_refusal(config: ModelConfig, precision: LayerPrecision, page: int) -> str | None:
    """Why the kernels' layout cannot hold a layer's keys and values; None if it can."""
    if config.latent.kv_rank:
        return "the kernels take keys and values of grouped queries, no latents"
    if precision.k != precision.v:
        return "the kernels take one format for keys and values"
    if _kind(precision.k) is None:
        return f"the kernels take NVFP4, FP8 or BF16, not {precision.k.name}"
    if precision.kv_window % kv_pages.PAGE:
        return (
            f"the kernels take a kv_window of a multiple of {kv_pages.PAGE} tokens, not "
            f"{precision.kv_window}"
        )
    if page != kv_pages.PAGE:
        return f"the kernels take pages of {kv_pages.PAGE} tokens, not {page}"
    if config.head_dim not in (64, 128, 256):
        return f"the kernels take head sizes of 64, 128 or 256, not {config.head_dim}"
    if config.dtype != "bfloat16":
        return f"the kernels take BF16 activations, not {config.dtype}"
    return None


def _kind(fmt: Format | E4M3Rows | None) -> str | None:
    """The kernels' name of a format; None if they have none."""
    if fmt is None or fmt == FP8:
        return "bf16" if fmt is None else "fp8"
    return "nvfp4" if fmt.replace(name=KV_FORMAT.name) == KV_FORMAT else None
