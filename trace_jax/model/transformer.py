"""One forward for prefill, decode and training.

Layers are stacked and scanned. Consecutive layers of one kind and equal numerics form a
segment with one scan, so what a layer is made of, precision and guidance may differ from
layer to layer without a branch inside the loop.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from trace_jax import fp4
from trace_jax.fp4 import GuidancePlan, LayerPrecision, SiteGuidance
from trace_jax.model.attention import Attention
from trace_jax.model.config import LayerKind, ModelConfig
from trace_jax.model.kv_planes import empty_planes
from trace_jax.model.latent_attention import LatentAttention
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
from trace_jax.model.moe import NOT_RECORDED, MoE
from trace_jax.model.paged import Pages
from trace_jax.model.sites import Codes, LayerSpec, SiteInputs, SiteOutputs, Sites

T = TypeVar("T")


@struct.dataclass
class Guidance:
    """Rollout outcomes as the trainer consumes them.

    Attributes:
      sites: {site: SiteGuidance} with leading axes [planned layers, B, S, rows].
      recorded: bool [B, S]; False where the rollout left nothing for a token.
      version: int32 [B], the policy version that left it.
    """

    sites: dict[str, SiteGuidance]
    recorded: jax.Array
    version: jax.Array


@struct.dataclass
class Record:
    """What a forward leaves.

    Attributes:
      sites: {site: SiteGuidance} with leading axes [planned layers, B, S, rows].
      audit: {site: Codes} with leading axes [layers that quantize it, audit rows, S, rows];
        sites that are BF16 in every layer are absent.
      routes: int32 [layers, B, S, slots]; NOT_RECORDED in dense layers beside experts.
    """

    sites: dict[str, SiteGuidance]
    audit: dict[str, Codes]
    routes: jax.Array


class Output(NamedTuple):
    """hidden BF16 [B, S, hidden] after the last norm, cache, record, mean balance loss."""

    hidden: jax.Array
    cache: tuple | None
    record: Record
    balance: jax.Array


class Numerics(NamedTuple):
    """Static numerics of a forward: one LayerSpec a layer, and the plan of its guidance."""

    layers: tuple[LayerSpec, ...]
    plan: GuidancePlan = fp4.NO_GUIDANCE


def numerics(
    config: ModelConfig,
    precision: tuple[LayerPrecision, ...],
    *,
    plan: GuidancePlan = fp4.NO_GUIDANCE,
    guide: bool = False,
    record: bool = False,
    audit_rows: int = 0,
) -> Numerics:
    """Numerics of a forward that guides by, or records for, `plan`.

    A planned site that is BF16 or FP8 in its layer is skipped: there is nothing to guide.
    """
    planned = planned_layers(config, precision, plan)
    layers = []
    for i, (formats_, kind) in enumerate(zip(precision, config.layer_kinds, strict=True)):
        here = tuple(site for site, chosen in planned.items() if i in chosen)
        guided, recorded = here if guide else (), here if record else ()
        layers.append(LayerSpec(formats_, guided, recorded, audit_rows, kind))
    return Numerics(tuple(layers), plan)


def planned_layers(config, precision, plan) -> dict[str, tuple[int, ...]]:
    """{site: layers} where `plan` asks for guidance and `precision` is FP4; FP8 has none."""
    chosen = plan.site_layers(config.site_shapes(), config.num_layers)
    kept = {
        site: tuple(i for i in layers if isinstance(getattr(precision[i], site), fp4.Format))
        for site, layers in chosen.items()
    }
    return {site: layers for site, layers in kept.items() if layers}


def segments(layers: Sequence[T]) -> list[tuple[int, int, T]]:
    """Runs of equal layers as (start, stop, layer); a layer is whatever is said of it."""
    runs = []
    for i, layer in enumerate(layers):
        if runs and runs[-1][2] == layer:
            runs[-1] = (runs[-1][0], i + 1, layer)
        else:
            runs.append((i, i + 1, layer))
    return runs


def layer_runs(config: ModelConfig, precision) -> list[tuple[int, int, LayerSpec]]:
    """Runs of layers of one kind and equal precision: one entry each of a cache."""
    pairs = zip(precision, config.layer_kinds, strict=True)
    return segments(tuple(LayerSpec(formats_, kind=kind) for formats_, kind in pairs))


def stacks_of(layers: dict | tuple) -> tuple[dict, ...]:
    """The parameter stacks of a model's layers, in order."""
    return (layers,) if isinstance(layers, dict) else layers


