"""What a bit of guidance need cost: bands around the rounding midpoints, counted by entropy.

    python -m experiments.bytes.coding

No model: Gaussian values in blocks, quantized by the project's codec on the rollout's side, and
the same values with relative noise on the trainer's. The rollout sends what lies within a band
of a midpoint, and on which side; the trainer rounds the rest by itself. A scheme costs the entropy
of what it sends, positions included, and leaves the share of codes that still differ. Block scales
are treated alike. The rows of parity checks (trace_jax.fp4.syndrome) are no estimate: rows of the
sites' widths go through the trainer's own rounding, with one bit a block scale. Rows go to
coding.jsonl, the table into README.md.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtr

from experiments import cli, results
from trace_jax.fp4 import (
    SITES,
    GuidancePlan,
    Guide,
    SiteShape,
    compact,
    formats,
    guidance_bytes_per_token,
    quantize_site,
    row_checks,
)
from trace_jax.fp4.formats import NVFP4

ROWS = 2048
WIDTH = 2048  # values a row, which has one outer scale
OUT = Path(__file__).with_name("coding.jsonl")

NOISES = (0.002, 0.01)
ABSOLUTE = (0.02, 0.05, 0.1, 0.2)  # half widths in steps
RELATIVE = (3, 4, 5)  # half widths in standard deviations of the noise at the midpoint
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # magnitudes of E2M1
MIDDLE, STEP = (GRID[1:] + GRID[:-1]) / 2, np.diff(GRID)
IN_DOUBT = {0.002: (0.02, 0.03, 0.04, 0.05), 0.01: (0.1, 0.15, 0.2, 0.25)}  # shares, by noise
POW2 = NVFP4.replace(outer="pow2")


class Shape35B:
    """Sites of Qwen3.5-35B-A3B: experts (8 a token) in 40 layers, a cache in 10 of them."""

    num_layers = 40

    def site_shapes(self):
        layers, cached = tuple(range(40)), tuple(range(3, 40, 4))
        kv = SiteShape(cached, 2, 256)
        rows = (SiteShape(layers, 1, 2048), SiteShape(layers, 8, 512), kv, kv)
        return dict(zip(SITES, rows, strict=True))


# values a token at every site of every layer, by the width of their rows
VALUES_35B = {2048: 40 * 2048, 512: 40 * 8 * 512, 256: 10 * 2 * 2 * 256}


def magnitudes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|x| / (outer x block scale) of x [rows, WIDTH], and each block's unrounded scale."""
    found = quantize_site(jnp.asarray(x, jnp.bfloat16), NVFP4)
    blocks = np.abs(np.asarray(x)).reshape(*x.shape[:-1], -1, NVFP4.block) / found.outer[..., None]
    scale = formats.decode_scale(found.scale_bytes, NVFP4)
    return np.asarray(blocks / scale[..., None]), np.asarray(blocks.max(-1) / formats.E2M1_MAX)


def entropy(*shares: float) -> float:
    """Bits of a symbol whose values have these shares."""
    known = np.array([s for s in shares if s > 0])
    return float(-(known * np.log2(known)).sum())


def banded(sent: np.ndarray, own: np.ndarray, middle, width) -> tuple[float, float]:
    """(bits a value, share that differs) when sides are sent within `width` of a midpoint.

    Args:
      sent, own: values of the rollout and the trainer.
      middle: ascending midpoints. width: half width of the band at each.
    """
    near = np.searchsorted(middle, sent)
    below, above = np.maximum(near - 1, 0), np.minimum(near, len(middle) - 1)
    at = np.where(np.abs(sent - middle[below]) <= np.abs(sent - middle[above]), below, above)
    inside = np.abs(sent - middle[at]) <= width[at]
    low = inside & (sent <= middle[at])
    wrong = ~inside & (near != np.searchsorted(middle, own))
    share = inside.mean()
    return entropy(1 - share, low.mean(), share - low.mean()), float(wrong.mean())


def bound(own: np.ndarray, middle, spread) -> float:
    """Bits a value of the rollout's side, given the trainer's value: what no code can beat.

    Args:
      spread: standard deviation of the difference at each midpoint.
    """
    total = np.zeros(own.shape)
    for m, s in zip(middle, spread, strict=True):
        p = np.clip(ndtr((own.astype(float) - m) / s), 1e-15, 1 - 1e-15)
        total += -(p * np.log2(p) + (1 - p) * np.log2(1 - p))
    return float(total.mean())


