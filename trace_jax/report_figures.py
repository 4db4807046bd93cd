"""The panels of a run's report, drawn from metric rows alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

Rows = Sequence[dict[str, Any]]

INK, MUTED, GRID = "#1f2430", "#7a8194", "#e6e8ee"
COLORS = ("#2f6fde", "#e07b1a", "#1a9a6c", "#c2417c", "#7a5bd0", "#8c6d4f", "#4aa3b8", "#9aa0ae")
STYLE = {
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "text.color": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "legend.fontsize": 8,
}


def series(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric, where it was recorded and finite."""
    found = [(r["step"], r[key]) for r in rows if isinstance(r.get(key), (int, float))]
    steps, values = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, float), np.array(values, float)


def keys_like(rows: Rows, pattern: str) -> dict[str, re.Match]:
    """Metric names that match, in order of first appearance."""
    names = dict.fromkeys(key for row in rows for key in row)
    return {name: m for name in names if (m := re.fullmatch(pattern, name))}


def _absent(ax: Axes) -> None:
    ax.grid(False)
    ax.set(xticks=[], yticks=[])
    ax.text(0.5, 0.5, "not recorded", ha="center", va="center", color=MUTED, transform=ax.transAxes)


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the last `width` values at each step."""
    sums = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _plot_smooth(ax: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str) -> None:
    """The values, pale, under their running mean."""
    width = max(1, len(steps) // 12)
    if width > 1:
        ax.plot(steps, values, color=color, alpha=0.2, lw=1)
    ax.plot(steps, _smooth(values, width), color=color, label=label)


def draw_reward(ax: Axes, rows: Rows) -> None:
    steps, reward = series(rows, "reward/mean")
    eval_steps, accuracy = series(rows, "eval/accuracy")
    if not len(steps) and not len(eval_steps):
        return _absent(ax)
    if len(steps):
        _plot_smooth(ax, steps, reward, COLORS[0], "training reward")
    if len(eval_steps):
        ax.plot(eval_steps, accuracy, "o-", color=COLORS[1], ms=4, label="held-out accuracy")
        ax.annotate(f"{accuracy[-1]:.1%}", (eval_steps[-1], accuracy[-1]), (4, -16),
                    textcoords="offset points", ha="right", color=COLORS[1], weight="bold")
    top = max([*reward, *accuracy])
    ax.set_ylim(min(0, *reward, *accuracy), 1.25 * top if top > 0 else 1)
    ax.legend(loc="best")


def draw_mismatch(ax: Axes, rows: Rows) -> None:
    lines = (
        ("mismatch/gap_mean", "mean |log-prob gap|"),
        ("mismatch/gap_p99", "99th percentile of the gap"),
        ("mismatch/k3", "KL (k3)"),
    )
    drawn = False
    for color, (key, label) in zip(COLORS, lines, strict=False):
        steps, values = series(rows, key)
        if len(steps):
            ax.plot(steps, np.where(values > 0, values, np.nan), color=color,
                    label=label if (values > 0).any() else f"{label}: 0 throughout")
            drawn = True
    if not drawn:
        return _absent(ax)
    if any(np.isfinite(line.get_ydata()).any() for line in ax.get_lines()):
        ax.set_yscale("log")
    ax.legend(loc="best")


def agreement_grid(rows: Rows) -> tuple[list[str], list[int], np.ndarray]:
    """Sites, layers, and mean agreement over the last quarter of rows: [sites, layers] or NaN."""
    site_keys = keys_like(rows, r"agreement/(.+)/layer(\d+)")
    route_keys = keys_like(rows, r"routes/agreement/layer(\d+)")
    cells = {(m[1].replace("_", " "), int(m[2])): key for key, m in site_keys.items()}
    cells |= {("routes", int(m[1])): key for key, m in route_keys.items()}
    sites = list(dict.fromkeys(site for site, _ in cells))
    layers = sorted({layer for _, layer in cells})
    grid = np.full((len(sites), len(layers)), np.nan)
    for (site, layer), key in cells.items():
        _, values = series(rows, key)
        if len(values):
            tail = values[-max(1, len(values) // 4):]
            grid[sites.index(site), layers.index(layer)] = tail.mean()
    return sites, layers, grid


def draw_agreement(ax: Axes, rows: Rows) -> None:
    sites, layers, grid = agreement_grid(rows)
    if not np.isfinite(grid).any():
        return _absent(ax)
    ax.grid(False)
    low = 1 - 1.1 * max(1 - np.nanmin(grid), 1e-3)
    image = ax.imshow(grid, cmap="Blues", vmin=low, vmax=1 + (1 - low) / 2, aspect="auto")
    ax.set_facecolor(GRID)  # shows through where nothing was recorded
    every = -(-len(layers) // 16)
    ax.set_xticks(range(0, len(layers), every), layers[::every])
    ax.set_yticks(range(len(sites)), sites)
    ax.tick_params(length=0)
    if grid.size <= 64:
        for (i, j), value in np.ndenumerate(grid):
            text = f"{value:.2%}" if np.isfinite(value) else "–"
            ax.text(j, i, text, ha="center", va="center", fontsize=8)
    else:
        bar = ax.figure.colorbar(image, ax=ax, pad=0.02, format=lambda v, _: f"{v:.2%}")
        bar.outline.set_visible(False)
        bar.ax.set_ylim(low, 1.0)


def draw_agreement_over_time(ax: Axes, rows: Rows) -> None:
    groups: dict[str, list[str]] = {}
    for key, m in keys_like(rows, r"agreement/(.+)/layer\d+").items():
        groups.setdefault(m[1].replace("_", " "), []).append(key)
    if routes := list(keys_like(rows, r"routes/agreement/layer\d+")):
        groups["routes"] = routes
    lowest = np.inf
    for color, (site, keys) in zip(COLORS, groups.items(), strict=False):
        found = [(r["step"], np.mean(v)) for r in rows
                 if (v := [r[k] for k in keys if isinstance(r.get(k), (int, float))])]
        if found:
            steps, values = np.array(found, float).T
            _plot_smooth(ax, steps, values, color, site)
            lowest = min(lowest, values.min())
    if lowest == np.inf:
        return _absent(ax)
    ax.set_ylim(1 - 1.35 * max(1 - lowest, 1e-3), 1 + 0.05 * max(1 - lowest, 1e-3))
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.1%}" if lowest < 0.99 else f"{v:.2%}")
    ax.legend(loc="lower right", ncols=3)


def draw_bytes(ax: Axes, rows: Rows) -> None:
    steps, values = series(rows, "guidance/bytes_per_token")
    speed_steps, speed = series(rows, "tokens_per_second")
    if not len(steps) and not len(speed_steps):
        return _absent(ax)
    if len(speed_steps):
        ax.plot(speed_steps, speed, color=COLORS[2], label="tokens a second")
        ax.set_ylim(0, 1.25 * max(speed.max(), 1e-9))
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    if len(steps):
        side = ax.twinx() if len(speed_steps) else ax
        side.grid(False)
        side.plot(steps, values, color=COLORS[4], label="guidance bytes a token")
        side.set_ylim(0, 1.25 * max(values.max(), 1e-9))
        side.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        side.tick_params(axis="y", colors=COLORS[4], length=0)
        if side is not ax:
            ax.tick_params(axis="y", colors=COLORS[2])
    handles = [line for a in ax.figure.axes if a.bbox.bounds == ax.bbox.bounds
               for line in a.get_lines()]
    ax.legend(handles, [h.get_label() for h in handles], loc="lower center", ncols=2)


def draw_time(ax: Axes, rows: Rows) -> None:
    parts = {m[1]: np.nansum(series(rows, key)[1])
             for key, m in keys_like(rows, r"seconds/(.+)").items() if m[1] != "total"}
    parts = dict(sorted(parts.items(), key=lambda item: item[1]))
    total = sum(parts.values())
    if not total:
        return _absent(ax)
    ax.grid(False, axis="y")
    colors = [COLORS[i % len(COLORS)] for i in range(len(parts))][::-1]
    ax.barh(list(parts), list(parts.values()), color=colors, height=0.65)
    for i, value in enumerate(parts.values()):
        ax.text(value, i, f"  {value:,.1f} s  {value / total:.0%}", va="center", fontsize=8)
    ax.set_xlim(0, 1.3 * max(parts.values()))
    ax.tick_params(axis="y", colors=INK, length=0)


PANELS = (
    ("Reward and held-out accuracy", "iteration", draw_reward),
    ("Trainer against rollout", "iteration", draw_mismatch),
    ("Codes that agree, mean over layers", "iteration", draw_agreement_over_time),
    ("Codes that agree, last quarter", "layer", draw_agreement),
    ("Speed and guidance", "iteration", draw_bytes),
    ("Where the time went", "seconds", draw_time),
)


def draw_report(rows: Rows, title: str) -> Figure:
    """All panels in one figure; a panel without data says so."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(3, 2, figsize=(12, 11), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=13)
        for ax, (name, xlabel, draw) in zip(axes.flat, PANELS, strict=True):
            ax.set_title(name, loc="left", size=10.5, weight="bold", color=INK)
            ax.set_xlabel(xlabel)
            draw(ax, rows)
    return figure