def depth(stack) -> int:
    """Layers in a stack of parameters."""
    return jax.tree.leaves(stack)[0].shape[0]


class DecoderLayer(nn.Module):
    """Attention and experts, each behind a norm, with residuals; `kind` replaces either."""

    config: ModelConfig
    kind: LayerKind = LayerKind()

    @nn.compact
    def __call__(
        self, x, positions, valid, sites: Sites, cache=None, routes=None, window=None, pages=None
    ):
        cfg = self.config
        norm = partial(RMSNorm, cfg.norm_eps, cfg.zero_centred_norms)
        y, cache = self._attend(
            norm(name="attention_norm")(x), positions, valid, sites, cache, window, pages
        )
        x = _add(x, y)
        h = norm(name="moe_norm")(x)
        if self.kind.dense:
            y = Mlp(cfg.dense_dim, name="mlp")(h)
            ids, balance = jnp.full((*x.shape[:2], cfg.slots), NOT_RECORDED), jnp.float32(0.0)
        else:
            y, ids, balance = MoE(cfg, name="moe")(h, valid, sites, routes)
        return _add(x, y), cache, ids, balance

    def _attend(self, h, positions, valid, sites, cache, window, pages):
        if self.kind.linear:
            layer = LinearAttention(self.config, name="linear_attention")
            return layer(h, positions, valid, cache)
        if self.config.latent.kv_rank:
            layer = LatentAttention(self.config, name="attention")
            return layer(h, positions, sites, cache)
        layer = Attention(self.config, name="attention")
        return layer(h, positions, sites, cache, window, pages)


def _add(x, y):
    return rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


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
    valid: jax.Array | None = None,
    cache: tuple | None = None,
    pages: Pages | None = None,
    guidance: Guidance | None = None,
    guard: jax.Array | None = None,
    routes: jax.Array | None = None,
    noise_key: jax.Array | None = None,
    noise: float = 0.0,
    remat: bool = False,
) -> Output:
    """Runs the model.

    Args:
      tokens: int32 [B, S].
      numerics: formats, guided and recorded sites a layer.
      positions: int32 [B, S]; default 0..S-1. With a cache they say where to write.
      valid: bool [B, S]; padding is False and counts in no statistic.
      cache: from `empty_cache`, or None (training). Its entries must be those of
        `numerics`' precision. Linear attention goes on from its state, wherever
        `positions` are, unless they begin at 0; `valid` tokens must come first.
      pages: the cache is one pool of pages a layer (paged.empty_pool), and this says
        where tokens stand in it.
      guidance: needed if `numerics` guides. Obeyed where `recorded`.
      guard: FP32 [B, S], steps around the midpoint inside which bits are obeyed.
      routes: int32 [layers, B, S, top_k] to replay, NOT_RECORDED where free.
      noise_key, noise: relative noise at the sites, for emulating a foreign engine.
      remat: recompute each layer in the backward pass.
    """
    batch, length = tokens.shape
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    if valid is None:
        valid = jnp.ones((batch, length), bool)
    x = stored(params["embed"], config.dtype)[tokens]

    def step(spec, carry, inputs: _Layer, layer_cache, window):
        x, balance = carry
        site_inputs = SiteInputs(
            stored=inputs.stored or {},
            obey=None if guidance is None else guidance.recorded,
            guard=guard,
            noise_key=inputs.noise_key,
            noise=noise,
        )
        sites = Sites(spec, numerics.plan, site_inputs, decoding=pages is not None)
        where = (positions, valid, sites, layer_cache, inputs.routes, window, pages)
        layer = DecoderLayer(config, spec.kind)
        x, layer_cache, ids, layer_balance = layer.apply({"params": inputs.params}, x, *where)
        return (x, balance + layer_balance), (layer_cache, ids, sites.outputs)

    slots = _guidance_slots(numerics)
    noise_keys = None if noise_key is None else jax.random.split(noise_key, config.num_layers)

    def inputs_of(start, stop, spec) -> _Layer:
        return _Layer(
            _layer_params(params["layers"], start, stop),
            None if routes is None else routes[start:stop],
            _stored(guidance, slots, start, stop, spec),
            None if noise_keys is None else noise_keys[start:stop],
        )

    carry = (x, jnp.float32(0.0))
    if pages is None:
        run = partial(_scan_layers, config, numerics, remat=remat)
    else:
        run = partial(_unroll_layers, config, numerics)
    (x, balance), caches, routed, records = run(step, carry, inputs_of, cache)
    record = Record(*_merge(records), jnp.concatenate(routed))
    balance = balance / (config.num_layers - config.dense_layers)
    return Output(_final_norm(config, params, x), caches, record, balance)


