"""Facts of published families, by numbers worked out by hand; logits are tests/test_parity.py's."""

import dataclasses

import golden_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trace_jax
from trace_jax.model.attention import visible
from trace_jax.model.experts import swiglu


def test_gpt_oss_clamps_its_swiglu():
    """BR-091: gate from above only, up on both sides; 7 sigmoid(1.702 * 7) (-7 + 1)."""
    one = lambda gate, up: float(swiglu(jnp.float32([gate, up]), 7.0)[0])
    assert one(8, -9) == pytest.approx(-41.9997, abs=1e-4)
    assert one(8, -9) == one(7, -7)
    assert one(-10, 1) == pytest.approx(-10 / (1 + np.exp(17.02)) * 2, rel=1e-5)
    plain = float(swiglu(jnp.float32([8, -9]))[0])
    assert plain == pytest.approx(-71.976, abs=1e-3)


def test_a_window_counts_the_query_itself():
    """BR-093: of window 128 the query at 200 sees keys 73 to 200, and of window 0 all before it."""
    keys = jnp.arange(256)[None]
    seen = lambda window: np.flatnonzero(visible(jnp.full((1, 1), 200), keys, window))
    assert (seen(jnp.int32(128)).min(), seen(jnp.int32(128)).max()) == (73, 200)
    np.testing.assert_array_equal(seen(jnp.int32(0)), np.arange(201))
    np.testing.assert_array_equal(seen(None), np.arange(201))


@pytest.mark.parametrize(
    "family, change",
    [
        ("olmoe", {"clip_qkv": 0.0}),
        ("gpt_oss", {"windows": (0, 0)}),
        ("gpt_oss", {"windows": (9, 0)}),
    ],
)
def test_the_golden_logits_would_show_a_missing_feature(family, change):
    """BR-093, BR-101: parity proves clamps and windows because without them it fails."""
    config, params = golden_files.checkpoint(family)
    golden = golden_files.expected(family)
    other = dataclasses.replace(config, **change)
    out = trace_jax.forward(other, params, golden["tokens"][:1])
    error = np.abs(out.logits[0] - golden["logits"][0]).max() / golden["logits"].std()
    assert error > 0.01


def test_olmoe_normalizes_whole_projections():
    """BR-101: one weight a value of the projection, not of a head, and before the split."""
    config, params = golden_files.checkpoint("olmoe")
    weight = params["layers"]["attention"]["q_norm"]["weight"]
    assert weight.shape == (config.num_layers, config.num_heads * config.head_dim)
    heads = weight.reshape(config.num_layers, config.num_heads, config.head_dim)
    assert not jnp.array_equal(heads[:, 0], heads[:, 1])
    scaled = jax.tree.map(lambda a: a, params)
    first = scaled["layers"]["attention"]["q"]["weight"]
    # Ten times head 0: a norm of each head by itself would take that out again.
    scaled["layers"]["attention"]["q"]["weight"] = first.at[:, : config.head_dim].multiply(10)
    tokens = golden_files.expected("olmoe")["tokens"][:1]
    got = [trace_jax.forward(config, p, tokens).logits for p in (params, scaled)]
    assert jnp.abs(got[0] - got[1]).max() > 0.1 * jnp.std(got[0])
