"""A report is drawn from metrics.jsonl alone, whatever was measured."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from trace_jax.metrics import MetricWriter
from trace_jax.report import write_report

plt = pytest.importorskip("matplotlib.pyplot")
from trace_jax import report_figures as figures  # noqa: E402


def full_row(step, layers=4):
    row = {
        "step": step,
        "reward/mean": 0.3 + 0.05 * step,
        "mismatch/gap_mean": 2e-3,
        "mismatch/gap_p99": 2e-2,
        "mismatch/k3": 1e-5,
        "tokens_per_second": 8000.0 + step,
        "guidance/bytes_per_token": 1440,
        "seconds/rollout": 3.0,
        "seconds/train": 1.0,
        "seconds/total": 4.0,
    }
    for layer in range(layers):
        row[f"agreement/expert_input/layer{layer}"] = 0.98 + 0.001 * layer
        row[f"agreement/k/layer{layer}"] = 1.0
        row[f"routes/agreement/layer{layer}"] = 0.99
    return row | ({"eval/accuracy": 0.4} if step % 2 == 0 else {})


def texts(figure):
    found = [t.get_text() for ax in figure.axes for t in ax.texts]
    for ax in figure.axes:
        found += [t.get_text() for t in ax.get_legend().get_texts()] if ax.get_legend() else []
        found += [t.get_text() for t in ax.get_yticklabels()]
    return found


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_every_panel_shows_what_was_recorded():
    figure = figures.draw_report([full_row(s) for s in range(9)], "run")
    figure.draw_without_rendering()
    shown = texts(figure)
    assert "not recorded" not in shown
    for text in ("training reward", "40.0%", "KL (k3)", "98.30%", "100.00%", "expert input",
                 "routes", "guidance bytes a token", "rollout", "  27.0 s  75%"):
        assert text in shown, text


def test_a_panel_without_data_says_so():
    figure = figures.draw_report([{"step": 0, "reward/mean": None}], "run")
    assert texts(figure).count("not recorded") == len(figures.PANELS)
    figure = figures.draw_report([{"step": 0, "reward/mean": 0.5, "other": "text"}], "run")
    assert texts(figure).count("not recorded") == len(figures.PANELS) - 1


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_metrics_draw(value):
    """Zero has no logarithm, and equal limits make no axis."""
    row = {k: (value if isinstance(v, float) else v) for k, v in full_row(0).items()}
    figure = figures.draw_report([row | {"step": s} for s in range(3)], "run")
    figure.draw_without_rendering()
    assert ("KL (k3): 0 throughout" in texts(figure)) == (value == 0.0)


def test_many_layers_and_long_runs_draw():
    figure = figures.draw_report([full_row(s, layers=48) for s in range(30)], "run")
    figure.draw_without_rendering()
    ticks = [t.get_text() for t in figure.axes[3].get_xticklabels()]
    assert ticks[:3] == ["0", "3", "6"]


def test_agreement_is_the_mean_of_the_last_quarter():
    rows = [full_row(s) | {"agreement/k/layer3": float(s >= 6)} for s in range(8)]
    del rows[7]["agreement/k/layer2"]
    sites, layers, grid = figures.agreement_grid(rows)
    assert sites == ["expert input", "k", "routes"] and layers == [0, 1, 2, 3]
    assert grid[1, 3] == 1.0 and grid[1, 2] == 1.0 and np.isclose(grid[0, 2], 0.982)
    rows[6]["agreement/k/layer3"] = 0.5
    assert figures.agreement_grid(rows)[2][1, 3] == 0.75


def test_the_running_mean_starts_at_the_first_value():
    assert figures._smooth(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]


class Page(HTMLParser):
    void = {"meta", "img", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.cells = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)
        if tag == "img":
            self.images.append(dict(attrs)["src"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "pre", "h1", "p"):
            self.cells.append(data)


def test_the_page_opens_by_itself(tmp_path):
    with MetricWriter(tmp_path, tensorboard=False) as writer:
        for step in range(4):
            row = full_row(step)
            writer.write(row.pop("step"), row)
    versions = {"jax": "0.0", "command": "python -m train --x='<1>'", "hardware": "1 x cpu"}
    (tmp_path / "versions.json").write_text(json.dumps(versions))
    (tmp_path / "config.json").write_text('{"rl": {"steps": 4}}')
    summary = {"accuracy_after": 0.123456, "post_hoc": None, "name": "<b>", "gap": float("nan")}
    path = write_report(tmp_path, summary, title="A & <B>")
    text = path.read_text()
    page = Page(text)
    png = base64.b64decode(page.images[0].removeprefix("data:image/png;base64,"))
    assert png.startswith(b"\x89PNG") and png == (tmp_path / "report.png").read_bytes()
    shown = ("A & <B>", "0.1235", "not recorded", "<b>", "nan", versions["command"], "jax")
    for cell in shown:
        assert cell in page.cells, cell
    assert '"steps": 4' in "".join(page.cells)
    assert not re.search(r"(src|href)=.?(?!data:)\w+:|https?://|url\(|@import", text)
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_empty_folder_still_gives_a_page(tmp_path):
    (tmp_path / "config.json").write_text("{")
    page = Page(write_report(tmp_path, {}).read_text())
    assert page.cells.count("not recorded") == 4 and len(page.images) == 1
