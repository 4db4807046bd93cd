"""Bytes that a device holds, by shapes and shardings alone.

What is stored is counted exactly. What exists only while a program runs ("activations" and
"temporary") is a model of the largest arrays of today's code; compiling says what it is.
"""

import dataclasses
import math
from functools import lru_cache
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding

from trace_jax import model, modes
from trace_jax.config import Config
from trace_jax.fp4 import LayerPrecision, guidance_bytes_per_token
from trace_jax.fp4.formats import num_blocks
from trace_jax.kernels.grouped_matmul import tile_rows
from trace_jax.model import ModelConfig
from trace_jax.model.accounting import kv_bytes_per_token, state_bytes
from trace_jax.model.expert_parallel import HEADROOM
from trace_jax.model.remat import points_of
from trace_jax.model.specs import stacks_of
from trace_jax.model.tensors import param_shapes
from trace_jax.parallel import LEARNER
from trace_jax.parallel.mesh import AXES, axis_sizes
from trace_jax.parallel.rules import param_spec

param_shapes = lru_cache(param_shapes)  # a search asks for the same model's again and again

MASTER, MOMENTS, WEIGHT = 4, 8, 2  # bytes a parameter: FP32, Adam's two of them, BF16 in use
Bytes = dict[str, int]


def abstract_mesh(config: Config, count: int) -> AbstractMesh:
    """The configured mesh over `count` devices that are not here."""
    return AbstractMesh(axis_sizes(config.mesh, count), AXES)


def over(mesh, *axes: str) -> int:
    """Parts that the axes cut something into."""
    return math.prod(mesh.shape[axis] for axis in axes)


class Piece(NamedTuple):
    """What one device has of a micro-batch: sequences, and its part of their tokens."""

    rows: int
    tokens: int


