"""Which guidance to send when a token may cost so many bytes: measured, not assumed.

    python -m experiments.planner --run=runs/quickstart-.../trace --budget=48,96,192

The run's newest policy generates; every code is recorded; the trainer's forward is compared under
each candidate: an encoding (bits, or parity checks for so many values in doubt), some sites, and
as many layers from the input up as the budget pays for, since a layer is only as exact as those
below it. The least gap wins, and of equal gaps the fewest bytes. What is shown for it is measured
again on other rollouts. Prints the flags to train with; --out is replaced by the rows, and so is
the section "adaptive" of the README beside it.
"""

from pathlib import Path

import numpy as np
from absl import flags
from tqdm import tqdm

from experiments import cli, results
from experiments.forwards import comparison, of_run, sampler
from trace_jax import modes
from trace_jax.fp4 import NO_GUIDANCE, SITES, GuidancePlan, guidance_bytes_per_token
from trace_jax.model import ModelConfig

RUN = flags.DEFINE_string("run", None, "Run folder of a trained policy.")
BUDGET = flags.DEFINE_list("budget", None, "Bytes a token, one or more.")
NOISE = flags.DEFINE_list("noise", None, "Relative engine noise; that of the run by default.")
OUT = flags.DEFINE_string("out", None, "Result file; replaced.")

CHECKS = (0.02, 0.05, 0.1, 0.2)
ENCODINGS = ({}, {"scale_bits": 1}, *({"checks": c, "scale_bits": 1} for c in CHECKS))
PLACES = (SITES, ("expert_in", "k", "v"), ("k", "v"))
AS_GOOD = 1.05  # gaps within this factor, or both float noise, count as equal
FLOAT_NOISE = 1e-6
AGREEMENTS = [f"agreement_{site}" for site in SITES]  # of a row; those of the sites in FP4
OTHERS = 3  # rollouts that a chosen plan is shown by


def candidates(model: ModelConfig, budget: float) -> list[GuidancePlan]:
    """One plan an encoding and set of sites, as deep as `budget` bytes a token pay for.

    Raises:
      ValueError: not one layer of the cheapest fits.
    """
    found, least = {}, float("inf")
    for encoding in ENCODINGS:
        for sites in PLACES:
            for count in range(model.num_layers, 0, -1):
                layers = "all" if count == model.num_layers else f"first:{count}"
                plan = GuidancePlan(layers=layers, sites=sites, **encoding)
                size = guidance_bytes_per_token(model, plan)
                least = min(least, size or least)
                if 0 < size <= budget:
                    found[plan] = size
                    break
    if not found:
        raise ValueError(
            f"a budget of {budget:g} bytes a token pays for no layer; write {least:g} or more"
        )
    return sorted(found, key=found.get)


def best(gaps: dict[GuidancePlan, float]) -> GuidancePlan:
    """The first of `gaps` (in ascending bytes) that is as good as the best."""
    enough = max(AS_GOOD * min(gaps.values()), FLOAT_NOISE)
    return next(plan for plan, gap in gaps.items() if gap <= enough)


def flags_of(plan: GuidancePlan) -> str:
    """The settings of a plan that are not the defaults, as flags of experiments.train."""
    plain = GuidancePlan()
    names = ("layers", "sites", "scale_bits", "checks")
    changed = {n: getattr(plan, n) for n in names if getattr(plan, n) != getattr(plain, n)}
    text = {n: f'"{v}"' if isinstance(v, tuple) else v for n, v in changed.items()}
    return " ".join(f"--config.guidance.{name}={value}" for name, value in text.items())


def main():
    budgets = [float(b) for b in BUDGET.value]
    subject, config, step = of_run(Path(RUN.value))
    formats = modes.fp4_precision(config)
    wanted = {budget: candidates(subject.model, budget) for budget in budgets}
    facts = results.provenance() | {"policy_step": step, "seed": config.seed}
    plans = dict.fromkeys([NO_GUIDANCE, *(p for some in wanted.values() for p in some)])
    noises = [float(n) for n in NOISE.value or [config.rollout.engine_noise]]
    seeds = range(config.seed, config.seed + 1 + OTHERS)
    drawn = {
        noise: [sample(seed, step, seed + 1) for seed in seeds]
        for noise in noises
        for sample in [sampler(subject, formats, noise)]
    }
    measured = {}  # {(noise, plan): a row of each rollout}
    for plan in tqdm(plans, desc="plans", disable=None):
        compare = comparison(subject, formats, plan)
        measured |= {(n, plan): [compare(r) for r in rolled] for n, rolled in drawn.items()}
    rows = []
    for noise in noises:
        for budget, some in {0.0: [NO_GUIDANCE], **wanted}.items():
            plan = best({p: measured[noise, p][0]["gap_mean"] for p in some})
            shown = measured[noise, plan][1:]
            row = {"noise": noise, "budget": budget, "flags": flags_of(plan) if budget else ""}
            row |= {"bytes_per_token": shown[0]["bytes_per_token"], "candidates": len(some)}
            row["gaps"] = [r["gap_mean"] for r in shown]
            row["agreement"] = min(r[k] for r in shown for k in AGREEMENTS if k in r)
            rows.append(row | facts)
    print(table(rows))
    if OUT.value:
        out = Path(OUT.value)
        results.write_rows(out, rows)
        results.replace_section(out.parent / "README.md", "adaptive", table(rows))
    cli.print_json({"plans": [{k: r[k] for k in ("noise", "budget", "flags")} for r in rows]})


def table(rows: list[dict]) -> str:
    lines = [
        [
            f"{r['noise']:.1%}",
            f"{r['budget']:g}",
            f"`{r['flags']}`" if r["flags"] else "no guidance",
            f"{r['bytes_per_token']:.0f}",
            f"{np.mean(r['gaps']):.1e} ± {np.std(r['gaps'], ddof=1):.0e}",
            f"{r['agreement']:.2%}",
        ]
        for r in rows
    ]
    names = ["noise", "budget", "what is chosen", "bytes a token", "mean gap", "codes agree, worst"]
    return results.markdown_table(names, lines)


if __name__ == "__main__":
    flags.mark_flags_as_required(["run", "budget"])
    cli.run(main)
