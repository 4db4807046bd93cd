"""FP4 numbers: formats, quantized arrays, rounding, guidance, precision policy; FP8 rows."""

from trace_jax.fp4.formats import (
    FORMATS,
    MXFP4,
    NVFP4,
    NVFP4_4OVER6,
    Format,
    format_named,
    mantissa_bits,
    pack,
    unpack,
)
from trace_jax.fp4.fp8 import FP8, E4M3Rows, Fp8Rows, quantize_fp8
from trace_jax.fp4.guidance import (
    NO_GUIDANCE,
    SITES,
    GuidancePlan,
    Guide,
    Quantized,
    SiteGuidance,
    SiteShape,
    as_planned,
    compact,
    guidance_bytes_per_token,
    quantize_site,
    row_checks,
    select_layers,
)
from trace_jax.fp4.hadamard import hadamard
from trace_jax.fp4.policy import BF16_POLICY, LayerPrecision, PrecisionPolicy, Rule
from trace_jax.fp4.qtensor import (
    QTensor,
    dequantize,
    fake_quant,
    fake_quant_unscaled,
    quantize,
    row_axes,
    unscaled,
)
from trace_jax.fp4.rounding import (
    NEAREST,
    Rounding,
    fp4_round,
    guided_round,
    round_codes,
    straight_through,
)
