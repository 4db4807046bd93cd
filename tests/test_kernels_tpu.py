"""The Pallas TPU kernels: right when interpreted, and compiled ahead of time for each TPU."""

import importlib.util
import os
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_helpers import decode, relative_error

from trace_jax.fp4 import NVFP4, quantize
from trace_jax.kernels import dispatch, fp4_tpu, grouped_matmul_tpu
from trace_jax.kernels import expert_matmul as em
from trace_jax.kernels import kv_attention as ka
from trace_jax.kernels import kv_pages as kp
from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_units import KV_FORMAT

EXPERTS, N, K, TOP_K = 4, 256, 256, 2
LOADS = {"even": (12, 12, 12, 12), "empty": (0, 1, 0, 47), "first_only": (48, 0, 0, 0)}
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")

quantize_expert = jax.jit(lambda w: quantize(w, NVFP4, outer_axes=(1, 2)))
lay_out = jax.jit(partial(em.lay_out, layout="tpu"))
product = jax.jit(
    partial(em.expert_matmul, version="pallas_interpret"), static_argnames="activation"
)


def weight(seed):
    size = jnp.exp2(jnp.arange(EXPERTS, dtype=jnp.float32) * 4 - 8)[:, None, None]
    w = jax.random.normal(jax.random.key(seed), (EXPERTS, N, K)) * size
    return quantize_expert(w.astype(jnp.bfloat16))


def routed(load):
    expert = np.repeat(np.arange(EXPERTS), load)
    ids = np.random.default_rng(0).permutation(expert).reshape(-1, TOP_K).astype(np.int32)
    slot = np.argsort(ids.reshape(-1), kind="stable")
    return em.route(jnp.asarray(ids), EXPERTS, version="reference"), slot, expert


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_plain_product(load):
    routing, slot, expert = routed(load)
    w = weight(1)
    x = jax.random.normal(jax.random.key(2), (48, K), jnp.bfloat16)
    out = np.asarray(product(x, lay_out(w), routing))[slot]
    want = np.einsum("rk,rnk->rn", np.asarray(x, np.float64), decode(w)[expert])
    for got, row in zip(out, want, strict=True):
        assert relative_error(got, row) < 2e-6


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("activation", ("silu", "clamped_swiglu"))
def test_gated_product_equals_the_reference(activation, load):
    routing, _, _ = routed(load)
    gate, up = weight(1), weight(2)
    x = jax.random.normal(jax.random.key(3), (24, K), jnp.bfloat16)
    x_outer = jnp.exp2(jnp.arange(24, dtype=jnp.float32) % 5 - 3)
    out = product(x, lay_out(gate, up), routing, x_outer=x_outer, activation=activation)
    want = em.expert_matmul(
        x, em.lay_out(gate, up), routing, x_outer=x_outer, activation=activation,
        version="reference",
    )  # fmt: skip
    # Sums in another order, then one rounding to BF16: now and then a neighbour.
    assert relative_error(out, want) < 5e-4


def test_float4_reads_the_same_weights():
    """TPU v7's way to read the bytes, interpreted: same products, rows of K in one sum."""
    routing, _, _ = routed(LOADS["empty"])
    gate, up = weight(1), weight(2)
    x = jax.random.normal(jax.random.key(3), (24, K), jnp.bfloat16)
    run = partial(em._tpu, x_outer=None, activation="silu", interpret=True)
    outs = [jax.jit(partial(run, float4=f))(x, lay_out(gate, up), routing) for f in (True, False)]
    assert relative_error(*outs) < 5e-4
    for chip, float4 in (("TPU7x", True), ("TPU v6 lite", False), ("cpu", False)):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(dispatch, "device", lambda chip=chip: types.SimpleNamespace(device_kind=chip))
            assert fp4_tpu.float4_here() == float4


def test_both_layouts_hold_the_same_weights():
    gate, up = weight(1), weight(2)
    both = [em.decode_layout(em.lay_out(gate, up, layout)) for layout in ("tpu", "hopper")]
    np.testing.assert_array_equal(*both)


