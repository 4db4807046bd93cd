// The codec's scale rules on the GPU, bit for bit: block scales, power-of-two outer scales.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace trace_jax {

__device__ __forceinline__ uint32_t e4m3_byte(float x) {
  uint16_t byte;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(byte) : "f"(0.0f), "f"(x));
  return byte & 0xFF;
}

// The scale byte (E4M3) of a block and its value. `outer` is a power of two, or NaN.
__device__ __forceinline__ uint32_t block_scale(float amax, float outer, float& value) {
  // amax / outer / 6, correctly rounded: one step of refinement, and no special cases here.
  constexpr float kSixth = 1.0f / 6.0f;
  float a = amax * __uint_as_float(0x7F000000u - __float_as_uint(outer)), raw = a * kSixth;
  raw = fmaf(fmaf(-6.0f, raw, a), kSixth, raw);
  uint16_t byte = e4m3_byte(fminf(fmaxf(raw, 0.001953125f), 448.0f));
  uint32_t half2;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"(byte));
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)(half2 & 0xFFFF)));
  bool bad = outer != outer;
  value = bad ? outer : value;
  return bad ? 0x7F : byte;
}

// The power of two at or above amax / (6 * 448), at least 2^-117; NaN if amax is not finite.
__device__ __forceinline__ float outer_scale(float amax) {
  if (!(amax < __int_as_float(0x7F800000))) return __int_as_float(0x7FC00000);
  float raw = fmaxf(__fdiv_rn(amax, 2688.0f), 6.018531076210112e-36f);
  return __uint_as_float((__float_as_uint(raw) + 0x7FFFFFu) & 0xFF800000u);
}

// Magnitude code of m on a grid of step `unit`; ties to even. The products are exact.
__device__ __forceinline__ uint32_t magnitude_code(float m, float unit) {
  return (m > unit * 0.25f) + (m >= unit * 0.75f) + (m > unit * 1.25f) + (m >= unit * 1.75f) +
         (m > unit * 2.5f) + (m >= unit * 3.5f) + (m > unit * 5.0f);
}

// The mantissa bits of eight codes, one a nibble, as one byte.
__device__ __forceinline__ uint32_t mantissa_byte(uint32_t codes) {
  uint32_t m = codes & 0x11111111u;
  m = (m | m >> 3) & 0x03030303u;
  m = (m | m >> 6) & 0x000F000Fu;
  return (m | m >> 12) & 0xFF;
}

}  // namespace trace_jax
