"""Times the FP4 kernels against their BF16 twins: `python -m benchmarks.kernels` (one H200).

Two to three minutes. Writes results/kernels_h200.json: a header (hardware, versions, commit,
copy bandwidth measured in the same run) and rows {op, case, tokens, us, share_of_copy,
ratio_to_bf16, version, kernel}; rows of prefill have TFLOP/s instead of a share. Times are
medians of device times (CUDA events) of launches back to back, over rotating weights or pages
several times the size of the cache; Triton's, and prefill's layer, are wall times of a program.
Shares count the bytes that must move: stored FP4 bytes, inputs and outputs, once each.
`--all` times every compiled kernel that fits a case, not only the one that dispatch chooses.
"""

import ctypes
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
from absl import app, flags

from benchmarks.kernel_timing import (
    EXPERTS,
    FF,
    GROUP,
    HEAD,
    HIDDEN,
    KV_HEADS,
    ROUTING_SKEW,
    TOP_K,
    checked,
    copy_bandwidth,
    library,
    pointer,
    pointers,
    random_weights,
    routing,
    row,
)
from benchmarks.kernels_prefill import time_prefill
from benchmarks.kernels_triton import time_triton
from trace_jax.kernels import cuda_build, kv_pages, kv_units
from trace_jax.kernels import expert_matmul as em
from trace_jax.kernels import kv_attention as ka

FLAGS = flags.FLAGS
flags.DEFINE_bool("all", False, "time every compiled kernel that fits a case")
flags.DEFINE_list("only", [], "sources to time, such as kv_append; default all")
flags.DEFINE_string("commit", "", "commit to name in the header; default: ask git")
flags.DEFINE_string("out", "benchmarks/results/kernels_h200.json", "where to write the results")

HERE = pathlib.Path(__file__).parent
TOKENS = (1, 16, 64, 256, 512, 1024, 2048)
CONTEXTS = (
    (64, 8192),
    (16, 32768),
    (8, 8192),
    (550, 8192),
    (256, 2048),
    (1024, 2048),
    (2048, 2048),
)


# --- routed products ---------------------------------------------------------------------


