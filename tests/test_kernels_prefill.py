"""Products of many rows: what the shared suite (test_kernels_expert_matmul) does not reach."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import ON_GPU, decode, poison, relative_error

from trace_jax.fp4 import NVFP4, quantize
from trace_jax.kernels import cuda_build, dispatch, prefill
from trace_jax.kernels import expert_matmul as em
from trace_jax.kernels.expert_layer import expert_layer

LOAD = (0, 1, 63, 64, 65, 128, 129, 574)  # rows an expert: around the tiles of 64 and 128

quantize_expert = jax.jit(lambda w: quantize(w, NVFP4, outer_axes=(1, 2)))
lay_out = jax.jit(em.lay_out)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def routed(load, top_k=1):
    flat = np.random.default_rng(0).permutation(np.repeat(np.arange(len(load)), load))
    ids = jnp.asarray(flat.reshape(-1, top_k), jnp.int32)
    return em.route(ids, len(load), version="reference")


@ON_GPU
@pytest.mark.parametrize("quantized", (True, False), ids=("nvfp4", "bf16"))
@pytest.mark.parametrize("n, k", ((272, 192), (768, 2048)))  # 17 tiles of 16; whole ones
def test_rows_around_the_tiles(quantized, n, k):
    """Each row against float64; outputs of experts' neighbours stay whole."""
    w = normal(1, len(LOAD), n, k)
    q = quantize_expert(w)
    value = decode(q) if quantized else np.asarray(w, np.float64)
    routing, x = routed(LOAD), normal(2, sum(LOAD), k)
    poison(((sum(LOAD), n), jnp.float32))
    out = em.expert_matmul(x, lay_out(q if quantized else w), routing, version="prefill")
    expert = np.repeat(np.arange(len(LOAD)), LOAD)
    rows = np.asarray(out)[np.asarray(routing.slot)]
    for e, first in enumerate(np.cumsum([0, *LOAD[:-1]])):
        at = slice(first, first + LOAD[e])
        want = np.asarray(x, np.float64)[at] @ value[e].T
        error = np.linalg.norm(rows[at] - want, axis=1) / np.linalg.norm(want, axis=1)
        assert (error < 4e-6).all() and (expert[at] == e).all()


@ON_GPU
@pytest.mark.parametrize("gated", (True, False), ids=("gate_up", "down"))
def test_experts_in_groups_give_the_same_bits(gated):
    w = [quantize_expert(normal(i, len(LOAD), 144, 320)) for i in (1, 2)]
    laid = lay_out(*w) if gated else lay_out(w[0])
    routing, x = routed(LOAD), normal(3, sum(LOAD), 320)
    run = partial(prefill.expert_matmul, x, laid, routing, None, 1 if gated else 0)
    _, size = prefill.scratch_shape(laid, 2**30)
    whole, parts = run(), run(limit=3 * size)
    np.testing.assert_array_equal(whole, parts)
    assert np.isfinite(np.asarray(whole, np.float32)).all()


@ON_GPU
def test_a_row_gives_the_same_bits_in_any_company():
    gate, up = (quantize_expert(normal(i, 8, 64, 512)) for i in (1, 2))
    laid, x, results = lay_out(gate, up), normal(3, 2048, 512), []
    for others in (0, 3, None):
        ids = np.arange(2048) % 8 if others is None else np.full(2048, others)
        ids[:5] = (0, 1, 2, 3, 0)
        routing = em.route(jnp.asarray(ids, jnp.int32)[:, None], 8)
        out = em.expert_matmul(x, laid, routing, activation="silu", version="prefill")
        where = np.argsort(np.asarray(routing.slot))[:5]
        results.append(np.asarray(out)[where])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@ON_GPU
def test_it_agrees_with_the_kernel_of_few_rows():
    """The engine changes from one to the other with the rows; both round the same FP32 sums."""
    gate, up = (quantize_expert(normal(i, 8, 768, 2048)) for i in (1, 2))
    laid, routing, x = lay_out(gate, up), routed(LOAD), normal(3, sum(LOAD), 2048)
    run = partial(em.expert_matmul, x, laid, routing, activation="silu")
    assert relative_error(run(version="prefill"), run(version="hopper")) < 5e-4


def test_scratch_holds_as_many_experts_as_the_limit_allows():
    laid = jax.eval_shape(em.lay_out, *[jax.ShapeDtypeStruct((10, 136, 208), jnp.bfloat16)] * 2)
    block = 256 * 64 * 2  # bytes: outputs x K
    size = 2 * 4 * block  # 17 tiles of 8 + 8 outputs are 2 blocks, K of 208 is 4 chunks
    assert prefill.scratch_shape(laid, 2**30) == (10, size)
    assert prefill.scratch_shape(laid, 4 * size) == (4, size)  # 3 groups of 4, 4 and 2
    assert prefill.scratch_shape(laid, 9 * size) == (5, size)  # two even groups
    assert prefill.scratch_shape(laid, 1) == (1, size)


def test_scratch_is_told_ahead_for_the_larger_product_and_for_many_rows_alone():
    shape = jax.ShapeDtypeStruct
    gate_up = jax.eval_shape(em.lay_out, *[shape((12, 768, 2048), jnp.bfloat16)] * 2)
    down = jax.eval_shape(em.lay_out, shape((12, 2048, 768), jnp.bfloat16))
    limit = prefill.SCRATCH_BYTES
    shapes = [prefill.scratch_shape(w, limit) for w in (gate_up, down)]
    taken = [count * size for count, size in shapes]
    assert prefill.scratch_bytes(1024 * 12, 12, 2048, 768) == max(taken) == 12 * 2 * 2 * 768 * 2048
    assert prefill.scratch_bytes(1024 * 12 - 1, 12, 2048, 768) == 0
    assert limit / 2 < prefill.scratch_bytes(2**20, 512, 2048, 768) <= limit


def test_auto_takes_it_where_experts_have_many_rows(monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(dispatch, "device", lambda: gpu)
    monkeypatch.setattr(cuda_build, "_compiler_refusal", lambda: None)
    chosen = []
    monkeypatch.setattr(dispatch, "_log_once", lambda op, name, reasons: chosen.append((op, name)))
    shape = jax.ShapeDtypeStruct
    for name in ("hopper", "prefill"):
        monkeypatch.setitem(em.VERSIONS, name, lambda x, w, r, *_: jnp.zeros(
            (r.slot.shape[0], w.outputs), jnp.bfloat16 if w.gated else jnp.float32))  # fmt: skip
    weight = shape((32, 64, 64), jnp.bfloat16)
    gate_up, down = jax.eval_shape(em.lay_out, weight, weight), jax.eval_shape(em.lay_out, weight)
    few = prefill.ROWS_PER_EXPERT * 32 - 32
    for rows, want in ((few, ("expert_layer", "hopper")), (few + 32, ("expert_matmul", "prefill"))):
        routing = em.Routing(shape((rows,), jnp.int32), shape((33,), jnp.int32))
        x = shape((rows, 64), jnp.bfloat16)
        chosen.clear()
        monkeypatch.setitem(expert_layer.__globals__["VERSIONS"], "hopper",
                            lambda x, *_: (jnp.zeros(x.shape), None))  # fmt: skip
        jax.eval_shape(partial(expert_layer, activation="silu"), x, gate_up, down, routing)
        assert want in chosen and ("expert_matmul", "hopper") not in chosen
    assert not prefill.pays(prefill.ROWS - 1, 1)  # one expert: too few tiles for the device
