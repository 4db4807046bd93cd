"""The shape of a model."""

import dataclasses
from typing import NamedTuple

from trace_jax.fp4.guidance import SiteShape
from trace_jax.model.config_parts import DeltaNet, Latent, Llama3Rope, Router, Yarn


class LayerKind(NamedTuple):
    """What a layer is made of: layers of one kind have one parameter tree."""

    linear: bool = False  # linear attention in place of softmax attention
    dense: bool = False  # a plain MLP in place of experts


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with routed experts, or dense without them.

    Attributes:
      vocab_size, num_layers, hidden: token ids, layers, residual width.
      num_heads, num_kv_heads, head_dim: grouped-query attention.
      num_experts: routed experts a layer; 0 makes the layer a dense MLP, which is
        the case of one expert without a router.
      top_k: experts a token.
      expert_dim: inner width of an expert (of the MLP, if dense).
      norm_topk: gate weights of the chosen experts sum to one.
      qk_norm: RMS norm of queries and keys, before the rotation.
      tie_embeddings: the unembedding is the embedding.
      rope_theta, norm_eps: as usual.
      full_attention_every: every n-th layer has full attention and a KV-cache, the
        others linear attention (`delta`).
      qk_norm_over: what that norm is over: "head", or "projection" (OLMoE), which is
        before the split into heads.
      clip_qkv: queries, keys and values are clamped to +- this (OLMoE); 0 is off.
      attention_bias, moe_bias: biases of q, k, v, o; of router and experts (GPT-OSS).
      windows: keys a query sees in each layer, itself included; 0 is all. () is all in
        every layer.
      sinks: a learned logit a head joins the softmax and takes weight (GPT-OSS).
      swiglu_limit: above 0, GPT-OSS's clamped SwiGLU with this limit.
      yarn: rotary positions beyond the original context.
      llama3: another way to do the same; not both.
      rotary_fraction: leading part of a head that has rotary positions.
      attention_gate: outputs of attention are multiplied by sigmoids of the input.
      zero_centred_norms: norms multiply by 1 + weight, but for that of linear attention.
      router: how experts are chosen.
      dense_layers, dense_dim: the first layers that have an MLP of this width, not experts.
      shared_dim: inner width of an MLP that every token goes through besides its experts.
      shared_gate: its output is multiplied by a sigmoid of the input.
      latent: latent attention in place of grouped queries; head_dim is that of a query.
      delta: linear attention of the layers without full attention.
      max_positions: context that the model is made for; exported, no limit here.
      dtype: of activations and of weights in use: "bfloat16", or "float32" for parity.
    """

    vocab_size: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    expert_dim: int
    num_experts: int = 0
    top_k: int = 0
    norm_topk: bool = True
    qk_norm: bool = True
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    full_attention_every: int = 1
    qk_norm_over: str = "head"
    clip_qkv: float = 0.0
    attention_bias: bool = False
    moe_bias: bool = False
    windows: tuple = ()
    sinks: bool = False
    swiglu_limit: float = 0.0
    yarn: Yarn = Yarn()
    llama3: Llama3Rope = Llama3Rope()
    rotary_fraction: float = 1.0
    attention_gate: bool = False
    zero_centred_norms: bool = False
    router: Router = Router()
    dense_layers: int = 0
    dense_dim: int = 0
    shared_dim: int = 0
    shared_gate: bool = False
    latent: Latent = Latent()
    delta: DeltaNet = DeltaNet()
    max_positions: int = 32_768
    dtype: str = "bfloat16"

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; write 1 or more")
        for checks in (_attention_checks, _rotary_checks, _kind_checks, _expert_checks):
            for ok, message in checks(self):
                if not ok:
                    raise ValueError(f"model: {message}")

    @property
    def slots(self) -> int:
        """Expert slots a token: top_k, or 1 for the MLP of a dense model."""
        return self.top_k or 1

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Those with softmax attention, and so with a KV-cache."""
        every = self.full_attention_every
        return tuple(i for i in range(self.num_layers) if (i + 1) % every == 0)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        full = set(self.attention_layers)
        return tuple(
            LayerKind(i not in full, i < self.dense_layers) for i in range(self.num_layers)
        )

    @property
    def rope_scaling(self) -> Yarn | Llama3Rope:
        return self.yarn if self.llama3.factor == 1.0 else self.llama3

    def site_shapes(self) -> dict[str, SiteShape]:
        """Where each quantization site occurs (rows x width a token and layer).

        Sites are the routed experts (of a dense model, its MLPs) and what is cached of
        keys and values: with latent attention "k" is the shared rotary key, "v" the latent.
        """
        experts = tuple(range(self.dense_layers, self.num_layers))
        k = v = SiteShape(self.attention_layers, self.num_kv_heads, self.head_dim)
        if self.latent.kv_rank:
            k, v = (
                k._replace(rows=1, width=w) for w in (self.latent.rope_dim, self.latent.kv_rank)
            )
        return {
            "expert_in": SiteShape(experts, 1, self.hidden),
            "expert_mid": SiteShape(experts, self.slots, self.expert_dim),
            "k": k,
            "v": v,
        }


