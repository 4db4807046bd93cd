"""Routed experts: FP32 router, dropless dispatch, FP4 products."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from trace_jax import fp4
from trace_jax.kernels import expert_matmul
from trace_jax.kernels.expert_layer import expert_layer
from trace_jax.kernels.expert_matmul import ExpertWeights
from trace_jax.kernels.top_k import add_parts, choose_experts
from trace_jax.model.config import ModelConfig
from trace_jax.model.config_parts import Router
from trace_jax.model.expert_parallel import over_experts
from trace_jax.model.experts import Inner, MidGuide, RoutedWeights, SlotOutputs, slot_outputs
from trace_jax.model.layers import (
    ExpertWeight,
    Linear,
    Mlp,
    expert_weight,
    made_once,
    product,
    rounded,
)
from trace_jax.model.remat import keepable
from trace_jax.model.sites import Codes, Sites

NOT_RECORDED = -1  # expert id of a token whose route was not recorded
PLAIN = Router()


class Routing(NamedTuple):
    """ids int32 [T, top_k], gates FP32 [T, top_k], probs FP32 [T, experts].

    While decoding there are no probs, but the slots in the `order` of their experts.
    """

    ids: jax.Array
    gates: jax.Array
    probs: jax.Array | None
    order: expert_matmul.Routing | None = None


def route(
    logits: jax.Array,
    top_k: int,
    norm_topk: bool,
    replay: jax.Array | None,
    router: Router = PLAIN,
    correction: jax.Array | None = None,
) -> Routing:
    """Chooses experts from FP32 router logits [T, experts]; ties go to the lower index.

    With `replay` int32 [T, top_k], recorded ids are used where they are not
    NOT_RECORDED, and gate weights still come from the live logits (R3, arXiv
    2510.11370): gathered from the whole distribution, so their gradient flows.
    `correction` FP32 [experts] counts in the choice alone. Sigmoid scores become
    probabilities by their sum.
    """
    logits = logits.astype(jnp.float32)
    if router.scores == "sigmoid":
        scores = choice = jax.nn.sigmoid(logits)
        probs = scores / jnp.sum(scores, axis=-1, keepdims=True)
    else:
        scores = probs = jax.nn.softmax(logits, axis=-1)
        choice = logits
    if correction is not None:
        choice = choice + correction.astype(jnp.float32)[None]
    _, ids = jax.lax.top_k(_of_best_groups(choice, router), top_k)
    if replay is not None:
        ids = jnp.where(replay == NOT_RECORDED, ids, replay)
    gates = jnp.take_along_axis(scores, ids, axis=-1)
    if norm_topk:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    return Routing(ids.astype(jnp.int32), gates * router.scale, probs)


def _of_best_groups(choice: jax.Array, router: Router) -> jax.Array:
    """choice [T, experts] with -inf outside the best groups of experts."""
    if router.groups == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], router.groups, -1)
    best = jnp.sum(jax.lax.top_k(grouped, router.group_best)[0], axis=-1)
    _, chosen = jax.lax.top_k(best, router.top_groups)
    kept = jnp.any(jax.nn.one_hot(chosen, router.groups, dtype=bool), axis=1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


def load_balance_loss(routing: Routing, valid: jax.Array) -> jax.Array:
    """Switch loss: experts x sum_e (share of slots) x (mean probability); 1 if uniform.

    `valid` bool [T]: padding does not count.
    """
    weight = valid.astype(jnp.float32)[:, None]
    count = jnp.maximum(jnp.sum(weight), 1.0)
    experts = routing.probs.shape[-1]
    chosen = jnp.sum(jax.nn.one_hot(routing.ids, experts), axis=1) / routing.ids.shape[-1]
    share = jnp.sum(chosen * weight, axis=0) / count
    mean = jnp.sum(routing.probs * weight, axis=0) / count
    return experts * jnp.sum(jax.lax.stop_gradient(share) * mean)


class Weighted(NamedTuple):
    """Experts' outputs to be added up: FP32 rows [B, S, slots, hidden], gates [B, S, slots]."""

    rows: jax.Array
    gates: jax.Array


