"""Triton kernels from JAX: whether they can run here, and the one call that runs them.

Triton and jax-triton are optional (`pip install "trace_jax[gpu]"`): the modules that hold
kernels, *_triton.py, import them and are imported by the calls that run them alone.
"""

import functools
import importlib.util

from trace_jax.kernels import cuda_build, dispatch


@functools.cache
def _unusable() -> str | None:
    """Why the packages cannot be used, or None."""
    for package, name in (("triton", "triton"), ("jax_triton", "jax-triton")):
        if importlib.util.find_spec(package) is None:
            return f'{name} is not installed; pip install "trace_jax[gpu]"'
    try:
        import jax_triton  # noqa: F401
    except Exception as error:  # a pair of versions that do not match fails in many ways
        return f"jax-triton cannot be imported ({error}); pip install the pair of trace_jax[gpu]"
    return None


def refusal() -> str | None:
    """Why the Triton kernels cannot run on the default device, or None."""
    if dispatch.platform() != "gpu":
        return f"it needs an NVIDIA GPU; the platform is {dispatch.platform()}"
    capability = str(getattr(dispatch.device(), "compute_capability", "")) or "none"
    major = capability.split(".")[0]
    if not major.isdigit() or int(major) < 8:
        return f"it needs compute capability 8.0 (Ampere) or later; this device has {capability}"
    return _unusable()


def call(kernel, grid, *args, out, warps: int = 4, stages: int = 3, aliases=None, **constants):
    """Runs `kernel(*args, *out, **constants)` over `grid`.

    Args:
      kernel: a `triton.jit` function; `args` and results are pointers to it, in that order.
      out: shapes and dtypes of the results, a sequence.
      warps, stages: warps a block, and stages of its pipelined loops.
      aliases: argument -> result that takes its memory.
      constants: the kernel's compile-time constants.
    """
    import jax_triton

    return jax_triton.triton_call(
        *args, kernel=kernel, grid=grid, out_shape=out, num_warps=warps, num_stages=stages,
        input_output_aliases=aliases, **constants,
    )  # fmt: skip


def gpu_layout() -> str:
    """What the layout "auto" is off TPU: "triton" on a GPU that runs these kernels alone."""
    if cuda_build.hopper_refusal() is not None and refusal() is None:
        return "triton"
    return "hopper"
