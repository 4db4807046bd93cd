"""Layers one after the other: scanned for training, unrolled for decode."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax import fp4
from trace_jax.model.remat import checkpointed
from trace_jax.model.sites import LayerSpec, SiteOutputs, Stored
from trace_jax.model.specs import Guidance, Numerics, depth, layer_runs, segments, stacks_of

UNGUIDED = -1  # slot of a layer for which no guidance is stored


class LayerInputs(NamedTuple):
    """What one layer, or with a leading axis a run of layers, is given besides its cache.

    `slots` {site: int32}: where the layer's guidance is stored, or UNGUIDED.
    """

    params: dict
    routes: jax.Array | None
    slots: dict[str, jax.Array]
    noise_key: jax.Array | None


def scan_layers(config, numerics, step, carry, inputs_of, cache, *, remat):
    """Runs the layers segment by segment, each one scan: carry, caches, routes, outputs.

    Layers that differ in their guided sites alone are one segment: cut stacks of parameters
    would be copied, and their gradients put together again, which costs more than the guidance.
    """
    runs = layer_runs(config, tuple(spec.precision for spec in numerics.layers))
    windows = jnp.asarray(config.windows, jnp.int32) if any(config.windows) else None
    caches = None if cache is None else [[] for _ in runs]
    routed, records = [], []
    for start, stop, spec in _guided_segments(numerics.layers):
        run, cut = _cut(runs, start, stop)
        given = (
            inputs_of(start, stop, spec),
            None if cache is None else jax.tree.map(cut, cache[run]),
            None if windows is None else windows[start:stop],
        )
        body = lambda carry, given, spec=spec: step(spec, carry, *given)
        carry, (new_cache, ids, outputs) = jax.lax.scan(checkpointed(body, remat), carry, given)
        if caches is not None:
            caches[run].append(new_cache)
        routed.append(ids)
        records.append(outputs)
    if caches is not None:
        caches = tuple(jax.tree.map(lambda *a: jnp.concatenate(a), *parts) for parts in caches)
    return carry, caches, routed, records


def unroll_layers(config, numerics, step, carry, inputs_of, cache):
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


def _guided_segments(layers: tuple[LayerSpec, ...]) -> list[tuple[int, int, LayerSpec]]:
    """Segments of layers equal but for `guided`, which is then what some of them have."""
    plain = tuple(dataclasses.replace(spec, guided=()) for spec in layers)

    def union(start, stop):
        return tuple(s for s in fp4.SITES if any(s in spec.guided for spec in layers[start:stop]))

    return [
        (start, stop, dataclasses.replace(spec, guided=union(start, stop)))
        for start, stop, spec in segments(plain)
    ]


def _cut(runs, start, stop):
    """The run that holds layers start..stop, and the slicing of its entries."""
    run = next(i for i, (first, last, _) in enumerate(runs) if first <= start < last)
    first = runs[run][0]
    return run, lambda a: a[start - first : stop - first]


def layer_params(layers, start, stop):
    """Parameters of layers start..stop, which lie in one of the stacks."""
    first = 0
    for stack in stacks_of(layers):
        if start < first + depth(stack):
            break
        first += depth(stack)
    return jax.tree.map(lambda a: a[start - first : stop - first], stack)


def guidance_slots(numerics: Numerics, guidance: Guidance | None) -> dict[str, np.ndarray]:
    """{site: int32 [layers]}: where on its layer axis each layer's guidance is, or UNGUIDED."""
    slots = {}
    for site in fp4.SITES:
        guided = np.array([site in spec.guided for spec in numerics.layers])
        if guided.any():
            slots[site] = np.where(guided, np.cumsum(guided) - 1, UNGUIDED).astype(np.int32)
    if slots and guidance is None:
        raise ValueError("the numerics guide some sites, but no guidance was given")
    return slots


def stored_at(guidance: Guidance | None, slots: dict[str, jax.Array]) -> dict[str, Stored]:
    """The guidance of one layer, whose slots are scalars."""

    def read(site):
        at = jnp.maximum(slots[site], 0)
        stored = jax.tree.map(lambda a: a[at], guidance.sites[site])
        return Stored(stored, slots[site] != UNGUIDED)

    return {site: read(site) for site in slots}


def merge_outputs(records: list[SiteOutputs]):
    """Joins the segments' outputs along the layer axis, site by site."""
    merged = ({}, {})
    for target, field in zip(merged, ("recorded", "audit"), strict=True):
        for site in fp4.SITES:
            parts = [getattr(r, field)[site] for r in records if site in getattr(r, field)]
            if parts:
                target[site] = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    return merged
