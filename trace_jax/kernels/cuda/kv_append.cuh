// One token's row of K or V into its page, in place, and what guides the trainer.
//
// A warp a row; lane l holds the D / 32 values from l * D / 32 on. Where things lie in a unit is
// kernels/kv_units.py's business; the address functions here are its orders for one token. V's codes
// share 16-bit words with other tokens of the same page, which no other sequence writes, so they
// are read and replaced.
#pragma once
#include <cuda_bf16.h>

#include "nvfp4.cuh"

namespace trace_jax {

enum Kind { kNvfp4 = 0, kFp8 = 1, kBf16 = 2 };

struct Side {
  uint8_t* bits;         // [batch][kv heads][D / 8 or D / 2] or null
  uint8_t* scales;       // [batch][kv heads][D / 16] or null
};

struct AppendArgs {
  uint8_t* pages;        // [pages][kv heads][2][unit bytes]
  const int* table;      // [batch][max_pages]
  const int* positions;  // [batch], and `behind` more than where the token goes
  Side k, v;
  int batch, kv_heads, pool, max_pages, behind;
  bool whole_codes;  // `bits` are codes
};

// A token's place among the 64 of a page, as the orders split it.
struct Token {
  int i, half, g, t, low;  // 16 i + 8 half + g, and g = 2 t + low
  __device__ __forceinline__ explicit Token(int at)
      : i(at / 16), half(at / 8 % 2), g(at % 8), t(at / 2 % 4), low(at % 2) {}
};

// Eight codes, one a nibble, to an interlocked word.
__device__ __forceinline__ uint32_t interlock(uint32_t codes) {
  uint32_t word = 0;
#pragma unroll
  for (int pair = 0; pair < 4; pair++) {
    uint32_t e = (codes >> (8 * pair) & 15) | (codes >> (8 * pair + 4) & 15) << 16;
    word |= pair < 3 ? ((e & 0x00080008u) << 12 | (e & 0x00070007u) << 6) >> (3 * pair)
                     : (e & 0x000C000Cu) << 11 | (e & 0x00030003u) << 10;
  }
  return word;
}

__device__ __forceinline__ uint32_t e5m3(uint32_t e4m3) {
  return e4m3 < 8 ? 0x1E1C1A1814100800ull >> (8 * e4m3) & 0xFF : e4m3 + 24;
}

// V: the 16-byte chunk of a group of 32 that holds the token's values of dimension d.
__device__ __forceinline__ int v_chunk(Token k, int d) { return k.t * 8 + (d + 2 * k.t) % 8; }

// The 16 bits that hold V's code of dimension d and three other tokens' codes.
__device__ __forceinline__ uint16_t* v_code_at(uint8_t* unit, Token k, int d) {
  int word = ((d / 16 * 32 + v_chunk(k, d)) * 2 + d / 8 % 2) * 2 + k.i / 2;
  return reinterpret_cast<uint16_t*>(unit + word * 4 + k.low * 2);
}

__device__ __forceinline__ uint16_t with_code(uint32_t old, Token k, uint32_t code) {
  int pair = k.i % 2 * 2 + k.half;
  uint32_t mask = pair < 3 ? 0x81C0u >> (3 * pair) : 0x6C00u;
  uint32_t bits = pair < 3 ? ((code & 8) << 12 | (code & 7) << 6) >> (3 * pair)
                           : (code & 12) << 11 | (code & 3) << 10;
  return static_cast<uint16_t>((old & ~mask) | bits);
}

// N values a lane to NVFP4: stored where `unit` is not null, recorded where asked.
template <int D>
__device__ void append_nvfp4(const Side& side, bool whole_codes, int is_v, size_t row,
                             uint8_t* unit, Token k, int lane, const uint16_t* x,
                             uint32_t row_amax) {
  constexpr int N = D / 32, kLanes = 16 / N;  // lanes of a block
  uint16_t old[N] = {};
  if (unit && is_v) {
#pragma unroll
    for (int i = 0; i < N; i++) old[i] = *v_code_at(unit, k, lane * N + i);
  }
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < N; i++) amax = max(amax, x[i] & 0x7FFFu);
#pragma unroll
  for (int d = 1; d < kLanes; d <<= 1) amax = max(amax, __shfl_xor_sync(~0u, amax, d));
  float outer = outer_scale(__uint_as_float(row_amax << 16)), value;
  uint32_t scale = block_scale(__uint_as_float(amax << 16), outer, value);
  float grid = value * outer;
  uint32_t codes = 0, first = lane * N % 8;
#pragma unroll
  for (int i = 0; i < N; i++) {
    uint32_t code = magnitude_code(__uint_as_float((x[i] & 0x7FFFu) << 16), grid);
    code |= x[i] >> 12 & 8;
    codes |= code << (4 * (first + i));
    if (unit && is_v) *v_code_at(unit, k, lane * N + i) = with_code(old[i], k, code);
  }
#pragma unroll
  for (int d = 1; d < 8 / N; d <<= 1) codes |= __shfl_xor_sync(~0u, codes, d);
  int block = lane / kLanes, c = block / 4, t = block % 4;
  if (unit && !is_v && first == 0) {
    int at = (((k.i * (D / 64) + c) * 8 + k.g) * 4 + t) * 2 + k.half;
    reinterpret_cast<uint32_t*>(unit)[at * 2 + lane * N / 8 % 2] = interlock(codes);
  }
  if (unit && lane % kLanes == 0) {
    int at = is_v ? ((k.t * (D / 16) + block) * 4 + k.i) * 4 + k.half * 2 + k.low
                  : (((k.i * (D / 64) + c) * 8 + k.g) * 4 + t) * 2 + k.half;
    unit[32 * D + at] = e5m3(scale);
  }
  if (unit && lane == 0) {
    unit[36 * D + k.g * 8 + k.i * 2 + k.half] = __float_as_uint(outer) >> 23;
  }
  if (side.scales && lane % kLanes == 0) side.scales[row * (D / 16) + block] = scale;
  if (side.bits && first == 0) {
    size_t at = row * (D / 8) + lane * N / 8;
    if (whole_codes) reinterpret_cast<uint32_t*>(side.bits)[at] = codes;
    else side.bits[at] = mantissa_byte(codes);
  }
}

