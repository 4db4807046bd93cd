"""Compiles this folder's CUDA sources once, at first use, and registers them with XLA."""

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.ffi
import jaxlib.version

from trace_jax.kernels import dispatch

SOURCES = pathlib.Path(__file__).parent / "cuda"
ARCHITECTURE = "90a"  # Hopper


def find_nvcc() -> str | None:
    """Path of nvcc: from PATH, or from the wheels that `jax[cuda13]` brings; None if neither."""
    found = shutil.which("nvcc")
    if found:
        return found
    for root in map(pathlib.Path, sys.path):
        for place in ("nvidia/cu13/bin/nvcc", "nvidia/cuda_nvcc/bin/nvcc"):
            if (root / place).is_file():
                return str(root / place)
    return None


def cache_dir() -> pathlib.Path:
    """Where compiled libraries are kept: $XDG_CACHE_HOME/trace_jax, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "trace_jax"


def command(nvcc: str, source: pathlib.Path, output: pathlib.Path, include: str) -> list[str]:
    """The compiler call that makes a shared library of `source`."""
    code = f"arch=compute_{ARCHITECTURE},code=sm_{ARCHITECTURE}"
    return [
        nvcc, "-O3", "-std=c++17", f"-gencode={code}", "-diag-suppress=940", "-shared",
        "-split-compile=0",
        # Two libraries with the same templates keep statics of their own.
        "-Xcompiler=-fPIC,-fno-gnu-unique",
        "-I", include, "-I", str(SOURCES), "-o", str(output), str(source),
    ]  # fmt: skip


def _key(source: pathlib.Path) -> str:
    folders = {SOURCES, source.parent}
    parts = sorted(p for f in folders for p in [*f.glob("*.cu"), *f.glob("*.cuh")])
    texts = [source.name.encode(), *(p.read_bytes() for p in parts)]
    texts += [jaxlib.version.__version__.encode(), ARCHITECTURE.encode()]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _target(source: pathlib.Path) -> pathlib.Path:
    return cache_dir() / f"{source.stem}-{_key(source)}.so"


def build(name: str, folder: pathlib.Path = SOURCES) -> pathlib.Path:
    """The shared library of `folder`/`name`.cu, compiled unless the cache has it.

    Raises:
      RuntimeError: no compiler, or it failed; one line that says which and what to do.
    """
    source = folder / f"{name}.cu"
    target = _target(source)
    if target.exists():
        return target
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError(
            f"{name}: no nvcc on PATH or in the nvidia wheels, so the CUDA kernel cannot be "
            'built; install one (for example pip install "nvidia-cuda-nvcc"), or write '
            'version="reference"'
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = pathlib.Path(folder) / "out.so"
        arguments = command(nvcc, source, output, jax.ffi.include_dir())
        result = subprocess.run(arguments, capture_output=True, text=True)
        if result.returncode:
            lines = [x for x in result.stderr.splitlines() if "error" in x] or ["no message"]
            raise RuntimeError(f"{name}: nvcc failed: {lines[0]} (command: {' '.join(arguments)})")
        os.replace(output, target)  # atomic: processes that build at once do no harm
    return target


@functools.cache
def register(name: str, source: str | None = None) -> str:
    """Builds cuda/`source`.cu (by default `name`.cu) and registers the handler `name` of it.

    Returns the FFI target's name.
    """
    target = f"trace_jax_{name}"
    library = ctypes.CDLL(str(build(source or name)))
    jax.ffi.register_ffi_target(
        target, jax.ffi.pycapsule(getattr(library, target)), platform="CUDA"
    )
    return target


def hopper_refusal() -> str | None:
    """Why the Hopper kernels cannot run on the default device, or None."""
    if dispatch.platform() != "gpu":
        return f"it needs an NVIDIA Hopper GPU; the platform is {dispatch.platform()}"
    capability = str(getattr(dispatch.device(), "compute_capability", ""))
    if capability != "9.0":
        return f"it needs compute capability 9.0 (Hopper); this device has {capability or 'none'}"
    return _compiler_refusal()


@functools.cache
def _compiler_refusal() -> str | None:
    """Why the sources cannot be built, or None: there is a compiler, or all are built already."""
    if find_nvcc() is None and not all(_target(p).exists() for p in SOURCES.glob("*.cu")):
        return 'it needs nvcc, on PATH or from pip install "nvidia-cuda-nvcc"'
    return None
