"""Result rows of a study: from a run's folder, to a table and a picture."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from experiments import results
from experiments.studies import Run
from trace_jax.config import Config
from trace_jax.metrics import read_metrics
from trace_jax.runs import VERSIONS

CURVE_POINTS = 50
LEDGER = ("gap_mean", "gap_p99", "gap_max", "k3", "chi2", "ess_share")
TENTH = 10  # of a run's steps, by which its end and its best time are judged


def settings_key(config: Config) -> str:
    """Hash of what a configuration sets otherwise than by default, without its seed and where its
    warm start comes from: a setting that is added later leaves the rows that are there valid."""
    tree = _not_default(config)
    tree.pop("seed", None)
    tree.get("warmup", {}).pop("init_from", None)
    return hashlib.blake2b(json.dumps(tree).encode(), digest_size=6).hexdigest()


def _not_default(value) -> dict:
    """The fields of a dataclass that are not its defaults, sections likewise."""
    out = {}
    for field in dataclasses.fields(value):
        held = getattr(value, field.name)
        if dataclasses.is_dataclass(held):
            held = _not_default(held)
            if held:
                out[field.name] = held
        elif held != field.default:
            out[field.name] = held
    return out


def head_of(run: Run) -> dict:
    """What identifies a run among the rows of a result file."""
    c = run.config
    return {
        "settings": settings_key(c),
        "label": run.label,
        "method": c.method or c.mode,
        "seed": run.seed,
        "task": task_of(c),
    }


def task_of(config: Config) -> str:
    return "+".join(name for name, *_ in config.task.datasets)


def row_of(run: Run, folder: Path, summary: dict) -> dict:
    """The result row of a finished run: `summary` is the JSON line of experiments.train."""
    metrics = read_metrics(folder)
    rewards = [m["reward/mean"] for m in metrics]
    known = json.loads((folder / VERSIONS).read_text())
    kept = ("accuracy_before", "accuracy_after", "accuracy_own", "accuracy_bf16", "seconds")
    return {
        **head_of(run),
        **{k: summary[k] for k in kept},
        "guidance_bytes_per_token": summary["guidance_bytes_per_token"],
        **_ledger(metrics),
        "entropy_final": _last(metrics, "train/entropy"),
        "entropy_mean": _mean(metrics, "train/entropy"),
        "tokens_per_second": _mean(metrics, "tokens_per_second"),
        **_seconds(metrics),
        "weight_bytes": _last(metrics, "weights/bytes"),
        "collapsed": float(collapsed(rewards)),
        "reward_curve": curve(rewards),
        "entropy_curve": curve([m["train/entropy"] for m in metrics]),
        **{name: known.get(name) for name in results.FACTS},
    }


def _ledger(metrics) -> dict:
    """Figures of the mismatch: of the last step, and the mean over the run."""
    out = {}
    for name in LEDGER:
        out[f"{name}_final"] = _last(metrics, f"mismatch/{name}")
        # gap_mean is a mean over tokens already; over the run it keeps its name.
        mean = "gap_mean" if name == "gap_mean" else f"{name}_mean"
        out[mean] = _mean(metrics, f"mismatch/{name}")
    out["agreement_final"] = _last(metrics, "agreement/mean")
    out["agreement_mean"] = _mean(metrics, "agreement/mean")
    return out


def _seconds(metrics) -> dict:
    """Seconds by part of the loop: over the run, and the median step's, which compiles nothing."""
    out = {}
    for key in sorted({k for m in metrics for k in m if k.startswith("seconds/")}):
        part, spent = key.removeprefix("seconds/"), [m.get(key, 0.0) for m in metrics]
        out[f"seconds_{part}"] = round(sum(spent), 4)
        out[f"step_{part}"] = round(float(np.median(spent)), 5)
    return out


def _values(metrics, key):
    return [m[key] for m in metrics if m.get(key) is not None]


def _last(metrics, key):
    values = _values(metrics, key)
    return values[-1] if values else None


def _mean(metrics, key):
    values = _values(metrics, key)
    return float(np.mean(values)) if values else None


def collapsed(rewards: list[float]) -> bool:
    """Whether the last tenth of a run earned less than half of its best tenth."""
    if not rewards:
        return False
    width = max(len(rewards) // TENTH, 1)
    means = np.convolve(rewards, np.ones(width) / width, mode="valid")
    return bool(means[-1] < 0.5 * means.max())


def curve(values: list[float]) -> list[float]:
    """At most CURVE_POINTS means of equal stretches."""
    parts = np.array_split(np.asarray(values, float), min(len(values), CURVE_POINTS) or 1)
    return [round(float(p.mean()), 4) for p in parts if p.size]


def table(rows: list[dict], labels, columns) -> str:
    """Markdown: mean ± standard deviation over seeds, one line a label; failures are counted."""
    lines = []
    for label in labels:
        mine = [r for r in rows if r["label"] == label]
        good = [r for r in mine if "error" not in r]
        failed = len(mine) - len(good)
        cells = [results.mean_and_spread([r.get(k) for r in good], d) for _, k, d in columns]
        lines.append([label, f"{len(good)}" + (f" ({failed} failed)" if failed else ""), *cells])
    return results.markdown_table(["run", "seeds", *(name for name, *_ in columns)], lines)


def draw(rows: list[dict], labels, path: Path, title: str) -> None:
    """Reward over the run, and accuracy under FP4 seed by seed, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for i, label in enumerate(labels):
        good = [r for r in rows if r["label"] == label and "error" not in r]
        if not good:
            continue
        shortest = min(len(r["reward_curve"]) for r in good)
        curves = np.array([r["reward_curve"][:shortest] for r in good])
        share = (np.arange(shortest) + 0.5) / shortest
        color = left.plot(share, curves.mean(0), label=label)[0].get_color()
        left.fill_between(share, curves.min(0), curves.max(0), alpha=0.15, color=color)
        right.plot([r["accuracy_after"] for r in good], [i] * len(good), "o", color=color)
    left.set(xlabel="share of the run", ylabel="reward (mean and range over seeds)", title=title)
    left.legend(fontsize=7)
    right.set(xlabel="held-out accuracy under FP4, one point a seed")
    right.set_yticks(range(len(labels)), labels, fontsize=7)
    right.invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)
