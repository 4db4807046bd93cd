"""The Triton kernels without a GPU: compiled for Ampere and Hopper, interpreted, lowered.

What needs Triton is skipped where it is not installed (`pip install "trace_jax[gpu]"`).
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton_helpers

from trace_jax.fp4 import NVFP4, quantize, unscaled
from trace_jax.kernels import cuda_build, dispatch, kv_units, triton_call
from trace_jax.kernels import expert_matmul as em
from trace_jax.kernels import kv_pages as kp
from trace_jax.kernels.bits import codes_of
from trace_jax.kernels.expert_layout import decode_bias
from trace_jax.kernels.kv_append import append
from trace_jax.kernels.kv_attention import paged_attention
from trace_jax.kernels.kv_units import KINDS
from trace_jax.kernels.quantize import quantize_rows

ARCHITECTURES = pytest.mark.parametrize("arch", (80, 90), ids=("sm_80", "sm_90"))
SHARED_MEMORY = 99 * 1024  # bytes a block may have on the smallest of them (RTX 30 and 40)
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: its kernels are not compiled",
)
shape = jax.ShapeDtypeStruct


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


# --- the calls -----------------------------------------------------------------------------------


def product(kind, gated, tokens, n, k, experts=128, top_k=8):
    """A routed product's function of its arrays, and their shapes."""
    weight = shape((experts, n, k), jnp.bfloat16)
    if kind == "nvfp4":
        weight = jax.eval_shape(lambda w: quantize(w, NVFP4, outer_axes=(1, 2)), weight)
    given = (weight, weight) if gated else (weight,)
    weights = jax.eval_shape(partial(em.lay_out, layout="triton"), *given)
    rows = tokens * top_k
    routing = em.Routing(shape((rows,), jnp.int32), shape((experts + 1,), jnp.int32))
    x = shape((tokens if gated else rows, k), jnp.bfloat16)
    call = partial(em.expert_matmul, activation="silu" if gated else None, version="triton")
    return call, (x, weights, routing)


def decode_step(op, kind, d):
    """Append or attention of 8 sequences, 4 KV heads."""
    pages = jax.eval_shape(lambda: kp.new_pages(64, 4, d, kind, "triton"))
    table, lengths = shape((8, 16), jnp.int32), shape((8,), jnp.int32)
    if op == "append":
        row = shape((8, 4, d), jnp.bfloat16)
        record = 1 if kind == "nvfp4" else None
        return partial(append, record=record, version="triton"), (pages, table, lengths, row, row)
    call = partial(paged_attention, scale=0.1, window=100, version="triton")
    return call, (shape((8, 32, d), jnp.bfloat16), pages, table, lengths)


CALLS = {
    "quantize": lambda: (
        partial(quantize_rows, version="triton"), (shape((1024, 2880), jnp.bfloat16),)
    ),
    "gate_up": lambda: product("nvfp4", True, 64, 768, 2048),
    "gate_up_many_rows": lambda: product("nvfp4", True, 2048, 768, 2048),
    "down": lambda: product("nvfp4", False, 64, 2048, 768),
    "down_odd_k": lambda: product("nvfp4", False, 64, 2880, 2880, 32, 4),
    "gate_up_bf16": lambda: product("bf16", True, 64, 768, 2048),
    **{
        f"{op}_{kind}_{d}": partial(decode_step, op, kind, d)
        for op in ("append", "attention") for kind in KINDS for d in (64, 128, 256)
    },
}  # fmt: skip


@NEEDS_TRITON
@ARCHITECTURES
@pytest.mark.parametrize("name", CALLS)
def test_compiles(monkeypatch, arch, name):
    kernels = []
    monkeypatch.setattr(triton_call, "refusal", lambda: None)
    monkeypatch.setattr(triton_call, "call", triton_helpers.compiler(arch, kernels))
    call, arguments = CALLS[name]()
    jax.eval_shape(call, *arguments)
    assert len(kernels) == 1
    made, _, _ = kernels[0]
    assert f".target sm_{arch}" in made.asm["ptx"]
    assert made.metadata.shared <= SHARED_MEMORY
    code = triton_helpers.instructions(made.asm["cubin"])
    assert not {"STL", "LDL"} & set(code), "registers are spilled"


