"""Decode attention over paged K and V: one query token a sequence.

Contract, for every version: with K, V the values stored in the pages (the current token
included) and s = scale * q K^T in FP32,
  out = softmax([s, sink])[:-1] V  over the tokens max(0, length - window) <= i < length,
per query head; heads h * group .. (h + 1) * group - 1 share KV head h. A sequence of length 0
gives zeros. What the slots outside that range hold has no effect, NaN included. With a window
of recent tokens (kv_recent), the last W come from it and the others from the pages. The fast
versions round probabilities to BF16 before the product with V, and sum them before.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.kernels import cuda_build, dispatch, kv_attention_tpu, triton_call
from trace_jax.kernels.kv_pages import KVPages, read_pages
from trace_jax.kernels.kv_recent import read_recent, ring_table
from trace_jax.kernels.kv_units import PAGE

AT_ONCE = 8  # partial results that one warp of the Hopper kernel adds up, at one level
BLOCKS = 132  # persistent blocks of the Hopper kernel: one a multiprocessor
# (kind, head size) -> (kernel, warps a block), as in cuda/paged_attention.cu; the first is used.
HOPPER_VARIANTS = {
    ("nvfp4", 128): ((1, 16), (0, 12), (2, 8)),
    ("nvfp4", 64): ((4, 16),),
    ("nvfp4", 256): ((5, 6),),
    ("fp8", 128): ((11, 12), (8, 8)),
    ("fp8", 64): ((9, 12),),
    ("fp8", 256): ((10, 4),),
    ("bf16", 128): ((3, 4),),
    ("bf16", 64): ((6, 8),),
    ("bf16", 256): ((7, 2),),
}
HOPPER_BATCH = 4096


def _tokens(pages, table, lengths, recent):
    """K and V, FP32 [batch, kv_heads, n, D], and which tokens they are, int32 [batch, n].

    Slots to leave out are numbered -1.
    """
    k, v = read_pages(pages, table)  # [batch, max_pages, kv_heads, 64, D]
    k, v = (x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1, x.shape[-1]) for x in (k, v))
    token = jnp.arange(k.shape[2], dtype=jnp.int32)[None]
    if recent is None:
        return k, v, jnp.where(token < lengths[:, None], token, -1)
    new_k, new_v, new_token = read_recent(recent, lengths)
    token = jnp.where(token < lengths[:, None] - new_k.shape[2], token, -1)
    k, v = (jnp.concatenate(x, axis=2) for x in ((k, new_k), (v, new_v)))
    return k, v, jnp.concatenate([token, new_token], axis=1)


def _reference(q, pages, table, lengths, scale, window, sink, recent):
    batch, heads, d = q.shape
    kv_heads = pages.kv_heads
    k, v, token = _tokens(pages, table, lengths, recent)
    low = jnp.maximum(lengths - window, 0) if window else jnp.zeros_like(lengths)
    live = (token >= low[:, None])[:, None, None]
    v = jnp.where(live[:, :, 0, :, None], v, 0.0)  # 0 x NaN is NaN
    grouped = q.astype(jnp.float32).reshape(batch, kv_heads, -1, d)
    exact = jax.lax.Precision.HIGHEST
    s = jnp.einsum("bhgd,bhtd->bhgt", grouped, k, precision=exact) * scale
    s = jnp.where(live, s, -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True)
    extra = None if sink is None else sink.reshape(1, kv_heads, -1, 1).astype(jnp.float32)
    top = jnp.maximum(top, -1e30 if extra is None else extra)
    p = jnp.exp(s - top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    total = total if extra is None else total + jnp.exp(extra - top)
    out = jnp.einsum("bhgt,bhtd->bhgd", p, v, precision=exact)
    out = jnp.where(total == 0, 0.0, out / total)  # NaN stays
    out = jnp.where((lengths > 0)[:, None, None, None], out, 0.0)
    return out.reshape(batch, heads, d).astype(jnp.bfloat16)


def split_pages(tiles: int, pages: int, warps: int) -> int:
    """Pages of a partial result of the Hopper kernel, for `tiles` (sequence, KV head)s.

    The size that takes `warps` warps the least time where all sequences have `pages` pages: a split
    is a warp's, so the splits of all make rounds, and one costs a page more than it reads. At most
    20, so that shares are still even where lengths are not. Shapes alone decide, so that a sequence
    gives the same bits whatever the others are.
    """

    def time(split: int) -> float:
        splits = split_count(split, pages)
        return -(-tiles * splits // warps) * (pages / splits + 1)

    return min(range(8, 21), key=time)


def split_count(split: int, pages: int) -> int:
    """Partial results of so many pages, as in cuda/paged_attention.cu."""
    return max(1, (pages + split // 2) // split)


def counters(splits: int) -> int:
    """Counts that the Hopper kernel keeps a (sequence, KV head), as in cuda/paged_attention.cu."""
    return 1 + -(-splits // AT_ONCE)


def hopper_call(
    q: jax.ShapeDtypeStruct, pages: KVPages, max_pages: int, window, rings=False, variant=None,
    split=None,
) -> tuple[tuple, dict]:  # fmt: skip
    """What the Hopper kernel is told of a call: shapes of its results, and its attributes.

    Its results are the output, partial results and how many of them have been written.
    """
    batch, heads, d = q.shape
    index, warps = variant or HOPPER_VARIANTS[pages.kind, d][0]
    tiles = batch * pages.kv_heads * -(-heads // pages.kv_heads // 8)
    seen = min(max_pages, window // PAGE + 1) if window else max_pages
    split = split or split_pages(tiles, seen, BLOCKS * warps)
    splits = split_count(split, max_pages) + rings
    out = (
        jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),
        jax.ShapeDtypeStruct((tiles, splits, 8, d), jnp.float32),
        jax.ShapeDtypeStruct((tiles, splits, 8, 2), jnp.float32),
        jax.ShapeDtypeStruct((tiles, counters(splits)), jnp.int32),
    )
    numbers = {
        "variant": index, "kv_heads": pages.kv_heads, "window": window or 0,
        "warps": BLOCKS * warps, "split": split,
    }  # fmt: skip
    return out, {name: np.int64(number) for name, number in numbers.items()}


def _hopper(
    q, pages, table, lengths, scale, window, sink, recent=None, variant=None, split=None
):  # fmt: skip
    rings = recent is not None
    out, numbers = hopper_call(q, pages, table.shape[1], window, rings, variant, split)
    return jax.ffi.ffi_call(cuda_build.register("paged_attention"), out)(
        pages.data, table, lengths, q,
        jnp.zeros(0, jnp.float32) if sink is None else sink.astype(jnp.float32),
        recent.data if rings else jnp.zeros(0, jnp.uint8),
        recent_tokens=np.int64(recent.data.shape[0] // q.shape[0] * PAGE if rings else 0),
        scale=np.float32(scale), **numbers,
    )[0]  # fmt: skip


def _tpu(
    q, pages, table, lengths, scale, window, sink, recent=None, interpret=False, float4=None
):  # fmt: skip
    return kv_attention_tpu.attention(
        q, pages.arrays, table, lengths, scale, window, sink, interpret, float4
    )


def _triton(q, pages, table, lengths, scale, window, sink, recent=None):
    from trace_jax.kernels import kv_attention_triton

    ring = None if recent is None else ring_table(recent, q.shape[0])
    return kv_attention_triton.paged_attention(
        q, pages, table, lengths, scale, window, sink, recent, ring
    )


VERSIONS = {
    "reference": _reference,
    "hopper": _hopper,
    "triton": _triton,
    "pallas_tpu": _tpu,
    "pallas_interpret": partial(_tpu, interpret=True),
}


def _pallas_refusal(q, pages, recent) -> str | None:
    if recent is not None:
        return "it does not read a window of recent tokens"
    if q.dtype != jnp.bfloat16:
        return f"it takes BF16 queries, not {q.dtype}"
    if pages.layout != "tpu":
        return f"it takes pages in the layout 'tpu', not {pages.layout!r}"
    return None


def _tpu_refusal(q, pages, recent) -> str | None:
    if dispatch.platform() != "tpu":
        return f"it needs a TPU; the platform is {dispatch.platform()}"
    return _pallas_refusal(q, pages, recent)


def hopper_refusal(q, pages) -> str | None:
    """Why the CUDA kernel cannot attend with q to pages; None if it can."""
    if pages.layout != "hopper":
        return f"it takes pages in the layout 'hopper', not {pages.layout!r}"
    if q.dtype != jnp.bfloat16:
        return f"it takes BF16 queries, not {q.dtype}"
    if q.shape[0] > HOPPER_BATCH:
        return f"it takes up to {HOPPER_BATCH} sequences, not {q.shape[0]}"
    return cuda_build.hopper_refusal()


def _triton_refusal(q, pages, recent) -> str | None:
    for pool in (pages, recent):
        if pool is not None and pool.layout != "triton":
            return f"it takes pages in the layout 'triton', not {pool.layout!r}"
    if q.dtype != jnp.bfloat16:
        return f"it takes BF16 queries, not {q.dtype}"
    return triton_call.refusal()


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    table: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    sink: jax.Array | None = None,
    recent: KVPages | None = None,
    version: str = "auto",
) -> jax.Array:
    """Attention of one token a sequence; the module docstring is the contract.

    Args:
      q: BF16 [batch, query heads, D], after RoPE, not scaled.
      pages: the pool, see kv_pages.
      table: int32 [batch, max_pages], page ids in order; entries past the length are unused
        but must be valid ids.
      lengths: int32 [batch], stored tokens, at most 64 * max_pages; 0 for an idle slot.
      scale: softmax scale, usually D ** -0.5.
      window: sliding window in tokens, the current one included; None for all.
      sink: FP32 [query heads], a logit a head that takes probability and gives nothing.
      recent: the last tokens in BF16, from kv_recent.new_recent; None: all from the pages.
      version: "auto", "reference", "hopper", "triton", "pallas_tpu", or "pallas_interpret" (the
        TPU kernel, interpreted: slow, anywhere).

    Returns:
      BF16 [batch, query heads, D].

    Raises:
      ValueError: shapes that do not fit the pages, or a version that cannot run this call.
    """
    kv_heads = pages.kv_heads
    if q.shape[-1] != pages.head_size or q.shape[1] % kv_heads:
        raise ValueError(
            f"paged_attention: {q.shape[1]} heads of size {q.shape[-1]} do not fit pages of "
            f"{kv_heads} KV heads of size {pages.head_size}"
        )
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window is {window}; write a positive number or None")
    refusals = {
        "reference": lambda: None,
        "hopper": lambda: hopper_refusal(q, pages),
        "triton": lambda: _triton_refusal(q, pages, recent),
        "pallas_tpu": lambda: _tpu_refusal(q, pages, recent),
        "pallas_interpret": lambda: _pallas_refusal(q, pages, recent),
    }
    best = {"gpu": ("hopper", "triton"), "tpu": ("pallas_tpu",)}
    name = dispatch.choose("paged_attention", version, refusals, best)
    return VERSIONS[name](q, pages, table, lengths, scale, window, sink, recent)
