"""Upcycling keeps the function; what it makes is a checkpoint of a known family."""

import dataclasses

import golden_files
import jax
import numpy as np
import pytest

import trace_jax
from trace_jax.model.families import family_of
from trace_jax.model.upcycle import upcycle


@pytest.mark.parametrize("family, wanted", [("llama", "mixtral"), ("qwen3", "qwen3_moe")])
def test_the_function_is_the_dense_one(family, wanted, tmp_path):
    config, params = golden_files.checkpoint(family)
    golden = golden_files.expected(family)
    moe, experts = upcycle(config, params, 4, 2, jax.random.key(0))
    assert family_of(moe) == wanted
    out = trace_jax.forward(moe, experts, golden["tokens"])
    assert np.abs(out.logits - golden["logits"]).max() < 1e-4 * golden["logits"].std()
    assert len(np.unique(np.asarray(out.routes))) == 4
    folder = trace_jax.save_checkpoint(tmp_path / "moe", moe, experts)
    again, _ = trace_jax.load_checkpoint(folder, "float32")
    assert again == moe


def test_noise_breaks_the_symmetry():
    config, params = golden_files.checkpoint("llama")
    _, same = upcycle(config, params, 4, 2, jax.random.key(0))
    _, noisy = upcycle(config, params, 4, 2, jax.random.key(0), noise=0.01)
    spread = lambda p: float(np.std(np.asarray(p["layers"]["moe"]["down"]), axis=1).max())
    assert spread(same) == 0 and spread(noisy) > 0
    with pytest.raises(ValueError, match="4 experts already"):
        upcycle(dataclasses.replace(config, num_experts=4, top_k=2), params, 4, 2, None)