@NEEDS_TRITON
@pytest.mark.parametrize("arch, most", ((80, 4.5), (90, 3.6)), ids=("sm_80", "sm_90"))
@pytest.mark.parametrize("name", ("gate_up", "down"))
def test_instructions_a_weight(monkeypatch, capsys, name, arch, most):
    """3.9 is what an H200 can issue a weight while they come at 4.3 TB/s."""
    kernels = []
    monkeypatch.setattr(triton_call, "refusal", lambda: None)
    monkeypatch.setattr(triton_call, "call", triton_helpers.compiler(arch, kernels))
    call, arguments = CALLS[name]()
    jax.eval_shape(call, *arguments)
    made, warps, constants = kernels[0]
    code = triton_helpers.main_loop(made.asm["cubin"])
    weights = constants["BN"] * constants["BK"] * (1 + constants["GATED"]) / (32 * warps)
    each = sum(code.values()) / weights
    with capsys.disabled():
        print(f"\n{name} sm_{arch}: {each:.2f} instructions a weight, {made.metadata.shared} bytes")
    assert 1 < each < most


@NEEDS_TRITON
@pytest.mark.slow
def test_interpreted_kernels_equal_the_references():
    folder = pathlib.Path(__file__).parent
    paths = os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(folder / "interpret_triton.py")], capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("interpreted and right") == 5


@NEEDS_TRITON
def test_unpacking_assembly_gives_the_codes():
    """Every instruction of it, carried out by numpy on random words."""
    from trace_jax.kernels import fp4_triton

    words = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    scales = np.random.default_rng(1).integers(0, 127, 4096, np.uint32)
    scales = ((scales << 4) + (234 << 7)) * np.uint32(0x10001)
    value = {"$4": words, "$5": scales}
    do = {"and": np.bitwise_and, "or": np.bitwise_or, "shl": np.left_shift, "shr": np.right_shift,
          "mov": lambda a: np.full_like(words, a), "fma": fma}  # fmt: skip
    for line in re.findall(r"(\w+)\.(?:b32|u32|rn\.bf16x2) (.*);", fp4_triton.UNPACK):
        if line[0] != "reg":
            target, *operands = line[1].split(", ")
            value[target] = do[line[0]](
                *(value[o] if o in value else np.uint32(int(o, 0)) for o in operands)
            )
    got = np.stack([value[f"${i}"] for i in range(4)], axis=-1)
    code = np.asarray(codes_of(jnp.asarray(words))).astype(np.uint32)
    bits = (code & 8) << 12 | (code & 7) << 6  # the BF16 of a code, times 2^-126
    minus = np.uint32(0x80008000)
    want = fma(bits[:, ::2] | bits[:, 1::2] << 16, scales[:, None], minus)
    np.testing.assert_array_equal(got, want)


def fma(a, b, c):
    """fma.rn.bf16x2: pairs of BF16 in words."""
    a, b, c = (
        np.stack([w & 0xFFFF, w >> 16], -1).astype(np.uint16).view(ml_dtypes.bfloat16)
        .astype(np.float64) for w in (a, b, c)
    )  # fmt: skip
    out = (a * b + c).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return out[..., 0] | out[..., 1] << 16


@pytest.mark.parametrize("name", ("quantize", "gate_up", "append_nvfp4_128", "attention_bf16_64"))
def test_calls_lower_for_cuda(monkeypatch, name):
    """By jax-triton, which needs JAX's CUDA plugin but no GPU."""
    if reason := triton_call._unusable():
        pytest.skip(f"calls are not lowered: {reason.splitlines()[0]}")
    import jax_triton.triton_lib as lib

    stub = types.SimpleNamespace(**vars(lib.triton_kernel_call_lib))
    stub.get_compute_capability = lambda device: 90
    monkeypatch.setattr(lib, "triton_kernel_call_lib", stub)
    monkeypatch.setattr(triton_call, "refusal", lambda: None)
    call, arguments = CALLS[name]()
    text = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "@triton_kernel_call" in text


# --- layouts, on any machine ---------------------------------------------------------------------


