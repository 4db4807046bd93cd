"""Products of many rows: part of `python -m benchmarks.kernels`."""

from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.kernel_timing import (
    EXPERTS,
    FF,
    HIDDEN,
    TOP_K,
    checked,
    pointer,
    pointers,
    random_weights,
    routing,
    row,
    time_calls,
)
from trace_jax.kernels import expert_matmul as em
from trace_jax.kernels import prefill
from trace_jax.kernels.expert_layer import expert_layer
from trace_jax.kernels.quantize import ROW_FORMAT

TOKENS = (4096, 32768)
_UNPACK, _PRODUCT, _BOTH = 1, 2, 3  # parts of a call; see cuda/bench_prefill.cu


def time_prefill(lib, copy: float) -> list[dict]:
    """NVFP4: weights to BF16 scratch, then the product. BF16: the same product of weights that
    lie there. A layer is the engine's op, with quantization in between, as JAX runs it, or in
    BF16 both products alone."""
    draw = jax.jit(random_weights, static_argnums=(0, 1))
    weights = {gated: [draw(True, gated, i) for i in range(2)] for gated in (True, False)}
    rows = [_time_unpack(lib, copy, weights[gated], gated) for gated in (True, False)]
    for tokens in TOKENS:
        r, layer = routing(tokens), 0.0
        for gated in (True, False):
            op = "prefill " + ("gate+up" if gated else "down")
            flops = 2 * tokens * TOP_K * HIDDEN * FF * (2 if gated else 1)
            product = _time_product(lib, weights[gated], gated, tokens, r, _PRODUCT)
            whole = _time_product(lib, weights[gated], gated, tokens, r, _BOTH)
            rows += [
                _row(op, "bf16", tokens, product, flops),
                _row(op, "nvfp4", tokens, whole, flops),
            ]
            layer += product
        flops = 6 * tokens * TOP_K * HIDDEN * FF
        rows.append(_row("prefill layer", "bf16", tokens, layer, flops))
        rows.append(_row("prefill layer", "nvfp4", tokens, _time_layer(weights, tokens, r), flops))
    return rows


def _row(op, kind, tokens, us, flops) -> dict:
    case, tflops = f"{kind}, {EXPERTS} experts hit", flops / us / 1e6
    print(f"{op:24} {case:34} {us:19.1f} us  {tflops:.0f} TFLOP/s", flush=True)
    many = prefill.pays(tokens * TOP_K, EXPERTS) or op != "prefill layer"
    return dict(
        op=op, case=case, tokens=tokens, us=round(us, 2), tflops=round(tflops, 1),
        ratio_to_bf16=None, version="prefill" if many or kind == "bf16" else "hopper", kernel="v0",
    )  # fmt: skip


def _scratch(weights, gated) -> tuple[tuple[int, int], list[jax.Array]]:
    laid = em.ExpertWeights(weights[0], None, True, gated, HIDDEN if gated else FF)
    shape = prefill.scratch_shape(laid, prefill.SCRATCH_BYTES)
    return shape, [jnp.zeros(shape, jnp.uint8) for _ in weights]


def _call(lib, weights, scratch, group, gated, r, arrays, parts) -> float:
    outer, x, out = arrays
    experts = group if parts == _UNPACK else EXPERTS
    jax.block_until_ready((weights, scratch, arrays, r))
    return checked(lib.bench_prefill(
        pointers(weights), pointers(scratch), len(weights), parts, pointer(outer), pointer(x),
        pointer(r.slot), pointer(r.offset), pointer(out), experts, group, weights[0].shape[1],
        HIDDEN if gated else FF, TOP_K, int(gated), 9,
    ))  # fmt: skip


def _arrays(tokens, gated) -> list[jax.Array]:
    k, n, rows = (HIDDEN, FF, tokens) if gated else (FF, HIDDEN, tokens * TOP_K)
    return [
        jnp.ones((EXPERTS, 2), jnp.float32),
        jax.random.normal(jax.random.key(1), (rows, k), jnp.bfloat16),
        jnp.zeros((tokens * TOP_K, n), jnp.bfloat16 if gated else jnp.float32),
    ]


def _time_unpack(lib, copy, weights, gated) -> dict:
    (group, size), scratch = _scratch(weights, gated)
    us = _call(lib, weights, scratch, group, gated, routing(1), _arrays(1, gated), _UNPACK)
    byte_count = weights[0].nbytes * group // EXPERTS + group * size
    op = "unpack " + ("gate+up" if gated else "down")
    return row(op, f"nvfp4, {group} experts", 0, us, byte_count, copy, "v0", "prefill")


def _time_product(lib, weights, gated, tokens, r, parts) -> float:
    (group, _), scratch = _scratch(weights, gated)
    if parts == _PRODUCT:  # of BF16 values that are there
        _call(lib, weights, scratch, group, gated, r, _arrays(1, gated), _UNPACK)
    return _call(lib, weights, scratch, group, gated, r, _arrays(tokens, gated), parts)


def _time_layer(weights, tokens, r) -> float:
    outer = jnp.ones((EXPERTS, 2), jnp.float32)
    laid = [
        [em.ExpertWeights(w, outer, True, gated, HIDDEN if gated else FF) for w in weights[gated]]
        for gated in (True, False)
    ]
    x = jax.random.normal(jax.random.key(1), (tokens, HIDDEN), jnp.bfloat16)
    layer = partial(expert_layer, activation="silu", fmt=ROW_FORMAT)
    return time_calls(lambda w: layer(x, *w, r)[0], list(zip(*laid, strict=True)))
