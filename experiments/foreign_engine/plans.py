"""Where codes and log-probs part, plan by plan, when the rollout engine is a foreign one.

python -m experiments.foreign_engine.plans --run=runs/quickstart-.../trace

One trained policy; one rollout a noise level, recorded whole; the trainer's forward under
each plan is compared with it. No training happens here.
"""

from collections.abc import Iterator
from pathlib import Path

from absl import flags
from tqdm import tqdm

from experiments import cli, results
from experiments.forwards import Subject, comparison, of_run, sampler
from trace_jax import modes
from trace_jax.config import Config
from trace_jax.fp4 import NO_GUIDANCE, SITES, GuidancePlan

RUN = flags.DEFINE_string("run", None, "Run folder of a trained policy.")
NOISE = flags.DEFINE_list("noise", ["0", "0.01"], "Relative noise levels.")
OUT = flags.DEFINE_string("out", "experiments/foreign_engine/plans.jsonl", "Result file; replaced.")
PAPER = ("expert_in", "k", "v")
HALF, REST = "last:0.5", "first:0.5"


def plan(layers, sites=SITES, **settings) -> GuidancePlan:
    return GuidancePlan(layers=layers, sites=sites, **settings)


# name: (plan, whether the rollout's routes are replayed)
CASES = {
    "QAT (no guidance)": (NO_GUIDANCE, True),
    "QAT, routes not replayed": (NO_GUIDANCE, False),
    "scales alone, all layers": (plan("all", bits=0), True),
    "1 bit, last half, paper's sites": (plan(HALF, PAPER), True),
    "1 bit, last half, paper's sites, routes not replayed": (plan(HALF, PAPER), False),
    "1 bit, last half, all sites": (plan(HALF), True),
    "1 bit, first half, all sites": (plan(REST), True),
    "1 bit, all layers, paper's sites": (plan("all", PAPER), True),
    "1 bit, all layers, without expert_in": (plan("all", ("expert_mid", "k", "v")), True),
    "1 bit, all layers, without K": (plan("all", ("expert_in", "expert_mid", "v")), True),
    "1 bit, all layers, without V": (plan("all", ("expert_in", "expert_mid", "k")), True),
    "1 bit, all layers, all sites": (plan("all"), True),
    "1 bit, all, 2-bit scales": (plan("all", scale_bits=2), True),
    "1 bit, all, guard 0.4": (plan("all", guard=0.4), True),
    "4 bits, last half, paper's sites": (plan(HALF, PAPER, bits=4), True),
    "4 bits, last half, all sites": (plan(HALF, bits=4), True),
    "4 bits, all layers, all sites": (plan("all", bits=4), True),
    "replay, last half, all sites": (plan(HALF, bits=4, rounding="replay"), True),
    "replay, all layers, all sites": (plan("all", bits=4, rounding="replay"), True),
}


def compared(subject: Subject, config: Config, step: int, noise: float) -> Iterator[dict]:
    """The row of every case at one noise level; nothing of a case is kept for the next."""
    fp4_side, bf16_side = modes.fp4_precision(config), modes.bf16_precision(config)
    plain = sampler(subject, bf16_side, noise)(config.seed, step)
    yield {"case": "BF16 on both sides"} | comparison(subject, bf16_side, NO_GUIDANCE)(plain)
    rollout = sampler(subject, fp4_side, noise)(config.seed, step)
    yield {"case": "naive (BF16 trainer)"} | comparison(subject, bf16_side, NO_GUIDANCE)(rollout)
    for case, (guide, replay) in CASES.items():
        yield {"case": case} | comparison(subject, fp4_side, guide, replay)(rollout)


def main():
    out = Path(OUT.value)
    subject, config, step = of_run(Path(RUN.value))
    facts = results.provenance() | {"policy_step": step, "seed": config.seed}
    rows = []
    levels = [float(n) for n in NOISE.value]
    with tqdm(total=len(levels) * (len(CASES) + 2), desc="plans", disable=None) as bar:
        for noise in levels:
            for row in compared(subject, config, step, noise):
                rows.append({"noise": noise, **row, **facts})
                bar.update()
    results.write_rows(out, rows)
    results.replace_section(out.parent / "README.md", "plans", table(rows))
    print(table(rows))
    cli.print_json({"results": str(out), "rows": len(rows)})


def table(rows: list[dict]) -> str:
    """Markdown table of the rows, one block a noise level."""

    def cell(row, key, form):
        return form.format(row[key]) if key in row else "-"

    lines = [
        [
            f"{row['noise']:g}",
            row["case"],
            cell(row, "bytes_per_token", "{:.0f}"),
            cell(row, "gap_mean", "{:.2e}"),
            cell(row, "kl_k3", "{:.1e}"),
            *(cell(row, f"agreement_{site}", "{:.4f}") for site in SITES),
        ]
        for row in rows
    ]
    return results.markdown_table(
        ["noise", "trainer", "bytes a token", "mean gap", "KL (k3)", *SITES], lines
    )


if __name__ == "__main__":
    flags.mark_flag_as_required("run")
    cli.run(main)
