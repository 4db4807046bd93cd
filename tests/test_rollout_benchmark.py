"""What the rollout benchmark times: layers of every kind, and the bytes that a step must move."""

import json
import subprocess
import sys

import pytest

CHILD = """
import importlib, json, sys
import jax
import numpy as np
from absl import app
from benchmarks import rollout
from trace_jax.config import freeze
from trace_jax.model.accounting import weight_bytes
from trace_jax.model.pools import Stored
from trace_jax.rollout.programs import empty_pools

def main(_):
    found = {}
    for name in ("qwen3_5_35b_a3b", "gpt_oss_20b", "qwen3_30b_a3b"):
        config = freeze(importlib.import_module("configs." + name).get_config()).model
        params = jax.eval_shape(lambda: rollout.random_params(config, "bf16"))
        programs = rollout.programs_of(rollout.Case.parse("bf16:2:100:x"), config, 32)
        found[name] = {
            "linear": ["linear_attention" in layer for layer in params["layers"]],
            "paged": [s.pages is not None for s in jax.eval_shape(lambda: empty_pools(programs))],
            "bytes": sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(params)),
            "planned": weight_bytes(config, None),
        }
    case = rollout.Case.parse("bf16:2:200:x")  # two sequences of 200 tokens
    pages = {"k": np.zeros((5, 64, 3), np.uint8), "v": np.zeros((5, 64, 7), np.uint8)}
    state = {"conv": np.zeros((2, 25), np.uint8), "matrix": np.zeros((2, 5), np.float32)}
    found["moved"] = [
        rollout.stored_bytes(case, Stored(pages), 0, 5),
        rollout.stored_bytes(case, Stored(pages), 128, 5),
        rollout.stored_bytes(case, Stored(None, state), 0, 5),
    ]
    print(json.dumps(found))

app.run(main, [sys.argv[0]])
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_layer_is_drawn_and_stored_as_its_kind(found):
    linear = [i % 4 != 3 for i in range(40)]
    assert found["qwen3_5_35b_a3b"]["linear"] == linear
    assert found["qwen3_5_35b_a3b"]["paged"] == [not here for here in linear]
    for name, layers in (("gpt_oss_20b", 24), ("qwen3_30b_a3b", 48)):
        assert found[name]["linear"] == [False] * layers and all(found[name]["paged"])


def test_weights_are_as_large_as_the_models(found):
    """But for small ones: routers, biases and norms in FP32, routers in three BF16 parts."""
    for name in ("qwen3_5_35b_a3b", "gpt_oss_20b", "qwen3_30b_a3b"):
        assert found[name]["planned"] < found[name]["bytes"] < 1.005 * found[name]["planned"]


def test_a_step_moves_what_it_sees_and_states_twice(found):
    whole, window, state = found["moved"]
    assert (whole, window) == (2 * 200 * 10, 2 * 128 * 10)
    assert state == 2 * (2 * 25 + 2 * 5 * 4)
