"""Parts of a model's shape that only some families have; each is off by default."""

import dataclasses
import math


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
      mscale, mscale_all_dim: DeepSeek's two weights of ln(factor). With both, cosine and
        sine take the quotient of the factors; the second alone also scales the scores.
    """

    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def _factor(self, weight: float) -> float:
        return 0.1 * weight * math.log(max(self.factor, 1.0)) + 1.0

    @property
    def scale(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            default = self._factor(self.mscale) / self._factor(self.mscale_all_dim)
        else:
            default = self._factor(1.0)
        return self.attention_factor or default

    @property
    def score_scale(self) -> float:
        """What latent attention's scores are multiplied by, besides head size ** -0.5."""
        return self._factor(self.mscale_all_dim) ** 2


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's rotary frequencies beyond the original context.

    Attributes:
      factor: slow pairs turn this much slower; 1 is plain rotary positions.
      low_freq_factor, high_freq_factor: turns within the original context below which a
        pair is slowed, and above which it is kept; in between the two are mixed.
      original_positions: the context before.
    """

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0


@dataclasses.dataclass(frozen=True)
class Router:
    """How experts are chosen and weighed.

    Attributes:
      scores: "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3).
      groups, top_groups: experts lie in so many equal groups, and only those of the best
        groups can be chosen; 1 group is no limit.
      group_best: a group is as good as the sum of its so many best experts.
      correction: a bias an expert counts in the choice, not in the weight (DeepSeek-V3).
      scale: of the weights.
    """

    scores: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    correction: bool = False
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
      kv_rank: width of the latent that keys and values are made of; 0 is no latent attention.
      q_rank: that of queries; 0 projects them directly.
      nope_dim, rope_dim: of a query or key head, without and with rotary positions.
      v_dim: of a value head.
    """

    kv_rank: int = 0
    q_rank: int = 0
    nope_dim: int = 0
    rope_dim: int = 0
    v_dim: int = 0


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """Linear attention by the gated delta rule (arXiv 2412.06464).

    Attributes:
      key_heads, value_heads: each key head serves value_heads / key_heads value heads.
      key_dim, value_dim: of a head.
      conv_width: tokens that the causal convolution sees, the current one included.
    """

    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_width: int = 4

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