template <int D>
__device__ void append_fp8(int is_v, uint8_t* unit, Token k, int lane, const uint16_t* x,
                           uint32_t row_amax) {
  // The smallest power of two that brings the row within 448 = 1.75 x 2^8.
  bool finite = row_amax < 0x7F80u;
  int exponent = max((int)(((row_amax << 16) + 0x1FFFFFu) >> 23) - 8, 10);
  float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    int d = lane * (D / 32) + i;
    uint32_t byte = e4m3_byte(__uint_as_float((x[i] & 0x7FFFu) << 16) * inverse);
    byte = finite ? byte | (x[i] >> 8 & 0x80) : 0x7F;
    int at = is_v ? ((d / 16 * 2 + k.i / 2) * 32 + v_chunk(k, d)) * 16 + k.i % 2 * 8 +
                        k.half * 4 + d / 8 % 2 * 2 + k.low
                  : ((((k.i * (D / 64) + d / 64) * 2 + d / 8 % 2) * 8 + k.g) * 4 + d / 16 % 4) * 16 +
                        d / 4 % 2 * 8 + d / 2 % 2 * 4 + k.half * 2 + d % 2;
    unit[at] = byte;
  }
  if (lane == 0) unit[64 * D + k.g * 8 + k.i * 2 + k.half] = finite ? exponent : 255;
}

template <int D>
__device__ void append_bf16(int is_v, uint8_t* unit, Token k, int lane, const uint16_t* x) {
#pragma unroll
  for (int i = 0; i < D / 32; i++) {
    int d = lane * (D / 32) + i;
    int at = is_v ? ((d / 16 * 4 + k.i) * 32 + v_chunk(k, d)) * 8 + k.half * 4 + d / 8 % 2 * 2 +
                        k.low
                  : ((((k.i * (D / 64) + d / 64) * 4 + d / 4 % 4) * 8 + k.g) * 4 + d / 16 % 4) * 8 +
                        d / 2 % 2 * 4 + k.half * 2 + d % 2;
    reinterpret_cast<uint16_t*>(unit)[at] = x[i];
  }
}

// A row (sequence * KV heads + KV head) of K or V of which the lane holds x.
template <int KIND, int D>
__device__ __forceinline__ void append_row(const AppendArgs& p, int is_v, int row, int lane,
                                           const uint16_t* x) {
  constexpr size_t kUnit = KIND == kNvfp4 ? 36 * D + 64 : KIND == kFp8 ? 64 * D + 64 : 128 * D;
  const Side& side = is_v ? p.v : p.k;
  int b = row / p.kv_heads, position = p.positions[b] - p.behind, page = -1;
  if (position >= 0 && position / 64 < p.max_pages)
    page = p.table[(size_t)b * p.max_pages + position / 64];
  uint8_t* unit = nullptr;
  if (page >= 0 && page < p.pool)
    unit = p.pages + (((size_t)page * p.kv_heads + row % p.kv_heads) * 2 + is_v) * kUnit;
  if (!unit && !side.scales) return;
  Token k(position & 63);
  uint32_t row_amax = 0;
#pragma unroll
  for (int i = 0; i < D / 32; i++) row_amax = max(row_amax, x[i] & 0x7FFFu);  // NaN's are largest
  row_amax = __reduce_max_sync(~0u, row_amax);
  if constexpr (KIND == kNvfp4)
    append_nvfp4<D>(side, p.whole_codes, is_v, row, unit, k, lane, x, row_amax);
  else if constexpr (KIND == kFp8) append_fp8<D>(is_v, unit, k, lane, x, row_amax);
  else append_bf16<D>(is_v, unit, k, lane, x);
}

}  // namespace trace_jax
