// BF16 rows to the BF16 values that NVFP4 makes of them, with a power-of-two outer scale a row,
// and what guides the trainer: mantissa bits or codes, and block scales. WARPS warps a row (a
// decode step has few rows, and their latency counts), in units of 8 values a lane; a block is
// two neighbouring lanes.
#pragma once
#include <cuda_bf16.h>

#include "nvfp4.cuh"

namespace trace_jax {

struct FakeArgs {
  const uint4* x;    // [rows][width] bf16
  uint4* value;      // [rows][width] bf16
  uint8_t* bits;     // [rows][width / 8 or width / 2] or null
  uint8_t* scales;   // [rows][width / 16] or null
  int rows, width;
  bool whole_codes;  // `bits` are codes
};

__device__ __forceinline__ float magnitude(uint32_t code) {
  float x = __uint_as_float((code << 22) + 0x3F000000u);
  return fminf(x, 2 * x - 1);
}

__device__ __forceinline__ uint32_t top(uint32_t pair) {  // NaN's bits are largest
  return max(pair & 0x7FFFu, pair >> 16 & 0x7FFFu);
}

// One code at nibble `at` of `codes`; the value it stands for, as bf16 bits.
__device__ __forceinline__ uint32_t round_one(uint32_t half, float grid, int at, uint32_t& codes) {
  uint32_t code = magnitude_code(__uint_as_float((half & 0x7FFFu) << 16), grid);
  uint32_t value = __float_as_uint(magnitude(code) * grid) >> 16;  // exact in bf16
  codes |= (code | (half >> 12 & 8)) << (4 * at);
  return value | (half & 0x8000u);
}

// Quantizes a row of which thread `at` of 32 * WARPS holds unit at + 32 * WARPS * i of 8 values in
// x[i]; `store` takes a unit's number and values.
template <int WARPS, int UNITS, class Store>
__device__ __forceinline__ void quantize_row(const FakeArgs& p, int row, int at,
                                             const uint4 (&x)[UNITS], Store store) {
  constexpr int kLanes = 32 * WARPS;
  __shared__ uint32_t most[4];
  int units = p.width / 8;
  uint32_t row_amax = 0, amax[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    amax[i] = max(max(top(x[i].x), top(x[i].y)), max(top(x[i].z), top(x[i].w)));
    amax[i] = max(amax[i], __shfl_xor_sync(~0u, amax[i], 1));
    row_amax = max(row_amax, amax[i]);
  }
  row_amax = __reduce_max_sync(~0u, row_amax);
  if constexpr (WARPS == 4) {
    most[threadIdx.x / 32] = row_amax;
    __syncthreads();
    row_amax = max(max(most[0], most[1]), max(most[2], most[3]));
  }
  float outer = outer_scale(__uint_as_float(row_amax << 16));
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = at + kLanes * i;
    if (u >= units) continue;
    float scale;
    uint32_t byte = block_scale(__uint_as_float(amax[i] << 16), outer, scale), codes = 0;
    float grid = scale * outer;
    uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int w = 0; w < 4; w++) {
      uint32_t low = round_one(words[w] & 0xFFFFu, grid, 2 * w, codes);
      words[w] = low | round_one(words[w] >> 16, grid, 2 * w + 1, codes) << 16;
    }
    size_t to = (size_t)row * units + u;
    store(u, make_uint4(words[0], words[1], words[2], words[3]));
    if (p.scales && !(threadIdx.x & 1)) p.scales[to / 2] = static_cast<uint8_t>(byte);
    if (!p.bits) continue;
    if (p.whole_codes) reinterpret_cast<uint32_t*>(p.bits)[to] = codes;
    else p.bits[to] = static_cast<uint8_t>(mantissa_byte(codes));
  }
}

}  // namespace trace_jax
