"""Choice of versions, and the build of the CUDA sources."""

import logging
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from trace_jax.fp4 import NVFP4
from trace_jax.kernels import (
    cuda_build,
    dispatch,
    expert_layer,
    kv_append,
    kv_attention,
    kv_pages,
    quantize,
)
from trace_jax.kernels import expert_matmul as em

BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "cuda"
SOURCES = sorted([*cuda_build.SOURCES.glob("*.cu"), *BENCHMARKS.glob("*.cu")])


def test_platform_is_a_name():
    assert dispatch.platform() in ("cpu", "gpu", "tpu")
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.platform() == "cpu"


def test_auto_logs_its_choice_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    refusals = {"reference": lambda: None, "fast": lambda: "no such chip"}
    with caplog.at_level(logging.INFO, dispatch.logger.name):
        for _ in range(3):
            assert dispatch.choose("op", "auto", refusals, {"cpu": ("fast",)}) == "reference"
    assert [r.message for r in caplog.records] == ["op on cpu: reference (fast: no such chip)"]


def test_a_named_version_never_falls_back():
    refusals = {"reference": lambda: None, "fast": lambda: "no such chip"}
    with pytest.raises(ValueError, match="'fast' cannot run this call: no such chip"):
        dispatch.choose("op", "fast", refusals, {})
    with pytest.raises(ValueError, match="write auto, reference, fast"):
        dispatch.choose("op", "quick", refusals, {})


def test_hopper_is_refused_on_cpu():
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(ValueError, match="platform"):
        em.route(jnp.zeros((2, 2), jnp.int32), 2, version="hopper")


def test_no_compiler_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    with pytest.raises(RuntimeError, match="no nvcc on PATH .* install one") as error:
        cuda_build.build("route")
    assert "\n" not in str(error.value)


def test_auto_takes_no_hopper_kernel_that_cannot_be_built(monkeypatch, tmp_path):
    """Unless all are built already; a named version says what to install."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    monkeypatch.setattr(cuda_build, "_key", lambda source: "key")
    hopper = SimpleNamespace(platform="cuda", compute_capability="9.0")
    monkeypatch.setattr(dispatch, "device", lambda: hopper)
    refusals = {"reference": lambda: None, "triton": lambda: None,
                "hopper": cuda_build.hopper_refusal}  # fmt: skip
    choose = lambda version: dispatch.choose("op", version, refusals, {"gpu": ("hopper", "triton")})
    cuda_build._compiler_refusal.cache_clear()
    assert choose("auto") == "triton"
    with pytest.raises(ValueError, match="version 'hopper' cannot run this call: it needs nvcc"):
        choose("hopper")
    (tmp_path / "trace_jax").mkdir()
    for source in cuda_build.SOURCES.glob("*.cu"):
        (tmp_path / "trace_jax" / f"{source.stem}-key.so").touch()
    cuda_build._compiler_refusal.cache_clear()
    assert choose("auto") == "hopper"
    cuda_build._compiler_refusal.cache_clear()


def test_a_failing_compiler_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: "false")
    with pytest.raises(RuntimeError, match="route: nvcc failed"):
        cuda_build.build("route")
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_compiles_for_hopper(source, tmp_path):
    nvcc = cuda_build.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc on PATH or in the nvidia wheels: the CUDA sources are not compiled")
    arguments = cuda_build.command(nvcc, source, tmp_path / "out.so", jax.ffi.include_dir())
    result = subprocess.run(
        [*arguments, "-Xptxas=-warn-spills"], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr


def test_hopper_calls_lower_for_cuda(monkeypatch):
    """Without a GPU: the calls' operands and attributes are accepted, under the handlers' names."""
    monkeypatch.setattr(cuda_build, "register", lambda name, *source: f"trace_jax_{name}")
    shape = jax.ShapeDtypeStruct
    weights = jax.eval_shape(lambda: em.lay_out(jnp.zeros((4, 32, 768), jnp.bfloat16)))
    gate = jnp.zeros((4, 768, 32), jnp.bfloat16)
    gate_up = jax.eval_shape(lambda: em.lay_out(gate, gate))
    pages = jax.eval_shape(lambda: kv_pages.new_pages(8, 2, 128, layout="hopper"))
    index = partial(shape, dtype=jnp.int32)
    rows = shape((16, 768), jnp.bfloat16)
    calls = {
        "route": (lambda ids: em._route_hopper(ids, 4), index((8, 2))),
        "expert_matmul": (
            lambda x, w, r: em._hopper(x, w, r, None, None),
            rows, weights, em.Routing(index((16,)), index((5,))),
        ),
        "expert_layer": (
            lambda x, a, b, r: expert_layer._hopper(x, a, b, r, "silu", NVFP4, 1),
            shape((8, 32), jnp.bfloat16), gate_up, weights, em.Routing(index((16,)), index((5,))),
        ),
        "paged_attention": (
            lambda q, p, t, n: kv_attention._hopper(q, p, t, n, 0.1, 64, None),
            shape((3, 16, 128), jnp.bfloat16), pages, index((3, 4)), index((3,)),
        ),
        "kv_append": (
            lambda p, t, n, k: kv_append._hopper(p, t, n, k, k, 1),
            pages, index((3, 4)), index((3,)), shape((3, 2, 128), jnp.bfloat16),
        ),
        "quantize": (lambda x: quantize._hopper(x, quantize.ROW_FORMAT, True), rows),
    }  # fmt: skip
    for name, (function, *arguments) in calls.items():
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
        assert f"@trace_jax_{name}" in lowered.as_text(), name
