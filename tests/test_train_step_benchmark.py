"""What the benchmark of a learner's step gives its learners, and how it reads its clock."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu_profile import by_kind

CHILD = """
import json, sys
import jax
from absl import app
from benchmarks import train_step
from trace_jax import fp4

def main(_):
    found = {}
    for name, case in train_step.CASES.items():
        learner, (rollout, *_) = train_step.case_of(*case)
        sites = rollout.guidance.sites
        found[name] = {
            "bytes": sum(a.nbytes for a in jax.tree.leaves(sites)),
            "planned": 4 * 64 * fp4.guidance_bytes_per_token(
                learner.config.model, learner.mode.plan),
            "guided": learner.guided,
            "quantized": learner.mode.trainer[0].expert_weight is not None,
            "most": int(rollout.routes.max()),
        }
    times = {"qat": [2.0, 4.0, 9.0], "bf16": [1.0, 4.0, 3.0]}
    found["ratio"] = train_step.ratio(times, "qat", "bf16")
    print(json.dumps(found))

app.run(main, [sys.argv[0], "--config=configs/quickstart.py", "--layers=4", "--rows=4",
               "--length=64"])
"""


@pytest.fixture(scope="module")
def cases():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_cases_are_what_their_names_say(cases):
    guided = [name for name, case in cases.items() if name != "ratio" and case["guided"]]
    assert guided == ["guided, compact", "guided, full", "guided, checks"]
    assert not cases["bf16"]["quantized"] and cases["qat"]["quantized"]
    assert all(cases[name]["most"] == 7 for name in ("bf16", "qat", *guided)), "eight experts"


def test_guidance_has_the_bytes_of_its_plan(cases):
    assert cases["qat"]["bytes"] == 0
    for name in ("guided, compact", "guided, full", "guided, checks"):
        assert cases[name]["bytes"] == cases[name]["planned"] > 0


def test_ratios_are_medians_of_rounds(cases):
    """A clock that drifts hits both of a round."""
    assert cases["ratio"] == 2.0


def test_time_beyond_the_kernels_is_the_hosts():
    kinds = (("products", r"gemm|nvjet"), ("copies", r"copy"))
    times = {"sm90_gemm": 3.0, "nvjet_x": 1.0, "copy_gemm": 2.0, "loop_fusion": 0.5}
    assert by_kind(times, kinds, 10.0) == {
        "products": 6.0,
        "host and gaps": 3.5,
        "other kernels": 0.5,
    }