class _Layer(NamedTuple):
    """What one layer, or with a leading axis a run of layers, is given besides its cache."""

    params: dict
    routes: jax.Array | None
    stored: dict | None
    noise_key: jax.Array | None


def _scan_layers(config, numerics, step, carry, inputs_of, cache, *, remat):
    """Runs the layers segment by segment, each one scan: carry, caches, routes, outputs."""
    runs = layer_runs(config, tuple(spec.precision for spec in numerics.layers))
    windows = jnp.asarray(config.windows, jnp.int32) if any(config.windows) else None
    caches = None if cache is None else [[] for _ in runs]
    routed, records = [], []
    for start, stop, spec in segments(numerics.layers):
        run, cut = _cut(runs, start, stop)
        given = (
            inputs_of(start, stop, spec),
            None if cache is None else jax.tree.map(cut, cache[run]),
            None if windows is None else windows[start:stop],
        )
        body = lambda carry, given, spec=spec: step(spec, carry, *given)
        body = jax.checkpoint(body, prevent_cse=False) if remat else body
        carry, (new_cache, ids, outputs) = jax.lax.scan(body, carry, given)
        if caches is not None:
            caches[run].append(new_cache)
        routed.append(ids)
        records.append(outputs)
    if caches is not None:
        caches = tuple(jax.tree.map(lambda *a: jnp.concatenate(a), *parts) for parts in caches)
    return carry, caches, routed, records


def _unroll_layers(config, numerics, step, carry, inputs_of, cache):
    """The same layer by layer, as decode wants it; the caches are one pool a layer."""
    caches, routed, records = [], [], []
    for i, spec in enumerate(numerics.layers):
        inputs = jax.tree.map(lambda a: a[0], inputs_of(i, i + 1, spec))
        window = config.windows[i] if config.windows else None
        carry, (pool, *left) = step(spec, carry, inputs, cache[i], window)
        ids, outputs = jax.tree.map(lambda a: a[None], left)
        caches.append(pool)
        routed.append(ids)
        records.append(outputs)
    return carry, tuple(caches), routed, records


def _cut(runs, start, stop):
    """The run that holds layers start..stop, and the slicing of its entries."""
    run = next(i for i, (first, last, _) in enumerate(runs) if first <= start < last)
    first = runs[run][0]
    return run, lambda a: a[start - first : stop - first]


def _layer_params(layers, start, stop):
    """Parameters of layers start..stop, which lie in one of the stacks."""
    first = 0
    for stack in stacks_of(layers):
        if start < first + depth(stack):
            break
        first += depth(stack)
    return jax.tree.map(lambda a: a[start - first : stop - first], stack)


def _final_norm(config, params, x):
    norm = RMSNorm(config.norm_eps, config.zero_centred_norms)
    return norm.apply({"params": params["final_norm"]}, x)


def _guidance_slots(numerics: Numerics) -> dict[str, list[int]]:
    """{site: guided layers in order}: the layer axis of stored guidance."""
    slots = {}
    for i, spec in enumerate(numerics.layers):
        for site in spec.guided:
            slots.setdefault(site, []).append(i)
    return slots


def _stored(guidance, slots, start, stop, spec) -> dict | None:
    if not spec.guided:
        return None
    if guidance is None:
        raise ValueError("the numerics guide some sites, but no guidance was given")

    def cut(site):
        first = slots[site].index(start)
        return jax.tree.map(lambda a: a[first : first + stop - start], guidance.sites[site])

    return {site: cut(site) for site in spec.guided}


def _merge(records: list[SiteOutputs]):
    """Joins the segments' outputs along the layer axis, site by site."""
    merged = ({}, {})
    for target, field in zip(merged, ("recorded", "audit"), strict=True):
        for site in fp4.SITES:
            parts = [getattr(r, field)[site] for r in records if site in getattr(r, field)]
            if parts:
                target[site] = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    return merged


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
