"""The shape of a model."""

import dataclasses
import math

from trace_jax.fp4.guidance import SiteShape


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): rotary frequencies stretched beyond the original context.

    Attributes:
      factor: how much longer the context became; 1 is plain rotary positions.
      original_positions: the context before.
      beta_fast, beta_slow: turns within the original context between which a pair goes
        from kept to stretched.
      attention_factor: multiplies cosine and sine; 0 takes 0.1 ln(factor) + 1.
      truncate: the two ends of that ramp are whole pairs.
    """

    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True

    @property
    def scale(self) -> float:
        """What cosine and sine are multiplied by."""
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0


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
      full_attention_every: every n-th layer has full attention and a KV-cache.
        Only 1 can be run so far; other values serve the byte accounting.
      qk_norm_over: what that norm is over: "head", or "projection" (OLMoE), which is
        before the split into heads.
      clip_qkv: queries, keys and values are clamped to +- this (OLMoE); 0 is off.
      attention_bias, moe_bias: biases of q, k, v, o; of router and experts (GPT-OSS).
      windows: keys a query sees in each layer, itself included; 0 is all. () is all in
        every layer.
      sinks: a learned logit a head joins the softmax and takes weight (GPT-OSS).
      swiglu_limit: above 0, GPT-OSS's clamped SwiGLU with this limit.
      yarn: rotary positions beyond the original context.
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
    max_positions: int = 32_768
    dtype: str = "bfloat16"

    def __post_init__(self):
        checks = (
            (
                self.num_heads % max(self.num_kv_heads, 1) == 0,
                f"num_heads is {self.num_heads}; write a multiple of num_kv_heads "
                f"({self.num_kv_heads})",
            ),
            (self.head_dim % 2 == 0, f"head_dim {self.head_dim} must be even (rotary pairs)"),
            (
                self.num_experts == 0 or 1 <= self.top_k <= self.num_experts,
                f"top_k is {self.top_k}; write 1 to num_experts ({self.num_experts})",
            ),
            (self.num_experts > 0 or self.top_k == 0, "num_experts is 0 (dense); write top_k 0"),
            (
                self.qk_norm_over in ("head", "projection"),
                f"qk_norm_over is {self.qk_norm_over!r}; write head or projection",
            ),
            (
                len(self.windows) in (0, self.num_layers),
                f"windows has {len(self.windows)} entries; write num_layers ({self.num_layers})",
            ),
            (
                self.dtype in ("bfloat16", "float32"),
                f"dtype is {self.dtype!r}; write bfloat16 or float32",
            ),
            (
                self.yarn.factor == 1.0 or self.yarn.original_positions > 0,
                "yarn.factor is not 1; write yarn.original_positions",
            ),
        )
        for name in ("vocab_size", "num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; write 1 or more")
        for ok, message in checks:
            if not ok:
                raise ValueError(f"model: {message}")

    @property
    def slots(self) -> int:
        """Expert slots a token: top_k, or 1 for the MLP of a dense model."""
        return self.top_k or 1

    @property
    def attention_layers(self) -> tuple[int, ...]:
        every = self.full_attention_every
        return tuple(i for i in range(self.num_layers) if (i + 1) % every == 0)

    def site_shapes(self) -> dict[str, SiteShape]:
        """Where each quantization site occurs (rows x width a token and layer)."""
        layers = tuple(range(self.num_layers))
        kv = SiteShape(self.attention_layers, self.num_kv_heads, self.head_dim)
        return {
            "expert_in": SiteShape(layers, 1, self.hidden),
            "expert_mid": SiteShape(layers, self.slots, self.expert_dim),
            "k": kv,
            "v": kv,
        }