def _attention_checks(c: ModelConfig) -> tuple[tuple[bool, str], ...]:
    return (
        (
            c.num_heads % c.num_kv_heads == 0,
            f"num_heads is {c.num_heads}; write a multiple of num_kv_heads ({c.num_kv_heads})",
        ),
        (c.head_dim % 2 == 0, f"head_dim {c.head_dim} must be even (rotary pairs)"),
        (
            c.qk_norm_over in ("head", "projection"),
            f"qk_norm_over is {c.qk_norm_over!r}; write head or projection",
        ),
        (
            len(c.windows) in (0, c.num_layers),
            f"windows has {len(c.windows)} entries; write num_layers ({c.num_layers})",
        ),
        (
            c.dtype in ("bfloat16", "float32"),
            f"dtype is {c.dtype!r}; write bfloat16 or float32",
        ),
    )


def _rotary_checks(c: ModelConfig) -> tuple[tuple[bool, str], ...]:
    return (
        (c.head_dim % 2 == 0, f"head_dim {c.head_dim} must be even (rotary pairs)"),
        (
            c.qk_norm_over in ("head", "projection"),
            f"qk_norm_over is {c.qk_norm_over!r}; write head or projection",
        ),
        (
            c.yarn.factor == 1.0 or c.yarn.original_positions > 0,
            "yarn.factor is not 1; write yarn.original_positions",
        ),
        (
            c.llama3.factor == 1.0 or c.llama3.original_positions > 0,
            "llama3.factor is not 1; write llama3.original_positions",
        ),
        (
            1.0 in (c.yarn.factor, c.llama3.factor),
            "yarn.factor and llama3.factor are both not 1; write one of them",
        ),
        (
            0 < c.rotary_fraction <= 1 and round(c.head_dim * c.rotary_fraction) % 2 == 0,
            f"rotary_fraction is {c.rotary_fraction}; write a share of head_dim "
            f"({c.head_dim}) that is an even number",
        ),
    )


def _kind_checks(c: ModelConfig) -> tuple[tuple[bool, str], ...]:
    delta, latent = c.delta, c.latent
    return (
        (c.full_attention_every >= 1, "full_attention_every is below 1; write 1 or more"),
        (
            c.full_attention_every == 1
            or (delta.key_heads > 0 and delta.key_dim > 0 and delta.value_dim > 0),
            f"full_attention_every is {c.full_attention_every}; write delta.key_heads, "
            "delta.value_heads, delta.key_dim and delta.value_dim of the layers in between",
        ),
        (
            delta.value_heads % max(delta.key_heads, 1) == 0 and delta.conv_width >= 2,
            f"delta.value_heads is {delta.value_heads}; write a multiple of delta.key_heads "
            f"({delta.key_heads}), and delta.conv_width of 2 or more",
        ),
        (
            not latent.kv_rank or c.head_dim == latent.nope_dim + latent.rope_dim,
            f"head_dim is {c.head_dim}; write latent.nope_dim + latent.rope_dim "
            f"({latent.nope_dim + latent.rope_dim})",
        ),
        (
            not latent.kv_rank or (latent.rope_dim % 2 == 0 and latent.v_dim > 0),
            "latent.kv_rank is set; write an even latent.rope_dim and latent.v_dim",
        ),
        (
            not latent.kv_rank
            or not (c.qk_norm or c.windows or c.sinks or c.attention_bias or c.attention_gate),
            "latent attention has no qk_norm, windows, sinks, attention_bias or attention_gate; "
            "write none of them",
        ),
    )


def _expert_checks(c: ModelConfig) -> tuple[tuple[bool, str], ...]:
    router = c.router
    return (
        (
            c.num_experts == 0 or 1 <= c.top_k <= c.num_experts,
            f"top_k is {c.top_k}; write 1 to num_experts ({c.num_experts})",
        ),
        (c.num_experts > 0 or c.top_k == 0, "num_experts is 0 (dense); write top_k 0"),
        (
            router.scores in ("softmax", "sigmoid"),
            f"router.scores is {router.scores!r}; write softmax or sigmoid",
        ),
        (
            router.groups >= 1 and c.num_experts % router.groups == 0,
            f"router.groups is {router.groups}; write a divisor of num_experts ({c.num_experts})",
        ),
        (
            1 <= router.top_groups <= router.groups
            and c.top_k * router.groups <= c.num_experts * router.top_groups,
            f"router.top_groups is {router.top_groups}; write up to {router.groups} groups that "
            f"hold top_k ({c.top_k}) experts",
        ),
        (
            0 <= c.dense_layers < c.num_layers and (c.dense_layers == 0 or c.dense_dim > 0),
            f"dense_layers is {c.dense_layers}; write less than num_layers ({c.num_layers}), "
            "and dense_dim",
        ),
        (
            c.num_experts > 0 or not (c.dense_layers or c.shared_dim),
            "num_experts is 0 (dense); write dense_layers 0 and shared_dim 0",
        ),
        (c.shared_dim > 0 or not c.shared_gate, "shared_gate is on; write shared_dim"),
    )
