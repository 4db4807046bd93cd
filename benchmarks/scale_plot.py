"""Plots what `benchmarks.scale` wrote: `python -m benchmarks.scale_plot results/scale_*gpu.json`.

Two panels over the number of devices: tokens a second of an iteration, beside the line of perfect
scaling, and the seconds of an iteration's parts where rows are cut over "data". Writes
scale.png beside the first file, or to --out.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = ("refit", "generate", "transfer", "learn")


def points(results: list[dict]) -> dict[str, dict[int, dict]]:
    """{case: {devices: row}}; one device belongs to every case.

    Raises:
      ValueError: files of different hardware kinds or batches, which no line should join.
    """
    kinds = {(r["hardware"].split(" x ")[1], r["prompts"], r["samples"]) for r in results}
    if len(kinds) != 1:
        raise ValueError(f"results of several machines or batches: {sorted(kinds)}; plot one kind")
    rows = [row for result in results for row in result["rows"]]
    one = next(row for row in rows if row["case"] == "one device")
    cases = dict.fromkeys(row["case"] for row in rows if row["devices"] > 1)
    return {
        case: {1: one} | {row["devices"]: row for row in rows if row["case"] == case}
        for case in cases
    }


def draw(by_case: dict[str, dict[int, dict]], title: str):
    figure, (speed, parts) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for case, rows in by_case.items():
        counts = sorted(rows)
        speed.plot(counts, [rows[n]["tokens_per_second"] for n in counts], "o-", label=case)
    counts = sorted({n for rows in by_case.values() for n in rows})
    single = next(iter(by_case.values()))[1]["tokens_per_second"]
    speed.plot(counts, [single * n for n in counts], "k:", label="perfect")
    speed.set(xlabel="devices", ylabel="tokens a second", xticks=counts, title=title)
    speed.legend()
    rows = by_case.get("data") or next(iter(by_case.values()))
    for part in PARTS:
        parts.plot(sorted(rows), [rows[n][f"{part}_s"] for n in sorted(rows)], "o-", label=part)
    parts.set(xlabel="devices", ylabel="seconds", xticks=sorted(rows), yscale="log")
    parts.set_title('parts of an iteration, rows over "data"')
    parts.legend()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    results = [json.loads(path.read_text()) for path in given.files]
    title = results[0]["hardware"].split(" x ")[1]
    draw(points(results), title).savefig(given.out or given.files[0].parent / "scale.png", dpi=150)


if __name__ == "__main__":
    main()