@pytest.mark.parametrize("kind, parts", (("nvfp4", 2), ("bf16", 1)))
def test_the_layout_keeps_every_weight_and_bias(kind, parts):
    n, k = 16, 80  # K is padded
    given = [normal(i, 2, n, k) for i in range(parts)]
    want = given
    if kind == "nvfp4":
        given = [jax.jit(partial(quantize, format=NVFP4, outer_axes=(1, 2)))(w) for w in given]
        want = [unscaled(q) for q in given]
    biases = [normal(i, 2, n) for i in range(parts)]
    bias = dict(zip(("bias", "up_bias"), biases, strict=False))
    laid = jax.jit(partial(em.lay_out, layout="triton"))(*given, **bias)
    assert laid.outputs == n and laid.data.shape[:3] == (2, parts, n)
    got = np.asarray(jax.jit(em.decode_layout)(laid))
    np.testing.assert_array_equal(got, np.concatenate(want, axis=1).astype(np.float32))
    np.testing.assert_array_equal(decode_bias(laid), np.concatenate(biases, axis=1))
    if kind == "nvfp4":
        np.testing.assert_array_equal(laid.outer, np.stack([q.outer.ravel() for q in given], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_hold_the_same_rows_and_append_equals_write(kind):
    k, v = normal(0, 2, 64, 2, 64), normal(1, 2, 64, 2, 64)
    ids = jnp.array([2, 1])
    pages = jax.jit(kp.write_pages)(kp.new_pages(3, 2, 64, kind, "triton"), ids, k, v)
    for got, x in zip(jax.jit(kp.read_pages)(pages, ids), (k, v), strict=True):
        want = jax.jit(lambda x: kv_units.decode(kv_units.encode(x, kind), kind))(x)
        np.testing.assert_array_equal(got, want.swapaxes(1, 2))
    k = k.at[0, 37].set(v[1, 5])
    out = jax.jit(append)(pages, ids[:, None], jnp.array([37, -1]), k[:, 37], v[:, 37]).pages
    np.testing.assert_array_equal(out.data, jax.jit(kp.write_pages)(pages, ids, k, v).data)


# --- refusals and choices ------------------------------------------------------------------------


def test_named_versions_say_why_they_cannot_run(monkeypatch):
    with pytest.raises(ValueError, match="layout 'triton', not 'hopper'"):
        em.matmul(normal(0, 4, 32), em.lay_out(normal(1, 1, 16, 32), layout="hopper"),
                  version="triton")  # fmt: skip
    for platform, reason in (("cpu", "needs an NVIDIA GPU; the platform is cpu"),
                             ("gpu", "jax-triton is not installed; pip install")):  # fmt: skip
        gpu = types.SimpleNamespace(platform=platform, compute_capability="8.6")
        monkeypatch.setattr(dispatch, "device", lambda gpu=gpu: gpu)
        monkeypatch.setattr(
            triton_call, "_unusable", lambda: 'jax-triton is not installed; pip install "..."'
        )
        with pytest.raises(ValueError, match=reason):
            quantize_rows(normal(0, 4, 32), version="triton")


@pytest.mark.parametrize("capability", ("7.5", "gfx942", ""))
def test_other_gpus_are_refused(monkeypatch, capability):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(dispatch, "device", lambda: gpu)
    assert f"this device has {capability or 'none'}" in triton_call.refusal()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_call._unusable.__wrapped__().startswith("triton is not installed; pip install")


@pytest.mark.parametrize(
    "capability, usable, layout",
    (("9.0", None, "hopper"), ("8.0", None, "triton"), ("12.0", None, "triton"),
     ("8.0", "not installed", "hopper")),
)  # fmt: skip
def test_auto_takes_hopper_then_triton_then_the_reference(monkeypatch, capability, usable, layout):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    monkeypatch.setattr(dispatch, "device", lambda: gpu)
    monkeypatch.setattr(triton_call, "_unusable", lambda: usable)
    assert cuda_build.hopper_refusal() is None or capability != "9.0"
    assert em.lay_out(normal(0, 1, 16, 64)).layout == layout
    pages = kp.new_pages(1, 1, 64)
    assert pages.layout == layout
    chosen = []
    monkeypatch.setattr(dispatch, "_log_once", lambda op, name, reasons: chosen.append((op, name)))
    table, row = jnp.zeros((1, 1), jnp.int32), normal(0, 1, 1, 64)
    with monkeypatch.context() as m:
        m.setattr("trace_jax.kernels.kv_append.VERSIONS", dict.fromkeys(
            ("hopper", "triton", "reference"), lambda *_: None))  # fmt: skip
        append(pages, table, jnp.zeros(1, jnp.int32), row, row)
    name = "triton" if layout == "triton" else "hopper" if capability == "9.0" else "reference"
    assert chosen == [("append", name)]
