"""The golden checkpoints that tests/golden/make_golden.py makes with transformers."""

from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from trace_jax import load_checkpoint
from trace_jax.model.families import FAMILIES

GOLDEN = Path(__file__).parent / "golden"
ALL = tuple(FAMILIES)


@cache
def checkpoint(family: str, dtype: str = "float32"):
    return load_checkpoint(GOLDEN / family, dtype)


@cache
def expected(family: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / family / "expected.safetensors")