def piece_of(config: Config, mesh) -> Piece:
    parts = over(mesh, *LEARNER["rows"]) * config.rl.minibatches * config.rl.micro_batches
    rows = -(-config.rows // parts)
    return Piece(rows, -(-rows * config.max_length // over(mesh, *LEARNER["length"])))


def param_bytes(config: Config, mesh, item: int) -> int:
    """Bytes a device of all parameters, `item` bytes each, laid out as the learner's."""
    return item * _parameters(config.model, mesh)


@lru_cache
def _parameters(shape: ModelConfig, mesh) -> int:
    total = 0

    def add(path, a):
        nonlocal total
        sharding = NamedSharding(mesh, param_spec(path, a.shape, mesh))
        total += math.prod(sharding.shard_shape(a.shape))

    jax.tree_util.tree_map_with_path(add, param_shapes(shape))
    return total


def rollout_bytes(config: Config, mesh, precision: tuple[LayerPrecision, ...]) -> int:
    """Bytes a device of the rollout's weights, laid out as the learner's."""
    total = param_bytes(config, mesh, WEIGHT)
    ways, first = over(mesh, "expert", "fsdp"), 0
    for stack in stacks_of(param_shapes(config.model)["layers"]):
        layers = jax.tree.leaves(stack)[0].shape[0]
        for weight in (stack["moe"][name] for name in ("gate_up", "down") if "moe" in stack):
            rows, columns = weight.size // layers // weight.shape[-1], weight.shape[-1]
            for fmt in (p.expert_weight for p in precision[first : first + layers]):
                if fmt is not None:
                    row = num_blocks(columns, fmt) * (fmt.block // 2 + 1)
                    total += rows // ways * (row - WEIGHT * columns)
        first += layers
    return total


def record_bytes(config: Config, mesh) -> tuple[int, int]:
    """Bytes a device of guidance, and of the rest of a rollout that the learner reads."""
    tokens = config.rows * config.max_length // over(mesh, *LEARNER["rows"])
    mode = modes.resolve(config)
    guidance = guidance_bytes_per_token(config.model, mode.plan) if guided(config) else 0.0
    routes = 2 * config.model.num_layers * config.model.slots
    return round(tokens * guidance), tokens * (routes + 4 + 4 + 1 + 1)


def guided(config: Config) -> bool:
    mode = modes.resolve(config)
    return bool(model.planned_layers(config.model, mode.trainer, mode.plan))


class Experts(NamedTuple):
    """One layer's product on one device: experts held, padded rows, and tiles of them."""

    held: int
    rows: int
    tiles: int


def experts_of(config: Config, mesh, tokens: int) -> Experts:
    """Of `tokens` of a device, with the places that an exchange leaves free."""
    slots, ways = tokens * config.model.slots, mesh.shape["expert"]
    experts = max(config.model.num_experts, 1) // ways
    if ways > 1:
        slots, experts = ways * min(-(-HEADROOM * slots // ways), slots), experts + 1
    tile = tile_rows(slots, experts)
    tiles = (slots + experts * (tile - 1)) // tile
    return Experts(experts, tiles * tile, tiles)


def kept_bytes(config: Config, mesh) -> int:
    """What the forward keeps of all layers for the backward pass."""
    m, piece = config.model, piece_of(config, mesh)
    experts = experts_of(config, mesh, piece.tokens)
    points = {
        "attention_out": WEIGHT * piece.tokens * m.num_heads * m.head_dim,
        "router": 4 * piece.tokens * max(m.num_experts, 1),
        "expert_weight": WEIGHT * 3 * experts.held * m.hidden * m.expert_dim,
        "gate_up": 4 * experts.rows * 2 * m.expert_dim,
        "expert_mid": WEIGHT * experts.rows * m.expert_dim,
    }
    names = points_of(config.rl.remat)
    layer = WEIGHT * piece.tokens * m.hidden
    if names is None:
        layer += sum(points.values()) + 2 * _scores(config, mesh, piece)
        layer += 4 * experts.rows * (m.hidden + m.expert_dim)
    else:
        layer += sum(points[name] for name in names)
    return m.num_layers * layer + _solved_bytes(config, piece.tokens)


def _solved_bytes(config: Config, tokens: int) -> int:
    """Of bits that parity checks are solved for, in all layers."""
    plan = modes.resolve(config).plan
    if not guided(config) or not plan.checks:
        return 0
    bits, none = (
        guidance_bytes_per_token(config.model, dataclasses.replace(plan, checks=0.0, bits=n))
        for n in (1, 0)
    )
    return round(tokens * (bits - none))


def _scores(config: Config, mesh, piece: Piece) -> int:
    """FP32 attention weights of one layer."""
    return 4 * piece.tokens * config.max_length * config.model.num_heads // over(mesh, "tensor")


def temporary_bytes(config: Config, mesh, tpu: bool) -> int:
    """Of the backward pass of the layer or of the unembedding, whichever takes more.

    Its terms are those of programs compiled for v6e, with and without copies by tile.
    """
    m, piece = config.model, piece_of(config, mesh)
    experts = experts_of(config, mesh, piece.tokens)
    matrix = 2 * m.expert_dim * m.hidden
    # A weight is gathered in BF16, held and its gradient summed in FP32.
    weights = experts.held * 3 * matrix // 2 * (WEIGHT + 4 + 4)
    if tpu:
        # Of gate and up, of what is between the products, and of both ends: values and gradients.
        copies = _exchanged(mesh, piece.tokens * m.slots) * m.hidden
        values = experts.rows * (28 * m.expert_dim + 18 * m.hidden)
    else:
        # Each tile of rows has a copy of its weight in BF16, and a gradient of it in FP32 that XLA
        # lays out anew.
        copies = experts.tiles * matrix * (WEIGHT + 4 + 4)
        values = experts.rows * (4 * 2 * 2 * m.expert_dim + (WEIGHT + 4 + 4) * m.hidden)
    layer = weights + copies + values + 2 * _scores(config, mesh, piece)
    tokens = min(config.rl.logprob_chunk, piece.tokens)
    table = m.vocab_size // over(mesh, "tensor")
    head = table * (3 * 4 * tokens + m.hidden * (WEIGHT + 4 + 4))
    return max(layer, head)


def _exchanged(mesh, slots: int) -> int:
    """Bytes a value of hidden width of what travels to experts and back, both ways."""
    return slots * (2 * 4 + HEADROOM * (2 * 4 + 2 * WEIGHT)) if mesh.shape["expert"] > 1 else 0


def learner_bytes(config: Config, mesh, tpu: bool = True) -> Bytes:
    """An update: of the optimizer's state one is donated, and a micro-batch's gradient is added
    to the sum of those before."""
    guidance, record = record_bytes(config, mesh)
    rollout = rollout_bytes(config, mesh, modes.resolve(config).rollout)
    return {
        "parameters": param_bytes(config, mesh, MASTER),
        "optimizer": param_bytes(config, mesh, MOMENTS),
        "gradients": 2 * param_bytes(config, mesh, MASTER),
        "rollout weights": rollout,
        "guidance": guidance,
        "record": record,
        "activations": kept_bytes(config, mesh),
        "temporary": temporary_bytes(config, mesh, tpu),
    }


def generation_bytes(config: Config, mesh, tpu: bool = True) -> Bytes:
    """A rollout of the batch engine beside the learner's state; its weights are decoded once."""
    precision = modes.resolve(config).rollout
    guidance, record = record_bytes(config, mesh)
    rows = config.rows // over(mesh, *LEARNER["rows"])
    # Layers differ in their formats; what all of them would keep is shared out among them.
    kept = [kv_bytes_per_token(config.model, p.k, p.kv_window) for p in precision]
    a_token = sum(kept) // len(kept)
    weights = config.model.hidden * config.model.expert_dim * 3 * WEIGHT
    held = max(config.model.num_experts, 1) // mesh.shape["expert"]
    prompts = -(-rows // config.rl.samples) * config.task.max_prompt
    copies = 0 if tpu else experts_of(config, mesh, prompts).tiles * weights * 2 // 3
    return {
        "parameters": param_bytes(config, mesh, MASTER),
        "optimizer": param_bytes(config, mesh, MOMENTS),
        "rollout weights": rollout_bytes(config, mesh, precision),
        "decoded weights": param_bytes(config, mesh, WEIGHT),
        "KV cache": rows * (config.max_length * a_token + state_bytes(config.model)),
        "guidance": guidance,
        "record": record,
        "temporary": held * weights
        + copies
        + 3 * 4 * rows * config.model.vocab_size // over(mesh, "tensor"),
    }
