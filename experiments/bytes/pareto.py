"""Every plan that was trained on one plot: mismatch and accuracy against bytes of guidance.

    python -m experiments.bytes.pareto

Reads the rows of three studies (this one, cached_depth, methods) of one model under one engine
noise; draws pareto.png and writes into README.md which plan is the best at each budget.
"""

import statistics
from pathlib import Path

from experiments import cli, results
from experiments.rows import settings_key
from experiments.studies import ROOT, runs_of

STUDIES = ("bytes", "cached_depth", "methods")
GUIDED = ("trace", "trace_codes")  # of the methods; qat is in the other two
FOLDER = ROOT / "experiments" / "bytes"


def plans() -> list[dict]:
    """{label, bytes, gaps, accuracies} of every plan, by bytes; each plan once."""
    found = {}
    for name in STUDIES:
        known = {settings_key(r.config): r.label for r in runs_of(_sweep(name))}
        for row in results.read_rows(ROOT / "experiments" / name / "results.jsonl"):
            if "error" in row or row["settings"] not in known:
                continue
            if name == "methods" and row["label"] not in GUIDED:
                continue
            plan = found.setdefault(row["settings"], {"label": row["label"], "rows": {}})
            plan["rows"][row["seed"]] = row
    out = []
    for plan in found.values():
        rows = plan["rows"].values()
        size = statistics.mean(r["guidance_bytes_per_token"] for r in rows)
        gaps = [r["gap_mean"] for r in rows]
        out.append({"label": plan["label"], "bytes": size, "gaps": gaps})
        out[-1]["accuracies"] = [r["accuracy_after"] for r in rows]
    return sorted(out, key=lambda p: (p["bytes"], statistics.mean(p["gaps"])))


def _sweep(name: str):
    module = __import__(f"experiments.{name}.sweep", fromlist=["get_config"])
    return module.get_config()


def front(found: list[dict]) -> list[dict]:
    """The plans that no other one beats in gap at as few bytes."""
    out = []
    for plan in found:
        if not out or statistics.mean(plan["gaps"]) < statistics.mean(out[-1]["gaps"]):
            out.append(plan)
    return out


def draw(found: list[dict], path: Path) -> None:
    from trace_jax.report_figures import COLORS, STYLE, plt

    best = front(found)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for panel, key in zip(axes, ("gaps", "accuracies"), strict=True):
            for plan in found:
                mean, color = statistics.mean(plan[key]), COLORS[plan in best]
                spread = statistics.stdev(plan[key]) if len(plan[key]) > 1 else 0
                panel.errorbar(plan["bytes"], mean, spread, fmt="o", ms=4, color=color)
                if plan in best and key == "gaps":
                    panel.annotate(plan["label"], (plan["bytes"], mean), fontsize=6)
            panel.set(xlabel="bytes of guidance a token")
            panel.set_xscale("symlog", linthresh=250)
        axes[0].set(ylabel="mean gap of the log-probs", yscale="log")
        axes[1].set(ylabel="held-out accuracy under FP4")
        figure.savefig(path, dpi=110, bbox_inches="tight")
        plt.close(figure)


def table(best: list[dict]) -> str:
    lines = [
        [
            f"{p['bytes']:.0f}",
            p["label"],
            results.mean_and_spread(p["gaps"], 5),
            results.mean_and_spread(p["accuracies"]),
            str(len(p["gaps"])),
        ]
        for p in best
    ]
    names = ["bytes a token", "best plan so far", "mean gap", "accuracy, FP4", "seeds"]
    return results.markdown_table(names, lines)


def main():
    found = plans()
    draw(found, FOLDER / "pareto.png")
    text = table(front(found))
    results.replace_section(FOLDER / "README.md", "front", text)
    print(text)
    cli.print_json({"plans": len(found), "on the front": len(front(found))})


if __name__ == "__main__":
    cli.run(main)