def fitting(quantized: bool, tokens: int) -> list[int]:
    """Kernels to time: the one that dispatch chooses, or all of this kind."""
    if not FLAGS.all:
        return [em.hopper_variant(quantized, tokens * TOP_K / EXPERTS, HIDDEN // 64)]
    return [i for i, v in enumerate(em.HOPPER_VARIANTS) if v[0] == quantized]


def time_experts(lib, copy: float) -> list[dict]:
    rows = []
    draw = jax.jit(random_weights, static_argnums=(0, 1))
    for quantized in (False, True):
        several = range(6 if quantized else 3)
        weights = {gated: [draw(quantized, gated, i) for i in several] for gated in (True, False)}
        for tokens in TOKENS:
            for gated in (True, False):
                rows += _time_product(lib, copy, weights[gated], quantized, gated, tokens)
            rows += _time_layer(lib, copy, weights, quantized, tokens)
        del weights
    return rows


def _time_layer(lib, copy, weights, quantized, tokens) -> list[dict]:
    """Gate and up, activation, quantization (of FP4 alone), down: one call of the engine."""
    r, slots = routing(tokens), tokens * TOP_K
    x = jax.random.normal(jax.random.key(1), (tokens, HIDDEN), jnp.bfloat16)
    out, mid = jnp.zeros((slots, HIDDEN), jnp.float32), jnp.zeros((slots, FF), jnp.bfloat16)
    outer, groups = jnp.ones((EXPERTS, 2), jnp.float32), slots // 8 + EXPERTS
    scratch = [
        jnp.zeros(shape, dtype)
        for k in (HIDDEN, FF)
        for shape, dtype in (((groups, k * 16), jnp.uint8), ((groups, 8, 2), jnp.int32))
    ]
    jax.block_until_ready((weights, x, out, mid, outer, scratch, r))
    active = int((jnp.diff(r.offset) > 0).sum())
    byte_count = active * sum(w[0].nbytes for w in weights.values()) // EXPERTS
    byte_count += x.nbytes + 2 * mid.nbytes + out.nbytes
    case = f"{'nvfp4' if quantized else 'bf16'}, {active} experts hit"
    rows = []
    for i in fitting(quantized, tokens):
        us = lib.bench_expert_layer(
            i, pointers(weights[True]), pointers(weights[False]), len(weights[True]),
            pointer(outer), pointer(x), pointer(r.slot), pointer(r.offset), pointer(out),
            pointer(mid), *map(pointer, scratch), EXPERTS, HIDDEN, FF, slots, TOP_K,
            int(quantized), 9,
        )  # fmt: skip
        rows.append(row("expert_layer", case, tokens, checked(us), byte_count, copy, f"v{i}"))
    return rows


def _time_product(lib, copy, weights, quantized, gated, tokens) -> list[dict]:
    r, k, n = routing(tokens), HIDDEN if gated else FF, FF if gated else HIDDEN
    x = jax.random.normal(jax.random.key(1), (tokens if gated else tokens * TOP_K, k), jnp.bfloat16)
    out = jnp.zeros((tokens * TOP_K, n), jnp.bfloat16 if gated else jnp.float32)
    outer = jnp.ones((EXPERTS, 2), jnp.float32)
    groups = tokens * TOP_K // 8 + EXPERTS  # scratch: rows as the tensor cores read them
    packed, info = jnp.zeros((groups, k * 16), jnp.uint8), jnp.zeros((groups, 8, 2), jnp.int32)
    jax.block_until_ready((weights, x, out, outer, packed, info, r))
    active = int((jnp.diff(r.offset) > 0).sum())
    byte_count = active * weights[0].nbytes // EXPERTS + x.nbytes + out.nbytes
    op = "expert_matmul " + ("gate+up" if gated else "down")
    case = f"{'nvfp4' if quantized else 'bf16'}, {active} experts hit"
    rows = []
    for i in fitting(quantized, tokens):
        us = lib.bench_expert_matmul(
            i, pointers(weights), len(weights), pointer(outer), pointer(x), pointer(r.slot),
            pointer(r.offset), pointer(out), pointer(packed), pointer(info), EXPERTS,
            weights[0].shape[1], k, tokens * TOP_K, TOP_K, int(gated), 9,
        )  # fmt: skip
        rows.append(row(op, case, tokens, checked(us), byte_count, copy, f"v{i}"))
    return rows


# --- attention ------------------------------------------------------------------------------


def random_pages(kind: str, pages: int, seed) -> jax.Array:
    size, key = kv_units.unit_bytes(HEAD, kind), jax.random.key(seed)
    if kind == "bf16":
        values = jax.random.normal(key, (pages, KV_HEADS, 2, size // 2), jnp.bfloat16)
        return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(pages, KV_HEADS, 2, size)
    data = jax.random.bits(key, (pages, KV_HEADS, 2, size), jnp.uint8)
    if kind == "nvfp4":
        data = data.at[..., 32 * HEAD : 36 * HEAD].set(64 + (data[..., 32 * HEAD : 36 * HEAD] & 15))
    return data.at[..., -kv_units.PAGE :].set(117 + (data[..., -kv_units.PAGE :] & 3))


def time_attention(lib, copy: float) -> list[dict]:
    rows = []
    draw = jax.jit(random_pages, static_argnums=(0, 1))
    for batch, context in CONTEXTS:
        for kind in ("bf16", "fp8", "nvfp4"):
            count = batch * context // kv_units.PAGE
            size = count * KV_HEADS * 2 * kv_units.unit_bytes(HEAD, kind)
            pools = [draw(kind, count, seed) for seed in range(1 + min(5, 2**29 // size))]
            rows += _time_pages(lib, copy, pools, kind, batch, context)
            del pools
    return rows


def _time_pages(lib, copy, pools, kind, batch, context) -> list[dict]:
    max_pages = context // kv_units.PAGE
    table = jax.random.permutation(jax.random.key(2), batch * max_pages).astype(jnp.int32)
    lengths = jnp.full(batch, context, jnp.int32)
    q = jax.random.normal(jax.random.key(3), (batch, KV_HEADS * GROUP, HEAD), jnp.bfloat16)
    chosen = ka.HOPPER_VARIANTS[kind, HEAD]
    variants = chosen if FLAGS.all else chosen[:1]
    split = ka.split_pages(batch * KV_HEADS, max_pages, ka.BLOCKS * chosen[0][1])
    splits = ka.split_count(split, max_pages)
    slots = splits * batch * KV_HEADS
    out, partial = jnp.zeros_like(q), jnp.zeros((slots, 8, HEAD + 2))
    arrived = jnp.zeros((batch * KV_HEADS, ka.counters(splits)), jnp.int32)
    jax.block_until_ready((pools, table, lengths, q, out, partial, arrived))
    sums = ctypes.c_void_p(partial.unsafe_buffer_pointer() + slots * 8 * HEAD * 4)
    rows = []
    for i, warps in variants:
        us = lib.bench_paged_attention(
            i, pointers(pools), len(pools), pointer(table), pointer(lengths), pointer(q),
            pointer(out), pointer(partial), sums, pointer(arrived), batch, KV_HEADS, GROUP,
            max_pages, warps * ka.BLOCKS, split, splits, ctypes.c_float(HEAD**-0.5), 9,
        )  # fmt: skip
        case = f"{kind} pages, {batch} x {context}"
        byte_count = pools[0].nbytes + q.nbytes + out.nbytes
        rows.append(row("paged_attention", case, batch, checked(us), byte_count, copy, f"v{i}"))
    return rows


def time_append(lib, copy: float) -> list[dict]:
    """A token a sequence at the end of 2,048; bytes: rows in, units' new bytes and record out."""
    rows = []
    for batch in (64, 1024, 4096):
        for i, kind in enumerate(kv_units.KINDS):
            pools = [kv_pages.new_pages(2 * batch, KV_HEADS, HEAD, kind).data for _ in range(2)]
            table = jax.random.permutation(jax.random.key(2), 2 * batch).astype(jnp.int32)
            positions = jax.random.randint(jax.random.key(3), (batch,), 0, 128)
            k = jax.random.normal(jax.random.key(4), (batch, KV_HEADS, HEAD), jnp.bfloat16)
            bits, scales = (jnp.zeros(k.size // n, jnp.uint8) for n in (8, 16))
            jax.block_until_ready((pools, table, positions, k, bits, scales))
            recorded = kind == "nvfp4"
            us = lib.bench_kv_append(
                i, pointers(pools), len(pools), pointer(table), pointer(positions), pointer(k),
                pointer(k), pointer(bits) if recorded else None,
                pointer(scales) if recorded else None, batch, KV_HEADS, HEAD, 2 * batch, 2, 9,
            )  # fmt: skip
            unit = kv_units.unit_bytes(HEAD, kind) / kv_units.PAGE
            record = bits.nbytes + scales.nbytes if recorded else 0
            byte_count = 2 * (k.nbytes + record + batch * KV_HEADS * unit)
            rows.append(
                row(
                    "append", f"{kind} pages, one token", batch, checked(us), byte_count, copy, "v0"
                )
            )
    return rows


# --- quantizer -------------------------------------------------------------------------------


def time_quantize(lib, copy: float) -> list[dict]:
    rows = []
    for count, width in ((131072, HIDDEN), (262144, FF)):
        xs = [jax.random.normal(jax.random.key(i), (count, width), jnp.bfloat16) for i in range(2)]
        out = [jnp.zeros(count * width // n, jnp.uint8) for n in (2, 16, 8)]
        outer = jnp.zeros(count, jnp.float32)
        jax.block_until_ready((xs, out, outer))
        us = lib.bench_quantize(
            pointers(xs), len(xs), pointer(out[0]), pointer(out[1]), pointer(outer),
            pointer(out[2]), count, width, 9,
        )  # fmt: skip
        byte_count = xs[0].nbytes + sum(o.nbytes for o in out) + outer.nbytes
        case = f"nvfp4 and bits, width {width}"
        rows.append(row("quantize", case, count, checked(us), byte_count, copy, "v0"))
    return rows


# --- results ---------------------------------------------------------------------------------


def add_ratios(rows: list[dict]) -> None:
    """ratio_to_bf16: time of the fastest BF16 kernel of the same op and size over this one's."""

    def key(r):
        return r["op"], r["tokens"], r["case"].split(", ", 1)[1]

    best = {}
    for r in rows:
        if r["case"].startswith("bf16"):
            best[key(r)] = min(r["us"], best.get(key(r), r["us"]))
    for r in rows:
        if key(r) in best:
            r["ratio_to_bf16"] = round(best[key(r)] / r["us"], 3)


def header(copy: float) -> dict:
    ask = ["git", "describe", "--always", "--dirty"]
    commit = FLAGS.commit or subprocess.run(ask, capture_output=True, text=True, cwd=HERE).stdout
    return dict(
        hardware=jax.devices()[0].device_kind, jax=jax.__version__, commit=commit.strip(),
        command=" ".join(["python -m benchmarks.kernels", *sys.argv[1:]]),
        copy_tb_s=round(copy / 1e6, 3), routing_skew=ROUTING_SKEW,
    )  # fmt: skip


TIMERS = {
    "expert_matmul": time_experts,
    "prefill": time_prefill,
    "paged_attention": time_attention,
    "kv_append": time_append,
    "quantize": time_quantize,
}


def main(argv):
    del argv
    reason = cuda_build.hopper_refusal()
    if reason:
        raise app.UsageError(f"benchmarks.kernels: {reason}")
    copy, rows = copy_bandwidth(), []
    for name, timer in TIMERS.items():
        if not FLAGS.only or name in FLAGS.only:
            rows += timer(library(name), copy)
    if not FLAGS.only or "triton" in FLAGS.only:
        rows += time_triton(copy)
    add_ratios(rows)
    out = pathlib.Path(FLAGS.out)
    out.write_text(json.dumps(dict(header=header(copy), rows=rows), indent=1) + "\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    app.run(main)
