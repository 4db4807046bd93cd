"""One forward for prefill, decode and training.

Layers are stacked and scanned. Consecutive layers of one kind and equal numerics form a
segment with one scan, so what a layer is made of, precision and guidance may differ from
layer to layer without a branch inside the loop.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from trace_jax import fp4
from trace_jax.kernels.add_norm import add_norm
from trace_jax.kernels.expert_matmul import ExpertWeights
from trace_jax.model.attention import Attention
from trace_jax.model.config import LayerKind, ModelConfig
from trace_jax.model.kv_planes import empty_planes
from trace_jax.model.latent_attention import LatentAttention
from trace_jax.model.layer_loop import (
    LayerInputs,
    guidance_slots,
    layer_params,
    merge_outputs,
    scan_layers,
    stored_at,
    unroll_layers,
)
from trace_jax.model.layers import (
    Dtype,
    Mlp,
    RMSNorm,
    normal_init,
    precision_of,
    rounded,
    stored,
)
from trace_jax.model.linear_attention import LinearAttention, empty_state
from trace_jax.model.moe import NOT_RECORDED, MoE, Weighted
from trace_jax.model.paged import Pages
from trace_jax.model.sites import LayerSpec, SiteInputs, Sites
from trace_jax.model.specs import Guidance, Numerics, Record, layer_runs, segments


class Output(NamedTuple):
    """hidden BF16 [B, S, hidden] after the last norm, cache, record, mean balance loss."""

    hidden: jax.Array
    cache: tuple | None
    record: Record
    balance: jax.Array


class Unsummed(NamedTuple):
    """A residual stream x [B, S, hidden] whose last addend is yet to be added up."""

    x: jax.Array
    experts: Weighted


class DecoderLayer(nn.Module):
    """Attention and experts, each behind a norm, with residuals; `kind` replaces either.

    A decode step's layers leave the sum of their experts to the next norm.
    """

    config: ModelConfig
    kind: LayerKind = LayerKind()

    @nn.compact
    def __call__(
        self,
        x,
        positions,
        valid,
        sites: Sites,
        cache=None,
        routes=None,
        window=None,
        pages=None,
        segments=None,
    ):
        cfg = self.config
        norm = partial(RMSNorm, cfg.norm_eps, cfg.zero_centred_norms)
        if isinstance(x, Unsummed):
            x, h = _summed(x, self.get_variable("params", "attention_norm"), cfg.norm_eps)
        else:
            h = norm(name="attention_norm")(x)
        y, cache = self._attend(h, positions, valid, sites, cache, window, pages, segments)
        given = None
        if self._in_one_launch(x, sites):
            x, h, *given = self._to_experts(x, y, sites)
        else:
            x = _add(x, y)
            h = norm(name="moe_norm")(x)
        if self.kind.dense:
            y = Mlp(cfg.dense_dim, name="mlp")(h)
            ids, balance = jnp.full((*x.shape[:2], cfg.slots), NOT_RECORDED), jnp.float32(0.0)
        else:
            y, ids, balance = MoE(cfg, name="moe")(h, valid, sites, routes, given)
        x = Unsummed(x, y) if isinstance(y, Weighted) else _add(x, y)
        return x, cache, ids, balance

    def _in_one_launch(self, x, sites: Sites) -> bool:
        """Whether residual, norm and the experts' inputs are one op: in a decode step's kernels."""
        if not sites.decoding or x.shape[1] != 1 or x.dtype != jnp.bfloat16 or self.kind.dense:
            return False
        weights = self.get_variable("params", "moe")["gate_up"]
        return isinstance(weights, ExpertWeights) and not self.config.zero_centred_norms

    def _to_experts(self, x, y, sites: Sites):
        """The residual stream, its norm, and the latter quantized with its record, or None."""
        fmt = sites.spec.precision.expert_in
        if sites.spec.audit_rows or sites.inputs.noise_key is not None:
            fmt = None  # quantized where whole codes are kept and noise is added
        record = None if fmt is None else sites.record_bits("expert_in")
        weight = self.get_variable("params", "moe_norm")["weight"]
        return add_norm(x, y, weight, eps=self.config.norm_eps, fmt=fmt, record=record)

    def _attend(self, h, positions, valid, sites, cache, window, pages, segments):
        if self.kind.linear:
            layer = LinearAttention(self.config, name="linear_attention")
            if pages is None:
                return layer(h, positions, valid, cache)
            y, state = layer(h, positions, valid, cache.state, pages.resumed)
            return y, cache._replace(state=state)
        if self.config.latent.kv_rank:
            layer = LatentAttention(self.config, name="attention")
            return layer(h, positions, sites, cache, pages, segments)
        layer = Attention(self.config, name="attention")
        return layer(h, positions, sites, cache, window, pages, segments)


def _add(x, y):
    y = y if y.dtype == x.dtype else rounded(y, x.dtype)
    return rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def _summed(x: Unsummed, norm: dict, eps: float):
    """The residual stream, and its norm."""
    out = add_norm(x.x, x.experts.rows, norm["weight"], eps=eps, gates=x.experts.gates)
    return out.sum, out.normed


def init(config: ModelConfig, key: jax.Array) -> dict:
    """FP32 parameters: {"embed", "layers", "final_norm"[, "unembed"]}.

    "layers" is one stack of all layers' parameters, or, where layers are not all of one
    kind, a tuple of one stack for each run of layers that are.
    """
    embed_key, layer_key, unembed_key = jax.random.split(key, 3)
    layer_keys = jax.random.split(layer_key, config.num_layers)
    sites = Sites(LayerSpec(fp4.LayerPrecision()), fp4.NO_GUIDANCE, SiteInputs())
    x = jnp.zeros((1, 1, config.hidden), config.dtype)
    at = jnp.zeros((1, 1), jnp.int32)

    def one(kind, key):
        return DecoderLayer(config, kind).init(key, x, at, at == 0, sites)["params"]

    stacks = _by_kind(config, lambda kind, layers: jax.vmap(partial(one, kind))(layer_keys[layers]))
    table = (config.vocab_size, config.hidden)
    first = jnp.zeros if config.zero_centred_norms else jnp.ones
    params = {
        "embed": nn.initializers.normal(0.02)(embed_key, table, jnp.float32),
        "layers": stacks[0] if len(stacks) == 1 else stacks,
        "final_norm": {"weight": first(config.hidden, jnp.float32)},
    }
    if not config.tie_embeddings:
        params["unembed"] = normal_init(config.hidden)(unembed_key, table, jnp.float32)
    return params


def _by_kind(config: ModelConfig, make) -> tuple[dict, ...]:
    """A stack for each run of layers of one kind; `make(kind, layers)` makes all of a kind."""
    runs, taken = segments(config.layer_kinds), Counter()
    of_kind = {
        kind: [i for i, k in enumerate(config.layer_kinds) if k == kind] for *_, kind in runs
    }
    made = {kind: make(kind, jnp.array(layers)) for kind, layers in of_kind.items()}
    stacks = []
    for start, stop, kind in runs:
        first = taken[kind]
        taken[kind] += stop - start
        stacks.append(jax.tree.map(lambda a, i=first, j=taken[kind]: a[i:j], made[kind]))
    return tuple(stacks)


def empty_cache(config, precision, batch: int, length: int) -> tuple:
    """Cache for `batch` sequences of up to `length` tokens, one entry a run of `layer_runs`.

    Layers with softmax attention have planes of keys and values, those with linear
    attention a state that does not grow; the axes of all leaves begin [layers, batch].
    """
    shapes = config.site_shapes()

    def entry(layers, spec):
        if spec.kind.linear:
            return empty_state(config, (layers, batch))
        shape = (layers, batch, length, shapes["k"].rows)
        widths = {site: shapes[site].width for site in ("k", "v")}
        return empty_planes(shape, widths, spec.precision, config.dtype)

    return tuple(entry(stop - start, spec) for start, stop, spec in layer_runs(config, precision))


def apply(
    config: ModelConfig,
    params: dict,
    tokens: jax.Array,
    numerics: Numerics,
    *,
    positions: jax.Array | None = None,
    segments: jax.Array | None = None,
    valid: jax.Array | None = None,
    cache: tuple | None = None,
    pages: Pages | None = None,
    guidance: Guidance | None = None,
    guard: jax.Array | None = None,
    routes: jax.Array | None = None,
    noise_key: jax.Array | None = None,
    noise: float = 0.0,
    remat: tuple[str, ...] | None = None,
) -> Output:
    """Runs the model.

    Args:
      tokens: int32 [B, S].
      numerics: formats, guided and recorded sites a layer.
      positions: int32 [B, S]; default 0..S-1. With a cache they say where to write.
      segments: int32 [B, S]; a token attends to tokens of its own segment alone, so that a
        row may hold several sequences. `positions` begin at 0 in each.
      valid: bool [B, S]; padding is False and counts in no statistic.
      cache: from `empty_cache`, or None (training). Its entries must be those of
        `numerics`' precision. Linear attention goes on from its state, wherever
        `positions` are, unless they begin at 0 (see Pages.resumed); `valid` tokens must come
        first.
      pages: the cache is one pools.Stored a layer, and this says where tokens stand in its
        pages.
      guidance: needed if `numerics` guides. Obeyed where `recorded`.
      guard: FP32 [B, S], steps around the midpoint inside which bits are obeyed.
      routes: int32 [layers, B, S, top_k] to replay, NOT_RECORDED where free.
      noise_key, noise: relative noise at the sites, for emulating a foreign engine.
      remat: what the backward pass keeps inside a layer (some of remat.POINTS) and does not
        compute again; None keeps everything.
    """
    batch, length = tokens.shape
    if segments is not None:
        _check_segments(numerics, positions, cache)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    if valid is None:
        valid = jnp.ones((batch, length), bool)
    x = stored(params["embed"][tokens], config.dtype)
    if numerics.layout is not None:
        x = numerics.layout.place(x)

    def step(spec, carry, inputs: LayerInputs, layer_cache, window):
        x, balance = carry
        site_inputs = SiteInputs(
            stored=stored_at(guidance, inputs.slots),
            obey=None if guidance is None else guidance.recorded,
            guard=guard,
            noise_key=inputs.noise_key,
            noise=noise,
        )
        decoding = pages is not None
        sites = Sites(spec, numerics.plan, site_inputs, decoding, numerics.layout)
        where = (positions, valid, sites, layer_cache, inputs.routes, window, pages, segments)
        layer = DecoderLayer(config, spec.kind)
        x, layer_cache, ids, layer_balance = layer.apply({"params": inputs.params}, x, *where)
        return (x, balance + layer_balance), (layer_cache, ids, sites.outputs)

    slots = guidance_slots(numerics, guidance)
    noise_keys = None if noise_key is None else jax.random.split(noise_key, config.num_layers)

    def inputs_of(start, stop, spec) -> LayerInputs:
        return LayerInputs(
            layer_params(params["layers"], start, stop),
            None if routes is None else routes[start:stop],
            {site: jnp.asarray(slots[site][start:stop]) for site in spec.guided},
            None if noise_keys is None else noise_keys[start:stop],
        )

    carry = (x, jnp.float32(0.0))
    if pages is None:
        run = partial(scan_layers, config, numerics, remat=remat)
    else:
        run = partial(unroll_layers, config, numerics)
    (x, balance), caches, routed, records = run(step, carry, inputs_of, cache)
    record = Record(*merge_outputs(records), jnp.concatenate(routed))
    balance = balance / (config.num_layers - config.dense_layers)
    return Output(_final_norm(config, params, x), caches, record, balance)


def _check_segments(numerics: Numerics, positions, cache) -> None:
    if positions is None or cache is not None:
        raise ValueError("segments: write the positions in each segment, and no cache")
    if any(spec.kind.linear for spec in numerics.layers):
        raise ValueError(
            "segments: the state of linear attention would pass from one to the next; write one "
            "sequence a row"
        )


def _final_norm(config, params, x):
    if isinstance(x, Unsummed):
        return _summed(x, params["final_norm"], config.norm_eps)[1]
    norm = RMSNorm(config.norm_eps, config.zero_centred_norms)
    return norm.apply({"params": params["final_norm"]}, x)


def unembedding(params: dict, dtype=Dtype) -> jax.Array:
    """[vocab, hidden] in `dtype`."""
    return stored(params.get("unembed", params["embed"]), dtype)


def logits(params: dict, hidden: jax.Array) -> jax.Array:
    """FP32 [..., vocab] of hidden [..., hidden]."""
    return jnp.einsum(
        "...k,vk->...v",
        hidden,
        unembedding(params, hidden.dtype),
        preferred_element_type=jnp.float32,
        precision=precision_of(hidden.dtype),
    )
