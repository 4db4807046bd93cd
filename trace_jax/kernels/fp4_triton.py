"""FP4 in Triton: codes and scales to BF16 operands of the tensor cores, and values to codes.

Operands are interlocked words (bits.interlock) and E5M3 scales. A word unpacks to its codes'
values times 2^-126, subnormals included, which the multiplication keeps; E5M3 bytes become
scales times 2^117. One product does both: value x scale x 2^-9, exact in BF16.
"""

import triton
import triton.language as tl

LIFT = tl.constexpr(512.0)  # 2^9: what operands lack

# A word ($4) to four pairs of BF16 (three shifted masks, and the pair in the bits that they leave),
# each times a pair of scales ($5). Ampere has no mul.bf16x2; adding -0 changes nothing.
UNPACK = """{
    .reg .b32 t, u, v, z;
    mov.b32 z, 0x80008000;
    and.b32 t, $4, 0x81c081c0;
    fma.rn.bf16x2 $0, t, $5, z;
    shl.b32 t, $4, 3;
    and.b32 t, t, 0x81c081c0;
    fma.rn.bf16x2 $1, t, $5, z;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x81c081c0;
    fma.rn.bf16x2 $2, t, $5, z;
    shl.b32 t, $4, 1;
    shr.b32 u, $4, 5;
    shr.b32 v, $4, 4;
    and.b32 t, t, 0x80008000;
    and.b32 u, u, 0x01000100;
    and.b32 v, v, 0x00c000c0;
    or.b32 t, t, u;
    or.b32 t, t, v;
    fma.rn.bf16x2 $3, t, $5, z;
}"""
_UNPACK = tl.constexpr(UNPACK)


@triton.jit
def unpack(words, scales):
    """Words int32 and their pairs of scales to four pairs of BF16, int32 each.

    Whole words, because which bytes of a narrower type share a call is Triton's to choose.
    """
    kinds: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    return tl.inline_asm_elementwise(
        _UNPACK, "=&r,=&r,=&r,=&r,r,r", [words, scales], kinds, is_pure=True, pack=1
    )


@triton.jit
def scale_pair(e5m3):
    """E5M3 bytes to int32: twice the BF16 scale times 2^117."""
    return ((e5m3.to(tl.int32) << 4) + ((127 - 10 + 117) << 7)) * 0x10001


@triton.jit
def _halves(pair):
    """Pairs int32 [..] to BF16 [.., 2]."""
    low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def operand(words, e5m3, ROWS: tl.constexpr, K: tl.constexpr):
    """Words int32 [ROWS, K/8] and scales uint8 [ROWS, K/16] to BF16 [ROWS, K] / 512.

    Columns are in the order of `permuted`: what a lane of the tensor cores reads of 64 values
    is 16 neighbours, which have one scale.
    """
    words = tl.reshape(words, (ROWS, K // 16, 2))
    a, b, c, d = unpack(words, scale_pair(e5m3)[:, :, None])
    both = tl.join(tl.join(_halves(a), _halves(b)), tl.join(_halves(c), _halves(d)))
    both = tl.reshape(both, (ROWS, K // 64, 4, 2, 2, 2, 2))  # t, word, h, a, b
    return tl.reshape(tl.permute(both, (0, 1, 3, 6, 5, 2, 4)), (ROWS, K))


def permuted(x):
    """Columns of x [..., K] (K a multiple of 64) in the order of `operand`.

    Place 32 word + 16 b + 8 a + 2 t + h of 64 holds value 16 t + 8 word + 4 b + 2 a + h.
    """
    parts = x.reshape(-1, x.shape[-1] // 64, 4, 2, 2, 2, 2)
    return parts.transpose(0, 1, 3, 4, 5, 2, 6).reshape(x.shape)


def restored(x):
    """Inverse of `permuted`."""
    parts = x.reshape(-1, x.shape[-1] // 64, 2, 2, 2, 4, 2)
    return parts.transpose(0, 1, 5, 2, 3, 4, 6).reshape(x.shape)


# --- values to codes ---------------------------------------------------------------------------


@triton.jit
def magnitude_bits(x):
    """Bits of |x|, int32: compared instead of values, so that NaN is the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power(exponent):
    """2^(exponent - 127) of int32 exponents 1 to 254; 255 is NaN."""
    return tl.where(exponent == 255, 0x7FC00000, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_exponent(top):
    """Exponent of a row's outer scale: the smallest power of two with 6 x 448 times it >= top.

    `top`: bits of the row's largest magnitude. 255 for a row with NaN or Inf.
    """
    exponent = tl.maximum(((top + 0x57FFFF) >> 23) - 11, 127 - 117)
    return tl.where(top >= 0x7F800000, 255, exponent)


@triton.jit
def encode_e4m3(x):
    """E4M3 bytes (int32) of FP32 x in 0..448, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = (x * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def decode_e4m3(byte):
    """FP32 values of E4M3 bytes (int32, sign clear); 0x7F gives 480."""
    normal = ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def encode_blocks(x, exponent):
    """Codes (int32, as x) and E4M3 scale bytes of FP32 blocks x [.., 16] over 2^(exponent - 127).

    `exponent`: int32 [.., 1], from `row_exponent`.
    """
    bad = exponent == 255
    u = x * ((254 - tl.minimum(exponent, 253)) << 23).to(tl.float32, bitcast=True)
    top = tl.max(magnitude_bits(u), axis=len(x.shape) - 1, keep_dims=True)
    top = top.to(tl.float32, bitcast=True)
    scale = tl.div_rn(top, tl.full(top.shape, 6.0, tl.float32))  # exact ties stay ties
    scale = tl.minimum(tl.maximum(scale, 2.0**-9), 448.0)
    byte = tl.where(bad, 0x7F, encode_e4m3(scale))
    scale = decode_e4m3(byte)
    size = tl.abs(u)
    code = (size > 0.25 * scale).to(tl.int32) + (size >= 0.75 * scale).to(tl.int32)
    code += (size > 1.25 * scale).to(tl.int32) + (size >= 1.75 * scale).to(tl.int32)
    code += (size > 2.5 * scale).to(tl.int32) + (size >= 3.5 * scale).to(tl.int32)
    code += (size > 5.0 * scale).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8), byte


@triton.jit
def packed(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 [ROWS, WIDTH] to bytes: all 4 bits, low nibble first, or the mantissa bits."""
    each: tl.constexpr = 8 // BITS
    parts = tl.reshape(codes & (2**BITS - 1), (ROWS, WIDTH // each, each))
    return tl.sum(parts << (BITS * tl.arange(0, each))[None, None, :], axis=2).to(tl.uint8)
