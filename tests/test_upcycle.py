"""Upcycling keeps the function; what it makes is a checkpoint of a known family; training
separates the experts.
"""

import dataclasses

import golden_files
import jax
import numpy as np
import pytest

import trace_jax
from trace_jax import model
from trace_jax.config import default, freeze
from trace_jax.model import ModelConfig
from trace_jax.model.families import family_of
from trace_jax.model.upcycle import upcycle
from trace_jax.scoring import problem_set
from trace_jax.tasks import ByteTokenizer
from trace_jax.warmup import WarmStart, encode_examples


@pytest.mark.parametrize("family, wanted", [("llama", "mixtral"), ("qwen3", "qwen3_moe")])
def test_the_function_is_the_dense_one(family, wanted, tmp_path):
    config, params = golden_files.checkpoint(family)
    golden = golden_files.expected(family)
    moe, experts = upcycle(config, params, 4, 2, jax.random.key(0))
    assert family_of(moe) == wanted
    out = trace_jax.forward(moe, experts, golden["tokens"])
    same = trace_jax.forward(config, params, golden["tokens"]).logits
    # FP32 rounding alone: gates that sum to one but for an ulp, and another order of sums.
    assert np.abs(out.logits - same).max() < 1e-5 * golden["logits"].std()
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


def distance(params) -> float:
    """Mean distance of two experts' weights, relative to the weights."""
    down = np.asarray(params["layers"]["moe"]["down"], np.float32)
    apart = down[:, :, None] - down[:, None]
    pairs = ~np.eye(down.shape[1], dtype=bool)
    return float(np.sqrt(np.mean(apart[:, pairs] ** 2) / np.mean(down**2)))


def test_a_short_supervised_run_separates_the_experts():
    dense = ModelConfig(
        vocab_size=259,
        num_layers=2,
        hidden=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        expert_dim=32,
    )
    start = model.init(dense, jax.random.key(0))
    config, params = upcycle(dense, start, 4, 2, jax.random.key(1), noise=0.01)
    tree = default(**vars(config))
    tree.task.max_prompt, tree.task.max_response = 16, 4
    tree.warmup.steps, tree.warmup.batch_size, tree.rl.balance_coef = 30, 32, 0.01
    settings = freeze(tree)
    warm, problems = WarmStart(settings), problem_set(settings, "train")
    chosen = [problems.problem(i) for i in range(32)]
    examples = encode_examples(chosen, ByteTokenizer(), settings)
    step = jax.jit(warm._step, compiler_options={"xla_backend_optimization_level": 0})
    state, losses, before = warm.init(params), [], distance(params)
    for _ in range(settings.warmup.steps):
        state, metrics = step(state, *examples)
        losses.append(float(metrics["warmup/loss"]))
    assert before == pytest.approx(0.01 * 2**0.5, rel=0.1)  # two independent draws of the noise
    assert distance(state.params) > 5 * before
    assert losses[-1] < 0.7 * losses[0]
    routes = trace_jax.forward(config, state.params, examples[0][:4]).routes
    share = np.bincount(np.asarray(routes).ravel(), minlength=4) / np.asarray(routes).size
    assert share.min() > 0.05, f"an expert is hardly used: {share}"
