// BF16 rows to NVFP4 in one pass: codes, block scales, a power-of-two outer scale a row, and,
// if asked, the mantissa bits that guide the trainer. One warp a row; the row stays in registers,
// in units of 8 values a lane, so that a warp's loads are contiguous.
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
  const uint4* x;    // [rows][width] bf16
  uint32_t* packed;  // [rows][width / 2]
  uint8_t* scale;    // [rows][width / 16]
  float* outer;      // [rows]
  uint8_t* bits;     // [rows][width / 8] or null
  int rows, width;
};

// The integer pipe is what limits this kernel, so what can be is arithmetic on pairs of BF16.
__device__ __forceinline__ uint32_t abs_bf16x2(uint32_t a) {
  uint32_t d;
  asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

__device__ __forceinline__ uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;  // NaN wins
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
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

__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Multiples of a block's unit in both halves of a word; all that is done with them is exact.
struct Unit {
  uint32_t quarter, three_quarters, one, seven_quarters, two_and_half, eleven_quarters;
  __device__ __forceinline__ explicit Unit(float unit) {
    one = __byte_perm(__float_as_uint(unit), 0, 0x3232);
    quarter = mul_bf16x2(one, 0x3E803E80u);
    three_quarters = mul_bf16x2(one, 0x3F403F40u);
    seven_quarters = mul_bf16x2(one, 0x3FE03FE0u);
    two_and_half = mul_bf16x2(one, 0x40204020u);
    eleven_quarters = mul_bf16x2(one, 0x40304030u);
  }
};

__host__ __device__ constexpr uint32_t power_of_two(int k) {  // both halves
  return (0x3F80u + (k << 7)) * 0x00010001u;
}

// sum + 2^SHIFT x magnitude codes of two values. Three steps of a search over the midpoints 0.25,
// 0.75, 1.25, 1.75, 2.5, 3.5 and 5 units; the comparisons send ties to the even code.
template <int SHIFT>
__device__ __forceinline__ uint32_t add_codes(uint32_t sum, uint32_t pair, const Unit& u) {
  uint32_t m = abs_bf16x2(pair);
  uint32_t b2 = at_least(m, u.seven_quarters);
  uint32_t b1 = at_least(m, fma_bf16x2(b2, u.eleven_quarters, u.three_quarters));
  uint32_t low = fma_bf16x2(b1, u.one, u.quarter);
  uint32_t high = fma_bf16x2(b1, u.two_and_half, u.two_and_half);
  uint32_t b0 = above(m, fma_bf16x2(b2, fma_bf16x2(low, 0xBF80BF80u, high), low));
  sum = fma_bf16x2(b2, power_of_two(SHIFT + 2), sum);
  sum = fma_bf16x2(b1, power_of_two(SHIFT + 1), sum);
  return fma_bf16x2(b0, power_of_two(SHIFT), sum);
}

// Codes of four values in the low bytes of the halves: (0, 2) and (1, 3), low nibble first.
__device__ __forceinline__ uint32_t four_codes(uint32_t first, uint32_t second, const Unit& u) {
  uint32_t sum = power_of_two(7);  // 128: integers up to 255 in the low bits of a BF16
  sum = add_codes<4>(add_codes<0>(sum, first, u), second, u);
  return sum | (first >> 12 & 0x00080008u) | (second >> 8 & 0x00800080u);
}

__device__ __forceinline__ uint32_t eight_codes(const uint4& x, const Unit& u) {
  uint32_t v = __byte_perm(four_codes(x.x, x.y, u), four_codes(x.z, x.w, u), 0x6420);
  uint32_t t = (v ^ (v >> 4)) & 0x00F000F0u;  // nibbles 1 and 2 of each half change places
  return v ^ t ^ (t << 4);
}

// UNITS: 8-value units a lane; lane l has units l, l + 32, ...
template <int UNITS>
__global__ void __launch_bounds__(256) quantize(const Args p) {
  int lane = threadIdx.x & 31, row = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  int units = p.width / 8;
  uint4 x[UNITS];
  uint32_t row_amax = 0, amax[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = lane + 32 * i;
    x[i] = u < units ? __ldcs(p.x + (size_t)row * units + u) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    uint32_t a = max_bf16x2(abs_bf16x2(x[i].x), abs_bf16x2(x[i].y));
    uint32_t b = max_bf16x2(abs_bf16x2(x[i].z), abs_bf16x2(x[i].w));
    a = max_bf16x2(a, b);
    amax[i] = max_bf16x2(a, __shfl_xor_sync(~0u, a, 1));  // the other half of the block
    row_amax = max_bf16x2(row_amax, amax[i]);
  }
  row_amax = max_bf16x2(row_amax, row_amax >> 16);
#pragma unroll
  for (int d = 16; d > 1; d >>= 1)
    row_amax = max_bf16x2(row_amax, __shfl_xor_sync(~0u, row_amax, d));
  float outer = outer_scale(__uint_as_float(row_amax << 16));
  if (lane == 0) p.outer[row] = outer;
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = lane + 32 * i;
    if (u >= units) continue;
    float value;
    uint32_t top = max_bf16x2(amax[i], amax[i] >> 16);
    uint32_t byte = block_scale(__uint_as_float(top << 16), outer, value);
    uint32_t codes = eight_codes(x[i], Unit(value * outer));
    size_t at = (size_t)row * units + u;
    p.packed[at] = codes;
    if (!(lane & 1)) p.scale[at / 2] = static_cast<uint8_t>(byte);
    if (p.bits) p.bits[at] = static_cast<uint8_t>(mantissa_byte(codes));
  }
}

cudaError_t launch(const Args& p, cudaStream_t stream) {
  int grid = (p.rows + 7) / 8;
  if (p.width <= 256) quantize<1><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 512) quantize<2><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 768) quantize<3><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 1024) quantize<4><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 2048) quantize<8><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 3072) quantize<12><<<grid, 256, 0, stream>>>(p);
  else if (p.width <= 4096) quantize<16><<<grid, 256, 0, stream>>>(p);
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
  p.packed = reinterpret_cast<uint32_t*>(packed->typed_data());
  p.scale = scale->typed_data();
  p.outer = outer->typed_data();
  p.bits = bits->element_count() ? bits->typed_data() : nullptr;
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
