"""Shared test set-up: 8 CPU devices, strict broadcasting, a compilation cache.

`pytest` runs everything on CPU; `pytest -m gpu` runs the GPU tests on the GPU.
"""

import gc
import os
import re
from pathlib import Path

import hypothesis
import pytest


def _wants_gpu(config) -> bool:
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr") or "") is not None


def pytest_configure(config):
    """Settings that JAX reads when it is first imported."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
    if not _wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"

    import jax

    jax.config.update("jax_numpy_rank_promotion", "raise")
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(cache_home) / "trace_jax" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

    _share_flags()
    hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
    hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def _share_flags():
    """Lets tests import several commands, which define flags of equal names, into one process."""
    from absl import flags

    define = flags.Flag.__init__

    def define_or_replace(self, *args, **kwargs):
        define(self, *args, **kwargs)
        self.allow_override = True

    flags.Flag.__init__ = define_or_replace


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Lets compiled programs go before the process reaches the kernel's limit of maps.

    Each holds a few of the 65,530 that Linux grants by default; at the limit XLA aborts.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 25_000:
        import jax

        jax.clear_caches()
        gc.collect()


def _has_gpu() -> bool:
    import jax

    return any(device.platform == "gpu" for device in jax.devices())


def pytest_collection_modifyitems(config, items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    if not _wants_gpu(config):
        reason = "GPU test; run `pytest -m gpu` on a machine with a CUDA GPU"
    elif not _has_gpu():
        reason = "no CUDA GPU is visible to JAX on this machine"
    else:
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason=reason))
