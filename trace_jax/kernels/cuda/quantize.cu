// BF16 rows to NVFP4 in one pass: codes, block scales, a power-of-two outer scale a row, and,
// if asked, the mantissa bits that guide the trainer. One warp a row; the row stays in registers.
//
// Bit for bit the codec's result: an element is compared with the exact products of its block's
// scale and the midpoints between codes (at most 7 significant bits, so exact in BF16), which
// is the same as rounding the quotient, since values have only 8 bits themselves.
#include "common.cuh"
#include "nvfp4.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

struct Args {
  const uint4* x;       // [rows][width] bf16
  uint2* packed;        // [rows][width / 2]
  uint8_t* scale;       // [rows][width / 16]
  float* outer;         // [rows]
  uint16_t* bits;       // [rows][width / 16] or null
  int rows, width;
};

__device__ __forceinline__ uint32_t max_abs(uint32_t a, uint32_t b) {
  uint32_t d;  // magnitudes of both halves; NaN wins
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
  return d;
}

__device__ __forceinline__ uint32_t at_least(uint32_t a, uint32_t b) {  // 1.0 or 0.0 a half
  uint32_t d;
  asm("set.ge.bf16x2.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t above(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("set.gt.bf16x2.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ uint32_t twice(float v) {  // a value that is exact in bf16
  uint32_t bits = __float_as_uint(v) >> 16;
  return bits | bits << 16;
}

// Magnitude codes of two values as two small integers: 128 + code in bf16, bits 0x4300 + code.
// The midpoints' ties go to the even code.
__device__ __forceinline__ uint32_t codes_of(uint32_t pair, const uint32_t* middle) {
  uint32_t m = pair & 0x7FFF7FFFu, sum = 0x43004300u;
  sum = add_bf16x2(sum, above(m, middle[0]));
  sum = add_bf16x2(sum, at_least(m, middle[1]));
  sum = add_bf16x2(sum, above(m, middle[2]));
  sum = add_bf16x2(sum, at_least(m, middle[3]));
  sum = add_bf16x2(sum, above(m, middle[4]));
  sum = add_bf16x2(sum, at_least(m, middle[5]));
  sum = add_bf16x2(sum, above(m, middle[6]));
  return (sum & 0x00070007u) | ((pair >> 12) & 0x00080008u);
}

// BLOCKS: 16-element blocks a lane; lane l has blocks l, l + 32, ...
template <int BLOCKS>
__global__ void __launch_bounds__(256) quantize(const Args p) {
  int lane = threadIdx.x & 31, row = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  int blocks = p.width / 16;
  uint32_t x[BLOCKS][8];
  uint32_t row_amax = 0, amax[BLOCKS];
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
    int b = lane + 32 * i;
    amax[i] = 0;
    if (b >= blocks) continue;
    const uint4* from = p.x + ((size_t)row * blocks + b) * 2;
    uint4 u = __ldcs(from), v = __ldcs(from + 1);
    x[i][0] = u.x; x[i][1] = u.y; x[i][2] = u.z; x[i][3] = u.w;
    x[i][4] = v.x; x[i][5] = v.y; x[i][6] = v.z; x[i][7] = v.w;
  }
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
    if (lane + 32 * i >= blocks) continue;
#pragma unroll
    for (int j = 0; j < 8; j++) amax[i] = max_abs(amax[i], x[i][j]);
    amax[i] = max_abs(amax[i], amax[i] >> 16);
    row_amax = max_abs(row_amax, amax[i]);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) row_amax = max_abs(row_amax, __shfl_xor_sync(~0u, row_amax, d));
  float outer = outer_scale(__uint_as_float(row_amax << 16));
  if (lane == 0) p.outer[row] = outer;
#pragma unroll
  for (int i = 0; i < BLOCKS; i++) {
    int b = lane + 32 * i;
    if (b >= blocks) continue;
    float value;
    uint32_t byte = block_scale(__uint_as_float(amax[i] << 16), outer, value);
    float unit = value * outer;
    const uint32_t middle[7] = {twice(unit * 0.25f), twice(unit * 0.75f), twice(unit * 1.25f),
                                twice(unit * 1.75f), twice(unit * 2.5f),  twice(unit * 3.5f),
                                twice(unit * 5.0f)};
    uint32_t word[2], bits = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      word[h] = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t c = codes_of(x[i][h * 4 + j], middle);
        word[h] |= ((c & 15) | (c >> 12)) << (8 * j);
      }
      bits |= mantissa_byte(word[h]) << (8 * h);
    }
    size_t at = (size_t)row * blocks + b;
    p.packed[at] = make_uint2(word[0], word[1]);
    p.scale[at] = static_cast<uint8_t>(byte);
    if (p.bits) p.bits[at] = static_cast<uint16_t>(bits);
  }
}

cudaError_t launch(const Args& p, cudaStream_t stream) {
  int grid = (p.rows + 7) / 8;
  if (p.width <= 512) quantize<1><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 1024) quantize<2><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 2048) quantize<4><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 4096) quantize<8><<<grid, 256, 0, stream>>>(p);
  else return cudaErrorInvalidValue;
  return cudaGetLastError();
}

}  // namespace trace_jax

static ffi::Error Quantize(cudaStream_t stream, ffi::Buffer<ffi::BF16> x,
                           ffi::Result<ffi::Buffer<ffi::U8>> packed,
                           ffi::Result<ffi::Buffer<ffi::U8>> scale,
                           ffi::Result<ffi::Buffer<ffi::F32>> outer,
                           ffi::Result<ffi::Buffer<ffi::U8>> bits) {
  using namespace trace_jax;
  Args p{};
  p.x = reinterpret_cast<const uint4*>(x.typed_data());
  p.packed = reinterpret_cast<uint2*>(packed->typed_data());
  p.scale = scale->typed_data();
  p.outer = outer->typed_data();
  p.bits = bits->element_count() ? reinterpret_cast<uint16_t*>(bits->typed_data()) : nullptr;
  p.width = static_cast<int>(x.dimensions().back());
  p.rows = static_cast<int>(x.element_count() / p.width);
  cudaError_t error = launch(p, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_quantize, Quantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>(),
                              {ffi::Traits::kCmdBufferCompatible});
