"""Where codes and log-probs part, plan by plan, when the rollout engine is a foreign one.

python -m experiments.foreign_engine.plans --run=runs/quickstart-.../trace

One trained policy; one rollout a noise level, recorded whole; the trainer's forward under
each plan is compared with it. No training happens here.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags
from tqdm import tqdm

from experiments import cli, results
from trace_jax import fp4, model, modes, sync
from trace_jax.config import freeze
from trace_jax.fp4 import SITES, GuidancePlan
from trace_jax.ledger import code_ledger
from trace_jax.model.specs import Guidance
from trace_jax.rl.batches import response_window
from trace_jax.rl.logprobs import chunked_logprobs
from trace_jax.rl.mismatch import logprob_ledger
from trace_jax.rollout import Engine, EngineConfig
from trace_jax.rollout.sampling import request_keys
from trace_jax.trainer import Trainer

RUN = flags.DEFINE_string("run", None, "Run folder of a trained policy.")
NOISE = flags.DEFINE_list("noise", ["0", "0.01"], "Relative noise levels.")
OUT = flags.DEFINE_string("out", "experiments/foreign_engine/plans.jsonl", "Result file; replaced.")
PAPER = ("expert_in", "k", "v")
HALF, REST = "last:0.5", "first:0.5"


def plan(layers, sites=SITES, **settings) -> GuidancePlan:
    return GuidancePlan(layers=layers, sites=sites, **settings)


# name: (plan, whether the rollout's routes are replayed)
CASES = {
    "QAT (no guidance)": (fp4.NO_GUIDANCE, True),
    "QAT, routes not replayed": (fp4.NO_GUIDANCE, False),
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


class Study:
    """A trained policy, its prompts, and rollouts at given noise."""

    def __init__(self, folder: Path):
        self.config = freeze(json.loads((folder / "config.json").read_text()))
        self.trainer = Trainer(self.config, folder)
        step, state, _ = self.trainer.restore(self.trainer.start(self.trainer.fresh_params()))
        self.params, self.step = state["train"].params, step
        self.fp4 = modes.fp4_precision(self.config)
        self.bf16 = modes.bf16_precision(self.config)

    def rollout(self, precision, noise: float):
        """A rollout whose every code is recorded."""
        c = self.config
        engine = Engine(
            EngineConfig(
                c.model,
                precision,
                self.trainer.actor.tokenizer.eos_ids,
                c.task.max_response,
                samples=c.rl.samples,
                temperature=c.rollout.temperature,
                audit_rows=c.rows,
                noise=noise,
            )
        )
        prompts = self.trainer.actor.prompts(self.step)
        slots = jnp.arange(c.rl.prompts_per_step)
        keys = request_keys(
            c.seed,
            self.step,
            jnp.repeat(slots, c.rl.samples),
            jnp.tile(jnp.arange(c.rl.samples), len(slots)),
        )
        params = jax.jit(lambda p: sync.to_rollout(p, precision))(self.params)
        return engine(params, prompts.tokens, prompts.lengths, keys, noise_seed=1)

    def compare(self, rollout, precision, guide: GuidancePlan, replay: bool) -> dict:
        """Ledger of the trainer's forward under one plan against `rollout`."""
        c = self.config
        planned = model.planned_layers(c.model, precision, guide)
        numerics = model.numerics(
            c.model, precision, plan=guide, guide=bool(planned), audit_rows=c.rows
        )

        def measure(params, rollout):
            sites = {
                site: fp4.compact(
                    rollout.audit[site].codes[jnp.array(layers)],
                    rollout.audit[site].scale_bytes[jnp.array(layers)],
                    guide,
                )
                for site, layers in planned.items()
            }
            guidance = Guidance(sites, rollout.guidance.recorded, rollout.version)
            width = None
            if guide.guard is not None:
                width = jnp.full(rollout.tokens.shape, guide.guard, jnp.float32)
            out = model.apply(
                c.model,
                params,
                rollout.tokens,
                numerics,
                valid=rollout.valid,
                guidance=guidance if planned else None,
                guard=width,
                routes=rollout.routes.astype(jnp.int32) if replay else None,
            )
            start, length = rollout.prompt_length, c.task.max_response
            logp, _ = chunked_logprobs(
                response_window(out.hidden, start - 1, length),
                model.unembedding(params),
                response_window(rollout.tokens, start, length),
                temperature=c.rollout.temperature,
                chunk=c.rl.logprob_chunk,
            )
            inside = jnp.arange(length)[None] < (rollout.length - start)[:, None]
            mask = response_window(rollout.mask, start, length) & inside
            ledger = logprob_ledger(
                logp, response_window(rollout.logp, start, length), mask, jnp.zeros(c.rows)
            )
            return ledger, code_ledger(rollout, out.record.audit, out.record.routes)

        ledger, codes = jax.device_get(jax.jit(measure)(self.params, rollout))
        row = {k: float(ledger[k]) for k in ("gap_mean", "gap_p99", "gap_max", "kl_k3")}
        layers = range(c.model.num_layers)
        for site in SITES:
            shares = [codes.get(f"agreement/{site}/layer{i}") for i in layers]
            if shares[0] is not None:
                row[f"agreement_{site}"] = min(float(s) for s in shares)
        row["bytes_per_token"] = fp4.guidance_bytes_per_token(
            c.model, GuidancePlan(**{**vars(guide), "sites": tuple(planned)})
        )
        return row


def main():
    study, out = Study(Path(RUN.value)), Path(OUT.value)
    facts = results.provenance() | {"policy_step": study.step, "seed": study.config.seed}
    rows = []
    levels = [float(n) for n in NOISE.value]
    with tqdm(total=len(levels) * (len(CASES) + 2), desc="plans", disable=None) as bar:

        def add(noise, case, row):
            rows.append({"noise": noise, "case": case, **row, **facts})
            bar.update()

        for noise in levels:
            plain = study.rollout(study.bf16, noise)
            row = study.compare(plain, study.bf16, fp4.NO_GUIDANCE, True)
            add(noise, "BF16 on both sides", row)
            rollout = study.rollout(study.fp4, noise)
            row = study.compare(rollout, study.bf16, fp4.NO_GUIDANCE, True)
            add(noise, "naive (BF16 trainer)", row)
            for case, (guide, replay) in CASES.items():
                add(noise, case, study.compare(rollout, study.fp4, guide, replay))
    out.unlink(missing_ok=True)
    for row in rows:
        results.append_row(out, row)
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
