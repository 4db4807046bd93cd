"""The benchmark of N devices against one, on four CPU devices."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import scale_plot


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
def test_every_way_learns_the_same_and_holds_its_share(written, tmp_path):
    rows = {row["case"]: row for row in written["rows"]}
    assert list(rows) == ["one device", "data", "expert", "split"]
    assert [row["devices"] for row in rows.values()] == [1, 4, 4, 4]
    assert [row["generating"] for row in rows.values()] == [1, 4, 4, 2]
    assert all(row["loss_off_by"] < 1e-5 for row in rows.values())
    one, data, expert, split = (row["state_bytes_a_device"] for row in rows.values())
    assert one == data == split > 1.5 * expert, "experts are cut, and rows alone are not"
    assert rows["one device"]["learn_speedup"] == 1.0
    assert not any(rows["expert"]["split"].values()), "no GPU, no kernels"
    assert len({row["guidance_bytes"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["efficiency"] * row["devices"] == pytest.approx(
            row["iteration_speedup"], abs=0.01
        )


def test_one_device_begins_every_line_and_unlike_results_share_no_plot(tmp_path, monkeypatch):
    def result(devices, hardware="H200"):
        timed = dict.fromkeys(["refit_s", "generate_s", "transfer_s", "learn_s"], 1.0)
        row = lambda case, n: {"case": case, "devices": n, "tokens_per_second": 10.0 * n} | timed
        rows = [row("one device", 1), row("data", devices), row("split", devices)]
        return {"hardware": f"{devices} x {hardware}", "prompts": 8, "samples": 2, "rows": rows}

    lines = scale_plot.points([result(2), result(4)])
    assert {case: list(rows) for case, rows in lines.items()} == {
        "data": [1, 2, 4],
        "split": [1, 2, 4],
    }
    with pytest.raises(ValueError, match="plot one kind"):
        scale_plot.points([result(2), result(4, "H100")])
    paths = [tmp_path / f"scale_{n}gpu.json" for n in (2, 4)]
    for path, n in zip(paths, (2, 4), strict=True):
        path.write_text(json.dumps(result(n)))
    monkeypatch.setattr(sys, "argv", ["scale_plot", *map(str, paths)])
    scale_plot.main()
    assert (tmp_path / "scale.png").stat().st_size > 10_000
