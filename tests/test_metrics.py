"""Metrics survive a resume, and the console says one line an iteration."""

import io
import json

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.metrics import MetricWriter, ProgressLine, format_line, read_metrics

ROW = {
    "reward/mean": 0.5,
    "mismatch/k3": 1.5e-4,
    "agreement/mean": 0.998,
    "tokens_per_second": 12345.6,
    "guidance/bytes_per_token": 46080,
}


def test_rows_come_back_as_written(tmp_path):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"a": 1, "b": 2.5, "c": "text", "d": None, "e": True})
        writer.write(np.int64(1), {"a": jnp.float32(3.0), "b": np.float64(4.0)})
    rows = read_metrics(tmp_path)
    assert rows[0] == {
        "step": 0, "a": 1, "b": 2.5, "c": "text", "d": None, "e": True, "nonfinite_metrics": 0
    }
    assert rows[1]["a"] == 3.0 and rows[1]["step"] == 1


def test_not_a_number_is_null_and_counted(tmp_path):
    """JSON has no NaN: strict readers fail on the whole file."""
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        row = writer.write(0, {"loss": float("nan"), "x": jnp.float32(-jnp.inf), "y": 1.0})
        assert row["loss"] is None and row["nonfinite_metrics"] == 2
        writer.write(1, {"loss": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert [r["nonfinite_metrics"] for r in read_metrics(tmp_path)] == [2, 2]
    with MetricWriter(tmp_path, first_step=2, tensorboard=False) as writer:
        assert writer.write(2, {})["nonfinite_metrics"] == 2, "a resume must not forget them"


def test_a_resume_drops_what_it_will_write_again(tmp_path):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        for step in range(6):
            writer.write(step, {"a": step})
    with MetricWriter(tmp_path, first_step=4, tensorboard=False) as writer:
        writer.write(4, {"a": -4})
    assert [(r["step"], r["a"]) for r in read_metrics(tmp_path)] == [
        (0, 0), (1, 1), (2, 2), (3, 3), (4, -4)
    ]


def test_a_half_written_last_line_is_skipped_and_a_bad_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "a": 1}\n{"step": 1, "a"')
    assert [r["step"] for r in read_metrics(tmp_path)] == [0]
    with MetricWriter(tmp_path, first_step=1, tensorboard=False) as writer:
        writer.write(1, {"a": 2})
    assert [r["step"] for r in read_metrics(tmp_path)] == [0, 1]
    path.write_text('{"step": 0}\n[1]\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)
    assert read_metrics(tmp_path / "none") == []


def test_every_row_is_on_disk_before_the_next_step(tmp_path):
    writer = MetricWriter(tmp_path, tensorboard=False)
    writer.write(0, {"a": 1})
    assert len(read_metrics(tmp_path)) == 1
    writer.close()


@pytest.mark.parametrize("value", [np.ones(2), [1], {"x": 1}, jnp.complex64(1)])
def test_only_scalars_are_metrics(tmp_path, value):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(TypeError, match="metric bad/key is a"):
            writer.write(0, {"bad/key": value})
    assert read_metrics(tmp_path) == []


def test_tensorboard_events_are_written_beside(tmp_path):
    pytest.importorskip("tensorboardX")
    with MetricWriter(tmp_path) as writer:
        writer.write(0, ROW | {"text": "skipped", "none": None})
    events = list((tmp_path / "tensorboard").glob("events*"))
    assert len(events) == 1 and b"reward/mean" in events[0].read_bytes()


def test_one_line_tells_an_iteration():
    assert format_line(7, ROW) == (
        "step    7  reward 0.500  KL 1.5e-04  codes agree 99.80%  tokens/s 12,346"
        "  guidance B/token 46,080"
    )
    assert format_line(8, {"reward/mean": None}) == "step    8  reward not finite"


def test_without_a_terminal_plain_lines_are_printed():
    stream = io.StringIO()
    with ProgressLine(total=2, stream=stream) as progress:
        progress.update(0, ROW)
        progress.update(1, ROW)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and lines[1].startswith("step    1  reward") and "\r" not in lines[0]


def test_a_terminal_shows_a_bar_with_the_time_left(capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with ProgressLine(total=10, first_step=8, stream=stream) as progress:
        progress.update(8, ROW)
        progress.update(9, ROW)
    assert "step    9  reward" in stream.getvalue()
    assert "8/10" in stream.getvalue() and "<" in stream.getvalue()
    assert capsys.readouterr().out == "", "standard output is for results"


def test_lines_are_json_objects_that_other_tools_read(tmp_path):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"ü": 1.0})
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert json.loads(line)["ü"] == 1.0