def test_refusals():
    routing, _, _ = routed(LOADS["even"])
    x, w = jnp.zeros((48, K), jnp.bfloat16), weight(1)
    with pytest.raises(ValueError, match="layout 'tpu', not 'hopper'"):
        em.expert_matmul(x, em.lay_out(w, layout="hopper"), routing, version="pallas_interpret")
    with pytest.raises(ValueError, match="needs a TPU"):
        em.expert_matmul(x, em.lay_out(w, layout="tpu"), routing, version="pallas_tpu")
    with pytest.raises(ValueError, match="layout 'hopper', not 'tpu'"):
        em.expert_matmul(x, em.lay_out(w, layout="tpu"), routing, version="hopper")
    with pytest.raises(ValueError, match="takes FP4, not BF16"):
        em.lay_out(jnp.zeros((2, 16, 32), jnp.bfloat16), layout="tpu")


def compile_for(topology, function, *shapes):
    """Compiles `function` for one chip of a TPU that is not here."""
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    here = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), shapes)
    return jax.jit(function).lower(*shapes).compile()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("gated", (True, False), ids=("gate_up", "down"))
def test_compiles_ahead_of_time(topology, gated):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: TPU kernels are not compiled")
    experts, tokens = 16, 64
    n, k = (768, 2048) if gated else (2048, 768)
    parts = 2 if gated else 1
    shape = jax.ShapeDtypeStruct
    weights = em.ExpertWeights(
        shape((experts, parts, k // 2, n), jnp.uint8), shape((experts, 2), jnp.float32), True,
        gated, k, shape((experts, parts, k // 16, n), jnp.uint8), "tpu",
    )  # fmt: skip
    rows = tokens * TOP_K
    routing = em.Routing(shape((rows,), jnp.int32), shape((experts + 1,), jnp.int32))
    x = shape((tokens if gated else rows, k), jnp.bfloat16)
    float4 = topology.startswith("tpu7x")
    run = partial(em._tpu, x_outer=None, activation="silu" if gated else None, float4=float4)
    text = compile_for(topology, run, x, weights, routing).as_text()
    assert "custom-call" in text and "tpu_custom_call" in text


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_products_of_a_learner_compile_ahead_of_time(topology):
    """Without a copy of an expert's weight, or a gradient of it, for each tile of rows."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: TPU kernels are not compiled")
    experts, tiles, n, k = 16, 272, 1536, 2048
    shape = jax.ShapeDtypeStruct
    g, x = (shape((256 * tiles, width), jnp.bfloat16) for width in (n, k))
    weight, owner = shape((experts, n, k), jnp.bfloat16), shape((tiles,), jnp.int32)
    rows = partial(grouped_matmul_tpu.rows_product, axis=2)
    programs = (
        compile_for(topology, rows, x, weight, owner),
        compile_for(
            topology, partial(grouped_matmul_tpu.weight_gradient, experts=experts), g, x, owner
        ),
    )
    for program in programs:
        assert "tpu_custom_call" in program.as_text()
        assert program.memory_analysis().temp_size_in_bytes < 2 * experts * n * k * 4


# --- paged attention ------------------------------------------------------------------------

HEADS = 2
write_pages = jax.jit(kp.write_pages)
attention = jax.jit(
    partial(ka.paged_attention, version="pallas_interpret"), static_argnames=("scale", "window")
)


def pages_and_values(d, batch=3, max_pages=3, filler=None, lengths=None):
    shape = (batch * max_pages, 64, HEADS, d)
    k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2))
    if filler is not None:
        token = jnp.arange(max_pages * 64)[None] < lengths[:, None]
        used = token.reshape(*shape[:2], 1, 1)
        k, v = (jnp.where(used, x, jnp.bfloat16(filler)) for x in (k, v))
    ids = jax.random.permutation(jax.random.key(3), batch * max_pages).astype(jnp.int32)
    pages = write_pages(kp.new_pages(batch * max_pages, HEADS, d, layout="tpu"), ids, k, v)
    quantized = [jax.jit(partial(quantize, format=KV_FORMAT, outer_axes=(3,)))(x) for x in (k, v)]
    values = [decode(q).reshape(batch, -1, HEADS, d) for q in quantized]
    return pages, ids.reshape(batch, max_pages), *values


def oracle(q, k, v, lengths, scale, window=None, sink=None):
    out, group = np.zeros(q.shape), q.shape[1] // HEADS
    for b, length in enumerate(np.asarray(lengths)):
        live = slice(max(0, length - window) if window else 0, length)
        for h in range(q.shape[1] if length else 0):
            s = k[b, live, h // group] @ np.asarray(q[b, h], np.float64) * scale
            extra = [] if sink is None else [float(sink[h])]
            p = np.exp(np.append(s, extra) - max([*s, *extra]))
            out[b, h] = p[: len(s)] @ v[b, live, h // group] / p.sum()
    return out


@pytest.mark.parametrize("d, group", ((64, 1), (128, 8), (256, 5)))
@pytest.mark.parametrize("window", (None, 70))
def test_paged_attention(d, group, window):
    pages, table, k, v = pages_and_values(d)
    lengths = jnp.array([0, 65, 192], jnp.int32)
    q = jax.random.normal(jax.random.key(4), (3, HEADS * group, d), jnp.bfloat16)
    sink = None if window is None else jnp.arange(HEADS * group, dtype=jnp.float32)
    out = attention(q, pages, table, lengths, scale=d**-0.5, window=window, sink=sink)
    want = oracle(q, k, v, lengths, d**-0.5, window, sink)
    assert not np.asarray(out[0]).any()
    for got, row in zip(np.asarray(out)[1:], want[1:], strict=True):
        assert relative_error(got, row) < 4.5e-3
    assert relative_error(out, want) > 1e-4


def test_float4_reads_the_same_pages():
    pages, table, k, v = pages_and_values(64)
    lengths = jnp.array([0, 65, 192], jnp.int32)
    q = jax.random.normal(jax.random.key(4), (3, HEADS * 5, 64), jnp.bfloat16)
    run = partial(ka._tpu, scale=0.125, window=70, sink=None, interpret=True, float4=True)
    out = jax.jit(run)(q, pages, table, lengths)
    assert relative_error(out, oracle(q, k, v, lengths, 0.125, 70)) < 4.5e-3


def test_unused_slots_of_a_page_have_no_effect():
    lengths = jnp.array([0, 65, 150], jnp.int32)
    q = jax.random.normal(jax.random.key(4), (3, 4, 64), jnp.bfloat16)
    outs = []
    for filler in (0.0, jnp.nan):
        pages, table, _, _ = pages_and_values(64, filler=filler, lengths=lengths)
        outs.append(attention(q, pages, table, lengths, scale=0.125))
    np.testing.assert_array_equal(*outs)


def test_pages_hold_what_the_other_layout_holds_and_append_equals_write():
    k, v = (jax.random.normal(jax.random.key(i), (2, 64, HEADS, 64), jnp.bfloat16) for i in (1, 2))
    ids, table = jnp.array([3, 1]), jnp.array([[3, 0], [1, 2]])
    want = write_pages(kp.new_pages(4, HEADS, 64, layout="tpu"), ids, k, v)
    other = write_pages(kp.new_pages(4, HEADS, 64, layout="hopper"), ids, k, v)
    read = jax.jit(kp.read_pages)
    for a, b in zip(read(want, ids), read(other, ids), strict=True):
        np.testing.assert_array_equal(a, b)
    pages = write_pages(kp.new_pages(4, HEADS, 64, layout="tpu"), ids, v, k)
    add = jax.jit(append)
    for t in range(64):
        pages = add(pages, table, jnp.full(2, t), k[:, t], v[:, t]).pages
    idle = add(pages, table, jnp.array([-1, -1]), k[:, 0], v[:, 0]).pages
    for a, b in zip(pages.arrays, want.arrays, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(idle.arrays, want.arrays, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("window", (None, 128))
def test_attention_compiles_ahead_of_time(topology, window):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: TPU kernels are not compiled")
    pages = jax.eval_shape(lambda: kp.new_pages(64, 4, 128, layout="tpu"))
    shape = jax.ShapeDtypeStruct
    float4 = topology.startswith("tpu7x")
    run = partial(ka._tpu, scale=0.1, window=window, sink=None, float4=float4)
    table, lengths = shape((8, 8), jnp.int32), shape((8,), jnp.int32)
    compiled = compile_for(topology, run, shape((8, 32, 128), jnp.bfloat16), pages, table, lengths)
    assert "tpu_custom_call" in compiled.as_text()
