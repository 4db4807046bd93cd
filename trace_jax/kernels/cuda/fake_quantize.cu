// BF16 rows to the BF16 values that NVFP4 makes of them, with a power-of-two outer scale a row,
// and what guides the trainer: mantissa bits or codes, and block scales. WARPS warps a row (a
// decode step has few rows, and their latency counts), in units of 8 values a lane; a block is
// two neighbouring lanes.
#include <cuda_bf16.h>

#include "nvfp4.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

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

template <int WARPS, int UNITS>
__global__ void __launch_bounds__(128) fake_quantize(const FakeArgs p) {
  constexpr int kLanes = 32 * WARPS, kRows = 4 / WARPS;
  __shared__ uint32_t most[4];
  int lane = threadIdx.x % kLanes, row = blockIdx.x * kRows + threadIdx.x / kLanes;
  int units = p.width / 8;
  if (row >= p.rows) return;  // whole warps, and with WARPS 4 the whole block
  uint4 x[UNITS];
  uint32_t row_amax = 0, amax[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = lane + kLanes * i;
    x[i] = u < units ? p.x[(size_t)row * units + u] : make_uint4(0, 0, 0, 0);
  }
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
    int u = lane + kLanes * i;
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
    size_t at = (size_t)row * units + u;
    p.value[at] = make_uint4(words[0], words[1], words[2], words[3]);
    if (p.scales && !(threadIdx.x & 1)) p.scales[at / 2] = static_cast<uint8_t>(byte);
    if (!p.bits) continue;
    if (p.whole_codes) reinterpret_cast<uint32_t*>(p.bits)[at] = codes;
    else p.bits[at] = static_cast<uint8_t>(mantissa_byte(codes));
  }
}

cudaError_t launch_fake(const FakeArgs& p, cudaStream_t stream) {
  int grid = (p.rows + 3) / 4;
  if (p.width <= 256) fake_quantize<1, 1><<<grid, 128, 0, stream>>>(p);
  else if (p.width <= 512) fake_quantize<1, 2><<<grid, 128, 0, stream>>>(p);
  else if (p.width <= 768) fake_quantize<1, 3><<<grid, 128, 0, stream>>>(p);
  else if (p.width <= 1024) fake_quantize<4, 1><<<p.rows, 128, 0, stream>>>(p);
  else if (p.width <= 2048) fake_quantize<4, 2><<<p.rows, 128, 0, stream>>>(p);
  else if (p.width <= 4096) fake_quantize<4, 4><<<p.rows, 128, 0, stream>>>(p);
  else return cudaErrorInvalidValue;
  return cudaGetLastError();
}

}  // namespace trace_jax

using Bytes = ffi::Buffer<ffi::U8>;
using Rows = ffi::Buffer<ffi::BF16>;

static ffi::Error FakeQuantize(cudaStream_t stream, Rows x, ffi::Result<Rows> value,
                               ffi::Result<Bytes> bits, ffi::Result<Bytes> scales) {
  using namespace trace_jax;
  FakeArgs p{};
  p.x = reinterpret_cast<const uint4*>(x.typed_data());
  p.value = reinterpret_cast<uint4*>(value->typed_data());
  p.bits = bits->element_count() ? bits->typed_data() : nullptr;
  p.scales = scales->element_count() ? scales->typed_data() : nullptr;
  p.width = static_cast<int>(x.dimensions().back());
  p.rows = static_cast<int>(x.element_count() / p.width);
  p.whole_codes = bits->dimensions().back() == p.width / 2;
  cudaError_t error = launch_fake(p, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_fake_quantize, FakeQuantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Rows>()
                                  .Ret<Rows>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>(),
                              {ffi::Traits::kCmdBufferCompatible});
