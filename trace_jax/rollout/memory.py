"""How a device's memory is shared: weights, pages, states, guidance, workspace."""

import dataclasses

import jax
import jax.numpy as jnp

from trace_jax import fp4
from trace_jax.kernels.prefill import scratch_bytes
from trace_jax.rollout import programs
from trace_jax.rollout.programs import ProgramConfig

GIB = 2**30
MARGIN = 0.03  # of the memory, for what the compiler and the allocator take


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by use, and the pages that fit; `str` of it is what a run states at its start.

    Attributes:
      free: bytes that the engine may take.
      weights: rollout parameters.
      states: of the slots' sequences and of those kept beside them (programs.state_bytes each).
      records: the store of records, where it is on the device.
      workspace: logits, scores of a prefill chunk, experts' weights unpacked for many rows,
        records of a dispatch, and the margin.
      page_bytes: bytes of a page in all layers.
      pages: pages that fit.
      page: tokens of a page.
    """

    free: int
    weights: int
    states: int
    records: int
    workspace: int
    page_bytes: int
    pages: int
    page: int

    def __str__(self) -> str:
        parts = (
            ("weights", self.weights),
            ("pages", self.pages * self.page_bytes),
            ("states", self.states),
            ("records", self.records),
            ("workspace", self.workspace),
        )
        shares = ", ".join(f"{name} {n / GIB:.2f} GiB" for name, n in parts)
        return (
            f"{self.free / GIB:.2f} GiB: {shares}; {self.pages} pages of {self.page} tokens, "
            f"{self.pages * self.page:,} tokens"
        )


def plan_memory(
    cfg: ProgramConfig, weight_bytes: int, free: int, *, rows: int, record_on: str = "device"
) -> MemoryPlan:
    """The most pages for `cfg`, whose own `cache.pages` is not looked at.

    Args:
      weight_bytes: of the rollout parameters as they are used.
      free: bytes that are free on the device, the weights not counted.
      rows: requests whose records are kept at a time.

    Raises:
      ValueError: not even one sequence of full length fits; says what would.
    """
    c = cfg.cache
    page_bytes = sum(a.size * a.dtype.itemsize for a in _leaves_of_one_page(cfg))
    record = _record_bytes(cfg)
    records = rows * c.length * record if record_on == "device" else 0
    state = programs.state_bytes(cfg)
    states = (c.slots + c.kept) * state
    workspace = (
        3 * 4 * c.slots * cfg.model.vocab_size
        + 3 * 4 * c.prefill_rows * cfg.model.num_heads * c.chunk * c.length
        + _unpacked_bytes(cfg)
        + 2 * c.prefill_rows * state
        + 2 * record * max(c.steps * c.slots, c.prefill_rows * c.chunk)
        + int(MARGIN * free)
    )
    left = free - weight_bytes - states - records - workspace
    pages = max(left, 0) // max(page_bytes, 1)  # no softmax attention, no bytes
    plan = MemoryPlan(free, weight_bytes, states, records, workspace, page_bytes, pages, c.page)
    if pages < c.table_pages + 1:
        spare = max(pages - 1, 0) * c.page
        raise ValueError(
            f"engine: {plan}, which is less than one sequence of {c.length}; write a length of "
            f"{spare} or less, fewer slots or rows, or FP4 for weights and KV"
        )
    return plan


def free_bytes(device=None) -> int | None:
    """Bytes that the device's allocator can still give; None where it does not say (CPU)."""
    stats = (device or jax.devices()[0]).memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _leaves_of_one_page(cfg: ProgramConfig):
    one = dataclasses.replace(cfg, cache=dataclasses.replace(cfg.cache, pages=1))
    pools = jax.eval_shape(lambda: programs.empty_pools(one))
    return jax.tree.leaves([stored.pages for stored in pools])


def _unpacked_bytes(cfg: ProgramConfig) -> int:
    """Bytes that a prefill dispatch's expert products may take (kernels.prefill)."""
    m, c = cfg.model, cfg.cache
    if not c.kernels:
        return 0
    rows = c.prefill_rows * c.chunk * m.slots
    return scratch_bytes(rows, m.num_experts, m.hidden, m.expert_dim)


def _record_bytes(cfg: ProgramConfig) -> int:
    """Bytes of record a token: guidance, routes, and whether it was recorded."""
    guidance = fp4.guidance_bytes_per_token(cfg.model, cfg.plan)
    routes = cfg.model.num_layers * cfg.model.slots * jnp.dtype(jnp.int16).itemsize
    return int(guidance) + routes + 1
