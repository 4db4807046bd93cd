"""What the kernel benchmarks share: the layer they time, its routing, and how time is taken."""

import ctypes
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.kernels import cuda_build
from trace_jax.kernels import expert_matmul as em

# A Qwen3-30B-A3B layer.
EXPERTS, HIDDEN, FF, TOP_K = 128, 2048, 768, 8
KV_HEADS, GROUP, HEAD = 4, 8, 128
ROUTING_SKEW = 0.8  # spread of the experts' logits, over Gumbel noise a token


def library(name: str) -> ctypes.CDLL:
    lib = ctypes.CDLL(
        str(cuda_build.build(f"bench_{name}", pathlib.Path(__file__).parent / "cuda"))
    )
    for call in {"expert_matmul": ("expert_matmul", "expert_layer")}.get(name, (name,)):
        getattr(lib, f"bench_{call}").restype = ctypes.c_float
    return lib


def pointer(x: jax.Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.unsafe_buffer_pointer())


def pointers(xs: list[jax.Array]):
    return (ctypes.c_void_p * len(xs))(*[x.unsafe_buffer_pointer() for x in xs])


def checked(us: float) -> float:
    if not us > 0:
        raise RuntimeError("a kernel failed to launch or to finish")
    return us


def row(op, case, tokens, us, byte_count, copy, kernel, version="hopper"):
    """One result; `copy` in bytes a microsecond."""
    share = byte_count / us / copy
    print(f"{op:24} {case:34} {kernel:10} {us:8.1f} us  {share:.3f} of copy", flush=True)
    return dict(
        op=op, case=case, tokens=tokens, us=round(us, 2), share_of_copy=round(share, 4),
        ratio_to_bf16=None, version=version, kernel=kernel,
    )  # fmt: skip


def copy_bandwidth() -> float:
    """Bytes read and written a microsecond by a device-to-device copy of 1 GiB."""
    lib = library("copy")
    a, b = jnp.ones(2**28, jnp.uint32), jnp.zeros(2**28, jnp.uint32)
    jax.block_until_ready((a, b))
    us = lib.bench_copy(pointer(b), pointer(a), ctypes.c_size_t(a.nbytes), 9)
    return 2 * a.nbytes / checked(us)


def time_calls(call, inputs: list, times: int = 1) -> float:
    """Microseconds of `call` inside one compiled program that makes it `times` for every input.

    Wall time of the program: what XLA puts around a call counts.
    """

    @jax.jit
    def program(inputs):
        seen = jnp.float32(0)  # of every round: one whose results nobody reads would not be run
        for _ in range(times):
            out = [call(x) for x in inputs]
            # The next round waits for this one and is not merged with it.
            inputs, out = jax.lax.optimization_barrier((inputs, out))
            seen += sum(a.ravel()[0].astype(jnp.float32) for a in jax.tree.leaves(out))
        return seen

    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        jax.block_until_ready(program(inputs))
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds[1:])[2] * 1e6 / (times * len(inputs))


def routing(tokens: int) -> em.Routing:
    rng = np.random.default_rng(tokens)
    logits = ROUTING_SKEW * rng.normal(size=EXPERTS) + rng.gumbel(size=(tokens, EXPERTS))
    ids = np.argsort(-logits, axis=1)[:, :TOP_K].astype(np.int32)
    return em.route(jnp.asarray(ids), EXPERTS, version="reference")


def random_weights(quantized: bool, gated: bool, seed) -> jax.Array:
    """Random codes and scales (or BF16 values) straight in the kernel's layout."""
    tiles, chunks = (FF // 8, 32) if gated else (HIDDEN // 16, 12)
    key = jax.random.key(seed)
    if not quantized:
        values = jax.random.normal(key, (EXPERTS, tiles, chunks, 1024), jnp.bfloat16)
        return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(EXPERTS, tiles, chunks, -1)
    data = jax.random.bits(key, (EXPERTS, tiles, chunks, 576), jnp.uint8)
    return data.at[..., 512:].set(64 + (data[..., 512:] & 15))
