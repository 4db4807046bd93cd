"""One forward for prefill, decode and training.

Layers are stacked and scanned. Consecutive layers of equal numerics form a
segment with one scan, so precision and guidance may differ from layer to layer
without a branch inside the loop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from trace_jax import fp4
from trace_jax.fp4 import GuidancePlan, LayerPrecision, SiteGuidance
from trace_jax.model.attention import Attention, empty_plane
from trace_jax.model.config import ModelConfig
from trace_jax.model.layers import Dtype, RMSNorm, normal_init, precision_of, rounded, stored
from trace_jax.model.moe import MoE
from trace_jax.model.paged import Pages
from trace_jax.model.sites import Codes, LayerSpec, SiteInputs, SiteOutputs, Sites


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
      audit: {site: Codes} with leading axes [layers, audit rows, S, rows]; sites
        that are BF16 in every layer are absent.
      routes: int32 [layers, B, S, slots].
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

    A planned site that is BF16 in its layer is skipped: there is nothing to guide.
    """
    planned = planned_layers(config, precision, plan)
    layers = []
    for i, formats_ in enumerate(precision):
        here = tuple(site for site, chosen in planned.items() if i in chosen)
        spec = LayerSpec(formats_, here if guide else (), here if record else (), audit_rows)
        layers.append(spec)
    return Numerics(tuple(layers), plan)


def planned_layers(config, precision, plan) -> dict[str, tuple[int, ...]]:
    """{site: layers} where `plan` asks for guidance and `precision` quantizes."""
    chosen = plan.site_layers(config.site_shapes(), config.num_layers)
    kept = {
        site: tuple(i for i in layers if getattr(precision[i], site) is not None)
        for site, layers in chosen.items()
    }
    return {site: layers for site, layers in kept.items() if layers}


def segments(specs: tuple[LayerSpec, ...]) -> list[tuple[int, int, LayerSpec]]:
    """Runs of equal layers as (start, stop, spec)."""
    runs = []
    for i, spec in enumerate(specs):
        if runs and runs[-1][2] == spec:
            runs[-1] = (runs[-1][0], i + 1, spec)
        else:
            runs.append((i, i + 1, spec))
    return runs


def precision_runs(precision) -> list[tuple[int, int, LayerPrecision]]:
    """Runs of layers of equal precision as (start, stop, precision)."""
    runs = segments(tuple(LayerSpec(p) for p in precision))
    return [(start, stop, spec.precision) for start, stop, spec in runs]