def scale_middle(largest: float) -> np.ndarray:
    """Midpoints of the E4M3 scales up to `largest`."""
    grid = formats.decode_scale(jnp.arange(1, 127, dtype=jnp.uint8), NVFP4)
    grid = np.asarray(grid)
    return ((grid[1:] + grid[:-1]) / 2)[: np.searchsorted(grid, largest) + 1]


@functools.partial(jax.jit, static_argnums=2)
def _sides(rollout, trainer, plan: GuidancePlan):
    """Share of the codes that differ, and of the rows whose checks do not hold."""
    sent = quantize_site(rollout, POW2)
    stored = compact(sent.codes, sent.scale_bytes, plan)
    found = quantize_site(trainer, POW2, Guide(stored, plan, jnp.ones(len(trainer), bool)))
    return jnp.mean(found.codes != sent.codes), jnp.mean(found.holds == 0)


def checked(noise: float, doubtful: float, rows: int) -> dict:
    """Parity checks of every site of the 35B shape, from so many values as `rows` x WIDTH."""
    plan = GuidancePlan(layers="all", sites=SITES, checks=doubtful, scale_bits=1)
    total = sum(VALUES_35B.values())
    size = guidance_bytes_per_token(Shape35B(), plan)
    row = {"scheme": f"checks for {doubtful:.0%} in doubt", "kib_35b": size / 1024}
    row["values"] = rows * WIDTH * len(VALUES_35B)
    row |= {"bits": 0.0, "scale_bits": 1 / NVFP4.block, "codes_differ": 0.0, "unsolved": 0.0}
    for width, values in VALUES_35B.items():
        draw = np.random.default_rng(width)
        x = draw.standard_normal((rows * WIDTH // width, width), np.float32)
        other = x * (1 + noise * draw.standard_normal(x.shape, np.float32))
        differ, unsolved = _sides(other, x, plan)
        share = values / total
        row["bits"] += share * row_checks(plan, width) / width
        row["codes_differ"] += share * float(differ)
        row["unsolved"] += share * float(unsolved)
    return row


def measure(noise: float, rows: int) -> list[dict]:
    """A row for each scheme at one level of noise."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((rows, WIDTH)).astype(np.float32)
    rollout, scales = magnitudes(x * (1 + noise * draw.standard_normal(x.shape)))
    _, own_scales = magnitudes(x)
    # On the rollout's scales, as a guided trainer has them.
    own = rollout / (1 + noise * draw.standard_normal(rollout.shape))
    middle = scale_middle(scales.max())
    s_bits, s_wrong = banded(scales, own_scales, middle, 5 * noise * middle)
    shared = {"noise": noise, "scale_bits": s_bits / NVFP4.block, "scales_differ": s_wrong}
    found = [("one bit a value", 1.0, 0.0)]
    found += [
        (f"within {w:g} of a step", *banded(rollout, own, MIDDLE, w * STEP)) for w in ABSOLUTE
    ]
    found += [
        (f"within {k} deviations", *banded(rollout, own, MIDDLE, k * noise * MIDDLE))
        for k in RELATIVE
    ]
    found += [("lower bound", bound(own, MIDDLE, noise * MIDDLE), 0.0)]
    out = []
    for scheme, bits, wrong in found:
        row = shared | {"scheme": scheme, "bits": bits, "codes_differ": wrong}
        if scheme == "lower bound":
            row["scale_bits"] = bound(own_scales, middle, noise * middle) / NVFP4.block
        values = sum(VALUES_35B.values())
        row["kib_35b"] = (row["bits"] + row["scale_bits"]) * values / 8 / 1024
        out.append(row)
    return out + [{"noise": noise} | checked(noise, share, rows // 4) for share in IN_DOUBT[noise]]


def table(rows: list[dict]) -> str:
    lines = [
        [
            f"{r['noise']:.1%}",
            r["scheme"],
            f"{r['bits']:.3f}",
            f"{r['scale_bits']:.3f}",
            f"{r['codes_differ']:.1e}",
            f"{r['unsolved']:.1e}" if "unsolved" in r else "n/a",
            f"{r['kib_35b']:.1f}",
        ]
        for r in rows
    ]
    names = [
        "noise",
        "what is sent",
        "bits a value",
        "and scales",
        "codes differ",
        "rows unsolved",
        "KiB a token, 35B",
    ]
    return results.markdown_table(names, lines)


def main():
    facts = results.provenance() | {"seed": 0, "values": ROWS * WIDTH}
    rows = [facts | row for noise in NOISES for row in measure(noise, ROWS)]
    results.write_rows(OUT, rows)
    results.replace_section(OUT.parent / "README.md", "coding", table(rows))
    print(table(rows))
    cli.print_json({"results": str(OUT), "rows": len(rows)})


if __name__ == "__main__":
    cli.run(main)
