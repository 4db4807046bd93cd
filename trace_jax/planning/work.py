"""Operations and bytes of a step, and the time that a chip's peaks allow: a roofline.

Products that are asked for alone are counted, not padding, nor what XLA does around them.
"""

import math
from typing import NamedTuple

from trace_jax.config import Config
from trace_jax.model.tensors import parameter_count
from trace_jax.planning.chips import Chip
from trace_jax.planning.memory import MASTER, MOMENTS, WEIGHT, over, param_bytes, piece_of


class Work(NamedTuple):
    """Of one device: operations, bytes of HBM, bytes that it sends."""

    flops: float
    hbm: float
    links: float

    def seconds(self, chip: Chip) -> dict[str, float]:
        """{bound: the least seconds under it}; a step takes the largest of them or more."""
        return {
            "products": self.flops / chip.flops,
            "HBM": self.hbm / chip.bandwidth,
            "links": self.links / chip.links,
        }


def token_flops(config: Config, keys: int) -> float:
    """Operations of one token's forward that reads `keys` keys a head."""
    m = config.model
    table = 0 if m.tie_embeddings else m.vocab_size * m.hidden
    products = parameter_count(m, active=True) - table
    return 2 * products + 4 * len(m.attention_layers) * m.num_heads * m.head_dim * keys


def update_work(config: Config, mesh, measured_links: float | None = None) -> Work:
    """An update of the learner over a rollout; `measured_links`: bytes of a compiled program."""
    m = config.model
    devices, piece = math.prod(mesh.shape.values()), piece_of(config, mesh)
    pieces = config.rl.minibatches * config.rl.micro_batches
    passes = 3 if config.rl.remat == "none" else 4  # forward, again, and twice as much backward
    tokens = config.rows * config.max_length
    flops = passes * tokens * token_flops(config, config.max_length) / devices
    gathered = param_bytes(config, mesh, WEIGHT) * over(mesh, "fsdp")
    state = param_bytes(config, mesh, 2 * (MASTER + MOMENTS) + MASTER)
    hbm = state * config.rl.minibatches + pieces * (passes - 1) * gathered
    hbm += pieces * passes * piece.tokens * m.num_layers * 8 * WEIGHT * m.hidden
    if measured_links is None:
        shards = over(mesh, "fsdp") - 1
        own = param_bytes(config, mesh, 1)
        measured_links = pieces * own * shards * ((passes - 2) * WEIGHT + MASTER)
        ways = mesh.shape["expert"]
        travels = piece.tokens * m.slots * m.hidden * m.num_layers * (ways - 1) / ways
        measured_links += pieces * travels * (passes - 1) * (WEIGHT + 4)
        measured_links += pieces * _head_links(config, mesh, piece.tokens)
    return Work(flops, hbm, measured_links)


def _head_links(config: Config, mesh, tokens: int) -> float:
    """Every chunk of the head gathers the unembedding, twice, and sums its gradient over all."""
    drawn = tokens * config.task.max_response / config.max_length
    chunks = math.ceil(drawn / config.rl.logprob_chunk)
    table = config.model.vocab_size * config.model.hidden / over(mesh, "tensor")
    shards = over(mesh, "fsdp")
    return chunks * table * (2 * WEIGHT + 2 * MASTER) * (shards - 1) / shards


def decode_work(config: Config, mesh, kv_cache: int) -> Work:
    """One token of every sequence; `kv_cache`: bytes of a device, read as far as they are full."""
    devices = math.prod(mesh.shape.values())
    rows = config.rows / over(mesh, "data", "fsdp", "expert")
    flops = config.rows * token_flops(config, config.max_length // 2) / devices
    weights = param_bytes(config, mesh, WEIGHT) * over(mesh, "fsdp")
    shards, ways = over(mesh, "fsdp"), mesh.shape["expert"]
    travels = rows * config.model.slots * config.model.hidden * config.model.num_layers
    links = weights * (shards - 1) / shards + travels * (ways - 1) / ways * (WEIGHT + 4)
    return Work(flops, weights + kv_cache / 2, links)


def prefill_work(config: Config, mesh) -> Work:
    """The prompts, each once for all its samples."""
    devices = math.prod(mesh.shape.values())
    tokens = config.rl.prompts_per_step * config.task.max_prompt
    step = decode_work(config, mesh, 0)
    share = tokens / config.rows
    flops = tokens * token_flops(config, config.task.max_prompt) / devices
    weights = param_bytes(config, mesh, WEIGHT) * over(mesh, "fsdp")
    gathered = weights * (1 - 1 / over(mesh, "fsdp"))
    return Work(flops, weights, gathered + share * (step.links - gathered))
