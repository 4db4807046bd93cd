"""The benchmark of N devices against one, on four CPU devices."""

import json
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("scale") / "scale.json"
    settings = ["--layers=1", "--prompts=4", "--samples=2", "--repeats=1", f"--out={path}"]
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--config=configs/quickstart.py", *settings],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.slow
def test_every_way_learns_the_same_and_holds_its_share(written):
    rows = {row["case"]: row for row in written["rows"]}
    assert list(rows) == ["one device", "data", "expert"]
    assert [row["devices"] for row in rows.values()] == [1, 4, 4]
    assert all(row["loss_off_by"] < 1e-5 for row in rows.values())
    one, data, expert = (row["state_bytes_a_device"] for row in rows.values())
    assert one == data > 1.5 * expert, "experts are cut, and rows alone are not"
    assert rows["one device"]["learn_speedup"] == 1.0
    assert rows["expert"]["split"] == {"generate": {}, "learn": {}}, "no GPU, no kernels"