class DecoderLayer(nn.Module):
    """Attention and experts, each behind a norm, with residuals."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x, positions, valid, sites: Sites, cache=None, routes=None, window=None, pages=None
    ):
        eps = self.config.norm_eps
        y, cache = Attention(self.config, name="attention")(
            RMSNorm(eps, name="attention_norm")(x), positions, sites, cache, window, pages
        )
        x = _add(x, y)
        y, ids, balance = MoE(self.config, name="moe")(
            RMSNorm(eps, name="moe_norm")(x), valid, sites, routes
        )
        return _add(x, y), cache, ids, balance


def _add(x, y):
    return rounded(x.astype(jnp.float32) + y.astype(jnp.float32), x.dtype)


def init(config: ModelConfig, key: jax.Array) -> dict:
    """FP32 parameters: {"embed", "layers" (stacked), "final_norm"[, "unembed"]}."""
    if config.full_attention_every != 1:
        raise ValueError("model.full_attention_every above 1 cannot be run yet; write 1")
    layer = DecoderLayer(config)
    sites = Sites(LayerSpec(fp4.LayerPrecision()), fp4.NO_GUIDANCE, SiteInputs())
    x = jnp.zeros((1, 1, config.hidden), config.dtype)
    at = jnp.zeros((1, 1), jnp.int32)

    def one(key):
        return layer.init(key, x, at, at == 0, sites)["params"]

    embed_key, layer_key, unembed_key = jax.random.split(key, 3)
    table = (config.vocab_size, config.hidden)
    params = {
        "embed": nn.initializers.normal(0.02)(embed_key, table, jnp.float32),
        "layers": jax.vmap(one)(jax.random.split(layer_key, config.num_layers)),
        "final_norm": {"weight": jnp.ones(config.hidden, jnp.float32)},
    }
    if not config.tie_embeddings:
        params["unembed"] = normal_init(config.hidden)(unembed_key, table, jnp.float32)
    return params


def empty_cache(config, precision, batch: int, length: int) -> tuple:
    """KV-cache for `batch` sequences of up to `length` tokens, one entry a precision segment."""
    entries = []
    for start, stop, formats_ in precision_runs(precision):
        shape = (stop - start, batch, length, config.num_kv_heads)
        entries.append(
            {
                "k": empty_plane(shape, config.head_dim, formats_.k, config.dtype),
                "v": empty_plane(shape, config.head_dim, formats_.v, config.dtype),
            }
        )
    return tuple(entries)


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
      cache: from `empty_cache`, or None (training). Its segments must be those of
        `numerics`' precision.
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
    layer = DecoderLayer(config)
    x = stored(params["embed"], config.dtype)[tokens]
    windows = jnp.asarray(config.windows, jnp.int32) if any(config.windows) else None
    records, routed, balance = [], [], jnp.float32(0.0)

    def step(spec, carry, inputs):
        x, balance = carry
        layer_params, layer_cache, layer_routes, stored, key, window = inputs
        site_inputs = SiteInputs(
            stored=stored or {},
            obey=None if guidance is None else guidance.recorded,
            guard=guard,
            noise_key=key,
            noise=noise,
        )
        sites = Sites(spec, numerics.plan, site_inputs, decoding=pages is not None)
        x, layer_cache, ids, layer_balance = layer.apply(
            {"params": layer_params},
            x,
            positions,
            valid,
            sites,
            layer_cache,
            layer_routes,
            window,
            pages,
        )
        return (x, balance + layer_balance), (layer_cache, ids, sites.outputs)

    by_layer = pages is not None  # decode wants its layers unrolled; training, scanned
    runs = precision_runs(tuple(spec.precision for spec in numerics.layers))
    runs = [(i, i + 1, None) for i in range(config.num_layers)] if by_layer else runs
    caches = None if cache is None else [[] for _ in runs]
    slots = _guidance_slots(numerics)
    noise_keys = None if noise_key is None else jax.random.split(noise_key, config.num_layers)
    for start, stop, spec in _by_layer(numerics.layers) if by_layer else segments(numerics.layers):
        run, cut = _cut(runs, start, stop)
        inputs = (
            _layer_params(params["layers"], run, cut, start, stop),
            None if cache is None or by_layer else jax.tree.map(cut, cache[run]),
            None if routes is None else routes[start:stop],
            _stored(guidance, slots, start, stop, spec),
            None if noise_keys is None else noise_keys[start:stop],
            None if windows is None or by_layer else windows[start:stop],
        )
        if by_layer:
            here = [jax.tree.map(lambda a: a[0], part) for part in inputs]
            here[1], here[5] = cache[start], config.windows[start] if config.windows else None
            (x, balance), (new_cache, *outs) = step(spec, (x, balance), here)
            caches[run] = new_cache
            ids, outputs = jax.tree.map(lambda a: a[None], outs)
        else:
            body = lambda carry, inputs, spec=spec: step(spec, carry, inputs)
            body = jax.checkpoint(body, prevent_cse=False) if remat else body
            (x, balance), (new_cache, ids, outputs) = jax.lax.scan(body, (x, balance), inputs)
            if caches is not None:
                caches[run].append(new_cache)
        routed.append(ids)
        records.append(outputs)
    x = _final_norm(config, params, x)
    record = Record(*_merge(records), jnp.concatenate(routed))
    if by_layer:
        caches = tuple(caches)
    elif caches is not None:
        caches = tuple(jax.tree.map(lambda *a: jnp.concatenate(a), *parts) for parts in caches)
    return Output(x, caches, record, balance / config.num_layers)


def _by_layer(specs):
    return [(i, i + 1, spec) for i, spec in enumerate(specs)]


def _cut(runs, start, stop):
    """The precision run that holds layers start..stop, and the slicing of its stack."""
    run = next(i for i, (first, last, _) in enumerate(runs) if first <= start < last)
    first = runs[run][0]
    return run, lambda a: a[start - first : stop - first]


def _layer_params(layers, run, cut, start, stop):
    """Parameters of layers start..stop from one stack, or from one a run (sync.py)."""
    if isinstance(layers, dict):
        return jax.tree.map(lambda a: a[start:stop], layers)
    return jax.tree.map(cut, layers[run])


def _final_norm(config, params, x):
    return RMSNorm(config.norm_eps).apply({"params": params["final_norm"]}, x)


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