class MoE(nn.Module):
    """The feed-forward half of a layer; dense if the config has no experts."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, valid, sites: Sites, routes=None, given=None):
        """x [B, S, hidden], valid bool [B, S], routes int32 [B, S, top_k] or None.
        `given`: x quantized already and its record, either None; for the kernels' weights,
        whose outputs are then Weighted if no shared expert is added to them.

        Returns y [B, S, hidden], ids int32 [B, S, slots], balance loss.
        """
        cfg = self.config
        batch, length, _ = x.shape
        tokens = x.reshape(-1, cfg.hidden)
        if cfg.num_experts:
            routing = self._route(tokens, routes, sites)
            balance = jnp.float32(0.0)
            if routing.probs is not None:
                balance = load_balance_loss(routing, valid.reshape(-1))
        else:
            zeros = jnp.zeros((tokens.shape[0], 1), jnp.int32)
            ones = jnp.ones(zeros.shape, jnp.float32)
            routing, balance = Routing(zeros, ones, ones), jnp.float32(0.0)
        ids = routing.ids.reshape(batch, length, cfg.slots)
        y = self._experts(x, ids, routing, routes, sites, given)
        if isinstance(y, Weighted) and (given is None or cfg.shared_dim):
            y = rounded(jnp.sum(y.rows * y.gates[..., None], axis=-2), x.dtype)
        if cfg.shared_dim:
            y = rounded(y.astype(jnp.float32) + self._shared(x), x.dtype)
        return y, ids, balance

    def _route(self, tokens, routes, sites: Sites) -> Routing:
        cfg = self.config
        zeros, logits = nn.initializers.zeros, self._logits(tokens)
        if cfg.moe_bias:
            bias = self.param("router_bias", zeros, (cfg.num_experts,), jnp.float32)
            logits = add_parts(logits)[:, None] + bias.astype(jnp.float32)[None, None]
        if sites.decoding and cfg.router == PLAIN:
            ids, gates, order = choose_experts(logits, cfg.top_k, normalize=cfg.norm_topk)
            return Routing(ids, gates, None, order)
        logits = keepable(add_parts(logits), "router")
        correction = None
        if cfg.router.correction:
            correction = self.param("router_correction", zeros, (cfg.num_experts,), jnp.float32)
        replay = None if routes is None else routes.reshape(-1, cfg.top_k)
        return route(logits, cfg.top_k, cfg.norm_topk, replay, cfg.router, correction)

    def _logits(self, tokens):
        """FP32 [T, parts, experts], to be added up: one part, or one a BF16 part of the weights."""
        shape, normal = (self.config.num_experts, self.config.hidden), nn.initializers.normal(0.02)
        if self.is_initializing():
            self.param("router", normal, shape, jnp.float32)
        router = self.get_variable("params", "router")
        if router.ndim == 3:
            return product("tk,pek->tpe", tokens, router)
        fp32 = (a.astype(jnp.float32) for a in (tokens, router))
        return product("tk,ek->te", *fp32)[:, None]

    def _shared(self, x):
        """FP32 output of the expert that every token is sent to."""
        y = Mlp(self.config.shared_dim, name="shared")(x).astype(jnp.float32)
        if not self.config.shared_gate:
            return y
        gate = Linear(1, dtype=x.dtype, name="shared_gate")(x).astype(jnp.float32)
        return y * jax.nn.sigmoid(gate)

    def _experts(self, x, ids, routing: Routing, routes, sites: Sites, given):
        cfg, gates = self.config, routing.gates
        experts = max(cfg.num_experts, 1)
        gate_up = self._weight("gate_up", (experts, 2 * cfg.expert_dim, cfg.hidden), sites)
        down = self._weight("down", (experts, cfg.hidden, cfg.expert_dim), sites)
        if isinstance(gate_up, ExpertWeights):
            return self._expert_kernels(x, ids, routing, gate_up, down, sites, given)
        x = made_once(sites.quantize("expert_in", x[:, :, None])[0][:, :, 0].astype(x.dtype))
        weights = RoutedWeights(gate_up, down, *self._biases(experts))
        out = self._routed(x, ids, weights, self._guide_of_mid(ids, routes, sites), sites)
        if out.mid is not None:
            sites.leave("expert_mid", out.mid)
        y = jnp.sum(out.value.reshape(*gates.shape, -1) * gates[..., None], axis=1)
        return rounded(y.reshape(x.shape), x.dtype)

    def _routed(self, x, ids, weights: RoutedWeights, guide, sites: Sites) -> SlotOutputs:
        """Outputs by slot, [B, S, slots, ...], of the experts here or on other devices."""
        noise, key = sites.inputs.noise, sites.inputs.noise_key
        how = Inner(self.config.swiglu_limit, sites.spec.precision.expert_mid, sites.plan, noise)
        layout = sites.layout
        if layout is not None and layout.ways(layout.axes) > 1:
            run = partial(slot_outputs, how, nobody=True)
            return over_experts(layout, run, x, ids, weights, guide, key)
        flat = partial(jax.tree.map, lambda a: a.reshape(-1, *a.shape[2:]))
        out = slot_outputs(how, flat(x), flat(ids), weights, flat(guide), key)
        return jax.tree.map(lambda a: a.reshape(*ids.shape[:2], *a.shape[1:]), out)

    def _expert_kernels(self, x, ids, routing: Routing, gate_up, down, sites: Sites, given):
        """The same by the rollout's kernels, which want rows in the order of their experts."""
        cfg, gates, order = self.config, routing.gates, routing.order
        if order is None:
            order = expert_matmul.route(ids.reshape(-1, cfg.slots), gate_up.data.shape[0])
        tokens, left = given or (None, None)
        if left is not None:
            sites.keep("expert_in", jax.tree.map(lambda a: a[:, :, None], left))
        if tokens is None:
            tokens = self._kernel_input("expert_in", x[:, :, None], sites)
        tokens = tokens.reshape(-1, cfg.hidden)
        activation = "clamped_swiglu" if cfg.swiglu_limit else "silu"

        def by_slot(a):
            return jnp.zeros_like(a).at[order.slot].set(a).reshape(*ids.shape, -1)

        if sites.spec.audit_rows or sites.inputs.noise_key is not None:
            mid = expert_matmul.expert_matmul(tokens, gate_up, order, activation=activation)
            mid = self._kernel_input("expert_mid", mid, sites, by_slot)
            y = expert_matmul.expert_matmul(mid, down, order)
        else:
            fmt = sites.spec.precision.expert_mid
            record = None if fmt is None else sites.record_bits("expert_mid")
            y, left = expert_layer(
                tokens, gate_up, down, order, activation=activation, fmt=fmt, record=record
            )
            if left is not None:
                sites.keep("expert_mid", jax.tree.map(by_slot, left))
        return Weighted(y.reshape(*ids.shape, -1), gates.reshape(ids.shape))

    def _kernel_input(self, site, x, sites: Sites, order=lambda a: a):
        """Quantizes x [..., width] at a site; `order` brings its record to [B, S, rows, ...]."""
        x, fmt = sites.perturb(site, x), getattr(sites.spec.precision, site)
        if fmt is not None and sites.spec.audit_rows:
            out = fp4.quantize_site(x, fmt)
            sites.leave(site, Codes(*map(order, out[1:])))
            return out.value
        value, left = sites.quantize_rows(site, x)
        if left is not None:
            sites.keep(site, jax.tree.map(order, left))
        return value

    def _biases(self, experts: int):
        """FP32 [experts, 2 x expert_dim] and [experts, hidden], or None."""
        cfg = self.config
        if not cfg.moe_bias:
            return None, None
        shapes = {"gate_up_bias": 2 * cfg.expert_dim, "down_bias": cfg.hidden}
        biases = [
            self.param(name, nn.initializers.zeros, (experts, width), jnp.float32)
            for name, width in shapes.items()
        ]
        return [rounded(bias, cfg.dtype).astype(jnp.float32) for bias in biases]

    def _guide_of_mid(self, ids, routes, sites: Sites) -> MidGuide | None:
        """Guidance of the inner site by slot, [B, S, slots, ...]."""
        match = None
        if routes is not None:
            # A slot that another expert took holds no guidance for this one.
            match = jnp.where(routes == NOT_RECORDED, False, routes == ids)
        guide = sites.guide("expert_mid", match)
        return None if guide is None else MidGuide(guide.stored, guide.obey, guide.guard)

    def _weight(self, name, shape, sites: Sites) -> ExpertWeight | ExpertWeights:
        """The weight `name`, in whatever form the parameters hold it."""
        if self.is_initializing():
            init = nn.initializers.normal(stddev=shape[-1] ** -0.5)
            self.param(name, init, shape, jnp.float32)
        weight = self.get_variable("params", name)
        if isinstance(weight, ExpertWeights):
            return weight
        fmt = sites.spec.precision.expert_weight
        weight = expert_weight(weight, fmt, jnp.dtype(self.config.dtype))
        return weight._replace(values=keepable(weight.values, "expert_weight"))
