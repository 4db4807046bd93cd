"""Routed products: one suite for every version, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import PREFILL, TRITON, decode, layout_of, poison, relative_error, versions

from trace_jax.fp4 import MXFP4, NVFP4, QTensor, quantize, unscaled
from trace_jax.kernels import expert_matmul as em

TOP_K = 2
# Rows an expert: empty ones, one row against many, more than a pass, none at all but one.
LOADS = {
    "even": (16, 16, 16, 16),
    "empty": (0, 9, 0, 55),
    "one_row": (1, 0, 0, 63),
    "last_only": (0, 0, 0, 64),
}

lay_out = jax.jit(em.lay_out, static_argnames="layout")
product = jax.jit(em.expert_matmul, static_argnames=("activation", "version"))
quantize_expert = jax.jit(lambda w: quantize(w, NVFP4, outer_axes=(1, 2)))


def expert_ids(load, top_k=TOP_K):
    flat = np.repeat(np.arange(len(load)), load)
    return np.random.default_rng(0).permutation(flat).reshape(-1, top_k).astype(np.int32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@functools.cache
def weights(experts, n, k, quantized):
    """Gate, up or plain weights with very different experts, and their float64 values."""
    size = jnp.exp2(jnp.arange(experts, dtype=jnp.float32) * 5 - 10)[:, None, None]
    w = [(normal(i, experts, n, k) * size).astype(jnp.bfloat16) for i in (1, 2)]
    if quantized:
        w = [quantize_expert(a) for a in w]
        return w, [decode(q) for q in w]
    return w, [np.asarray(a, np.float64) for a in w]


def rows_of(load):
    ids = expert_ids(load)
    flat = ids.reshape(-1)
    return ids, np.argsort(flat, kind="stable"), np.sort(flat, kind="stable")


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_route_orders_slots_by_expert(version, load):
    ids, slot, expert = rows_of(load)
    routing = em.route(jnp.asarray(ids), len(load) + 1, version=version)
    np.testing.assert_array_equal(routing.slot, slot)
    np.testing.assert_array_equal(routing.offset, np.cumsum([0, *load, 0]))


@pytest.mark.parametrize("version", versions(TRITON, PREFILL))
@pytest.mark.parametrize("quantized", (True, False), ids=("nvfp4", "bf16"))
@pytest.mark.parametrize("k", (48, 768, 2048))
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_plain_product(version, quantized, k, load):
    n = 32
    ids, slot, expert = rows_of(load)
    (w, _), (value, _) = weights(len(load), n, k, quantized)
    x = normal(3, ids.size, k)
    poison(((ids.size, n), jnp.float32))
    routing = em.route(jnp.asarray(ids), len(load), version="reference")
    out = product(x, lay_out(w, layout=layout_of(version)), routing, version=version)
    want = np.zeros((ids.size, n))
    want[slot] = np.einsum("rk,rnk->rn", np.asarray(x, np.float64), value[expert])
    # Every row counts by itself: a small expert must not hide behind a large one. Tensor cores
    # add with truncation, so errors grow with the steps of K: 2.2e-6 was seen at 2048.
    bound = 2e-6 if k < 2048 else 4e-6
    for got, row in zip(np.asarray(out), want, strict=True):
        assert relative_error(got, row) < bound


@pytest.mark.parametrize("version", versions(TRITON, PREFILL))
@pytest.mark.parametrize("activation", ("silu", "clamped_swiglu"))
@pytest.mark.parametrize("quantized", (True, False), ids=("nvfp4", "bf16"))
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_gated_product(version, activation, quantized, load):
    f, k = 24, 2048
    ids, slot, expert = rows_of(load)
    (gate, up), (gate_value, up_value) = weights(len(load), f, k, quantized)
    tokens = ids.shape[0]
    x, x_outer = normal(3, tokens, k), jnp.exp2(jnp.arange(tokens, dtype=jnp.float32) % 5 - 8)
    poison(((ids.size, f), jnp.bfloat16))
    routing = em.route(jnp.asarray(ids), len(load), version="reference")
    out = product(
        x,
        lay_out(gate, up, layout=layout_of(version)),
        routing,
        x_outer=x_outer,
        activation=activation,
        version=version,
    )
    source = slot // TOP_K
    scaled = np.asarray(x, np.float64)[source] * np.asarray(x_outer, np.float64)[source, None]
    a = np.einsum("rk,rfk->rf", scaled, gate_value[expert])
    b = np.einsum("rk,rfk->rf", scaled, up_value[expert])
    if activation == "clamped_swiglu":
        a, b = np.minimum(a, 7), np.clip(b, -7, 7)
        want = a / (1 + np.exp(-1.702 * a)) * (b + 1)
    else:
        want = a / (1 + np.exp(-np.maximum(a, -700))) * b
    error = np.abs(np.asarray(out, np.float64) - want)
    scale = np.linalg.norm(scaled, axis=1) * np.linalg.norm(gate_value[expert], axis=2).max(1)
    # One rounding to BF16, and FP32 sums whose error grows with their terms.
    assert (error <= 2**-7.9 * np.abs(want) + 1e-5 * scale[:, None] * (1 + np.abs(b))).all()
    assert relative_error(out, want) > 2e-4  # a result that is not rounded is not BF16


def test_clamped_form_keeps_low_gates():
    got = em.gated_activation(jnp.array([8.0, -10.0]), jnp.array([-9.0, 1.0]), "clamped_swiglu")
    np.testing.assert_allclose(got, [-41.9997, -10 / (1 + np.exp(17.02)) * 2], rtol=1e-5)


@pytest.mark.parametrize("version", versions(TRITON, PREFILL))
@pytest.mark.parametrize("scale_byte", (0x01, 0x08, 0x38, 0x7E))
def test_every_code_with_extreme_scales(version, scale_byte):
    k, n = 768, 16
    codes = np.arange(k) % 16 ^ np.arange(n)[:, None] % 16
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)[None]
    scales = np.full((1, n, k // 16), scale_byte, np.uint8)
    q = QTensor(
        jnp.asarray(packed), jnp.asarray(scales), jnp.full((1, 1, 1), 0.5), NVFP4, -1, k,
        jnp.dtype(jnp.bfloat16),
    )  # fmt: skip
    routing = em.Routing(jnp.array([0], jnp.int32), jnp.array([0, 1], jnp.int32))
    x = jnp.zeros((1, k), jnp.bfloat16)
    for at in (0, 1, 17, 399, 766):  # one input at a time: each weight is seen alone
        out = product(
            x.at[0, at].set(1), lay_out(q, layout=layout_of(version)), routing, version=version
        )
        np.testing.assert_array_equal(np.asarray(out)[0], decode(q)[0, :, at])


def test_layout_holds_all_codes_and_scales():
    byte = np.arange(128)
    scales = np.broadcast_to(byte[:127].repeat(1)[None, None], (1, 16, 127)).astype(np.uint8)
    codes = np.arange(16)[:, None] ^ np.arange(127 * 16) % 16
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)[None]
    q = QTensor(
        jnp.asarray(packed), jnp.asarray(scales), jnp.ones((1, 1, 1)), NVFP4, -1, 127 * 16,
        jnp.dtype(jnp.bfloat16),
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(em.decode_layout)(lay_out(q)), unscaled(q, jnp.float32))


@pytest.mark.parametrize("quantized", (True, False))
def test_layout_keeps_every_weight(quantized):
    (gate, up), (gate_value, up_value) = weights(4, 16, 96, quantized)
    laid = lay_out(gate, up)
    value = np.asarray(jax.jit(em.decode_layout)(laid), np.float64).reshape(4, 2, 16, 96)
    value *= np.asarray(laid.outer, np.float64)[:, :, None, None]
    np.testing.assert_array_equal(value[:, 0], gate_value)
    np.testing.assert_array_equal(value[:, 1], up_value)
    assert laid.outputs == 16 and lay_out(gate).outputs == 16


def test_bad_weights_stay_visible():
    w = normal(1, 2, 16, 32).at[1, 0, 0].set(jnp.nan)
    laid = lay_out(quantize_expert(w))
    assert np.isfinite(laid.outer[0]).all() and np.isnan(laid.outer[1]).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: em.lay_out(normal(1, 2, 24, 32)), "multiple of 16"),
        (lambda: em.lay_out(normal(1, 2, 16, 40)), "K is 40"),
        (lambda: em.lay_out(*[normal(1, 2, 16, 32)] * 2, bias=jnp.zeros((2, 16))), "up_bias"),
        (lambda: em.lay_out(normal(1, 2, 16, 32), layout="tpu"), "'hopper'"),
        (lambda: em.lay_out(quantize(normal(1, 2, 16, 32), NVFP4)), "one an expert"),
    ],
)
def test_layout_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_call_errors():
    routing = em.route(jnp.zeros((4, 2), jnp.int32), 2)
    plain, gated = em.lay_out(normal(1, 2, 16, 32)), em.lay_out(*weights(2, 16, 32, False)[0])
    with pytest.raises(ValueError, match="K = 16"):
        em.expert_matmul(normal(1, 8, 16), plain, routing)
    with pytest.raises(ValueError, match="activation"):
        em.expert_matmul(normal(1, 4, 32), gated, routing)
    with pytest.raises(ValueError, match="activation"):
        em.expert_matmul(normal(1, 8, 32), plain, routing, activation="silu")
    with pytest.raises(ValueError, match="do not fit"):
        em.expert_matmul(normal(1, 4, 32), plain, routing)


def test_hopper_variants_follow_the_rows_an_expert():
    variant = lambda *a: em.HOPPER_VARIANTS[em.hopper_variant(*a)]
    for rows in (0.01, 4, 1e6):
        assert variant(True, rows, 5) == (True, 0.0, False)
    assert [variant(False, rows, 32)[1] for rows in (1.0, 47, 48)] == [0.0, 0.0, 48.0]
    for chunks in (12, 32):
        assert [variant(True, rows, chunks) for rows in (0.01, 3.9)] == [
            (True, 0.0, True), (True, 0.5, True)
        ]  # fmt: skip
        assert not variant(True, 4, chunks)[2] and not variant(False, 1, chunks)[2]


def mxfp4(scale_bytes, n=16, k=64):
    """An MXFP4 weight with these scale bytes by expert, block and row, and all codes."""
    scales = np.broadcast_to(np.asarray(scale_bytes, np.uint8)[:, None], (len(scale_bytes), n, 2))
    codes = np.arange(k) % 16 ^ np.arange(n)[:, None]
    packed = np.broadcast_to((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8), (2, n, k // 2))
    return QTensor(
        jnp.asarray(packed), jnp.asarray(scales), jnp.ones((1, 1, 1)), MXFP4, -1, k,
        jnp.dtype(jnp.bfloat16),
    )  # fmt: skip


def test_mxfp4_layout_is_exact_over_twenty_octaves():
    q = mxfp4([[127, 107], [11, 230]])  # the second expert's first block is 219 octaves below
    laid = lay_out(q)
    value = np.asarray(jax.jit(em.decode_layout)(laid), np.float64)
    value *= np.asarray(laid.outer, np.float64)[:, :1, None]
    want = np.asarray(unscaled(q, jnp.float32), np.float64)
    np.testing.assert_array_equal(value[0], want[0])
    np.testing.assert_array_equal(value[1, :, 32:], want[1, :, 32:])
    assert not value[1, :, :32].any() and want[1, :, :32].any()
    assert np.isnan(lay_out(mxfp4([[127, 255], [1, 1]])).outer[0]).all()


@pytest.mark.parametrize("version", versions(TRITON, PREFILL))
def test_mxfp4_product_of_an_odd_k(version):
    experts, n, k = 4, 32, 160  # K is no multiple of 64, as GPT-OSS's 2880 / 32 is odd
    w = jax.jit(lambda w: quantize(w, MXFP4))(normal(1, experts, n, k))
    ids, slot, expert = rows_of(LOADS["one_row"])
    x = normal(3, ids.size, k)
    poison(((ids.size, n), jnp.float32))
    routing = em.route(jnp.asarray(ids), experts, version="reference")
    out = product(x, lay_out(w, layout=layout_of(version)), routing, version=version)
    value = np.asarray(unscaled(w, jnp.float32), np.float64)
    want = np.einsum("rk,rnk->rn", np.asarray(x, np.float64), value[expert])
    for got, row in zip(np.asarray(out)[slot], want, strict=True):
        assert relative_error(got, row) < 2e-6


@pytest.mark.parametrize("version", versions(TRITON, PREFILL))
@pytest.mark.parametrize("load", ("one_row", "empty"))
def test_biases(version, load):
    """GPT-OSS's form: biases of gate, up and down, clamped activation."""
    n, k, (ids, slot, expert) = 32, 192, rows_of(LOADS[load])
    (gate, up), values = weights(4, n, k, True)
    biases = [np.asarray(normal(i, 4, n), np.float32) for i in (5, 6)]
    routing = em.route(jnp.asarray(ids), 4, version="reference")
    x = normal(3, ids.shape[0], k)
    laid = em.lay_out(
        gate,
        up,
        bias=jnp.asarray(biases[0]),
        up_bias=jnp.asarray(biases[1]),
        layout=layout_of(version),
    )
    got = product(x, laid, routing, activation="clamped_swiglu", version=version)
    rows = np.asarray(x, np.float64)[slot // TOP_K]
    a, b = (
        np.einsum("rk,rfk->rf", rows, v[expert]) + bias[expert]
        for v, bias in zip(values, biases, strict=True)
    )
    a, b = np.minimum(a, 7), np.clip(b, -7, 7)
    want = a / (1 + np.exp(np.minimum(-1.702 * a, 700))) * (b + 1)
    assert relative_error(got, want) < 3e-3  # one rounding to BF16
    x = normal(4, ids.size, k)
    laid = em.lay_out(gate, bias=jnp.asarray(biases[0]), layout=layout_of(version))
    got = np.asarray(product(x, laid, routing, version=version))[slot]
    want = np.einsum("rk,rnk->rn", np.asarray(x, np.float64), values[0][expert])
    want = want + biases[0][expert]
    for g, row in zip(got, want, strict=True):
        assert relative_error(g, row) < 2e-6


@pytest.mark.parametrize("version", versions(TRITON, PREFILL))
@pytest.mark.parametrize("tokens", (1, 17, 130))
def test_dense_product(version, tokens):
    (w, _), (value, _) = weights(1, 48, 320, True)
    x = normal(3, tokens, 320)
    poison(((tokens, 48), jnp.float32))
    got = em.matmul(x, lay_out(w, layout=layout_of(version)), version=version)
    for row, x_row in zip(np.asarray(got), np.asarray(x, np.float64), strict=True):
        assert relative_error(row, value[0] @ x_row) < 2e-6


@pytest.mark.parametrize("version", versions(TRITON, PREFILL))
def test_many_rows_of_few_experts(version):
    """Several parts of one expert's rows, beside an expert with a single row."""
    n, k, load = 64, 128, (1, 0, 333, 10)
    ids, slot, expert = rows_of(load)
    (w, _), (value, _) = weights(4, n, k, True)
    x = normal(3, ids.size, k)
    poison(((ids.size, n), jnp.float32))
    routing = em.route(jnp.asarray(ids), 4, version="reference")
    out = product(x, lay_out(w, layout=layout_of(version)), routing, version=version)
    want = np.einsum("rk,rnk->rn", np.asarray(x, np.float64), value[expert])
    for got, row in zip(np.asarray(out)[slot], want, strict=True):
        assert relative_error(got, row) < 2e-6


@pytest.mark.parametrize("version", versions(TRITON, PREFILL))
def test_gradients_pass_through_dequantized_weights(version):
    load = (3, 0, 5, 8)
    ids, slot, expert = rows_of(load)
    (gate, up), (gate_value, up_value) = weights(4, 16, 64, True)
    routing = em.route(jnp.asarray(ids), 4, version="reference")
    x, g = normal(3, ids.size, 64), jax.random.normal(jax.random.key(4), (ids.size, 16))
    call = lambda x: jnp.vdot(
        g, em.expert_matmul(x, lay_out(gate, layout=layout_of(version)), routing, version=version)
    )
    dx = np.asarray(jax.grad(call)(x), np.float64)
    want = np.einsum("rn,rnk->rk", np.asarray(g, np.float64)[slot], gate_value[expert])
    for got, row in zip(dx, want, strict=True):
        assert relative_error(got, row) < 4e-3  # rounded to x's BF16
    tokens, scale = normal(5, ids.shape[0], 64), jnp.full(ids.shape[0], 2.0**-9)
    laid = lay_out(gate, up, layout=layout_of(version))
    gated = lambda s: em.expert_matmul(
        tokens, laid, routing, x_outer=s, activation="silu", version=version
    ).astype(jnp.float32).sum()  # fmt: skip
    step = 2.0**-12
    rows, outer = np.asarray(tokens, np.float64)[slot // TOP_K], np.asarray(scale, np.float64)

    def exact(outer):
        a, b = (np.einsum("rk,rfk->rf", rows, v[expert]) for v in (gate_value, up_value))
        a, b = (v * outer[slot // TOP_K, None] for v in (a, b))
        return (a / (1 + np.exp(-np.clip(a, -500, None))) * b).sum(1)

    slope = (exact(outer + step) - exact(outer - step)) / (2 * step)
    want = np.zeros(ids.shape[0])
    np.add.at(want, slot // TOP_K, slope)
    assert relative_error(jax.grad(gated)(scale), want) < 2e-2
