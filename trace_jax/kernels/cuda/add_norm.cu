// A residual stream, its RMS norm, and the BF16 values that NVFP4 makes of the normed rows, with
// what guides the trainer (fake_quantize.cu): what stands between attention and the experts of a
// decode step, and with the weighted sum of experts' rows between those and the next attention, in
// one launch. A block a row, in units of 8 values a thread.
#include "fake_quantize.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

constexpr int kNormThreads = 128;

struct AddNormArgs {
  const uint4* x;       // [rows][width] bf16
  const void* y;        // [rows][width] bf16 or fp32, or with gates [rows][several][width] fp32
  const float* gates;   // [rows][several] or null
  const float* weight;  // [width]
  uint4 *sum, *normed;  // [rows][width] bf16
  FakeArgs fake;        // `value` is null: not quantized
  float eps;
  int several;
};

enum Addend { kRounded = 0, kExact = 1, kWeighted = 2 };

__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t&>(pair);
}

// Unit u of a row's addend, rounded to BF16. Rows are added up in their order.
template <int ADDEND>
__device__ __forceinline__ uint4 addend(const AddNormArgs& p, int row, int u) {
  int units = p.fake.width / 8;
  if constexpr (ADDEND == kRounded) {
    return static_cast<const uint4*>(p.y)[(size_t)row * units + u];
  } else {
    auto from = static_cast<const float4*>(p.y);
    float4 a, b;
    if constexpr (ADDEND == kExact) {
      from += ((size_t)row * units + u) * 2;
      a = from[0], b = from[1];
    } else {
      a = b = make_float4(0, 0, 0, 0);
      from += ((size_t)row * p.several * units + u) * 2;
#pragma unroll 8
      for (int k = 0; k < p.several; k++) {
        float g = p.gates[row * p.several + k];
        float4 c = from[(size_t)k * units * 2], d = from[(size_t)k * units * 2 + 1];
        a = make_float4(fmaf(g, c.x, a.x), fmaf(g, c.y, a.y), fmaf(g, c.z, a.z), fmaf(g, c.w, a.w));
        b = make_float4(fmaf(g, d.x, b.x), fmaf(g, d.y, b.y), fmaf(g, d.z, b.z), fmaf(g, d.w, b.w));
      }
    }
    return make_uint4(round_pair(a.x, a.y), round_pair(a.z, a.w), round_pair(b.x, b.y),
                      round_pair(b.z, b.w));
  }
}

// x + y of two bf16x2, each rounded to BF16; their squares are added to `squares`.
__device__ __forceinline__ uint32_t add_pair(uint32_t x, uint32_t y, float& squares) {
  __nv_bfloat162 a = reinterpret_cast<__nv_bfloat162&>(x), b = reinterpret_cast<__nv_bfloat162&>(y);
  __nv_bfloat162 sum = __floats2bfloat162_rn(__low2float(a) + __low2float(b),
                                             __high2float(a) + __high2float(b));
  float low = __low2float(sum), high = __high2float(sum);
  squares += low * low + high * high;
  return reinterpret_cast<uint32_t&>(sum);
}

__device__ __forceinline__ uint32_t scale_pair_by(uint32_t x, float scale, float low, float high) {
  __nv_bfloat162 a = reinterpret_cast<__nv_bfloat162&>(x);
  __nv_bfloat162 y =
      __floats2bfloat162_rn(__low2float(a) * scale * low, __high2float(a) * scale * high);
  return reinterpret_cast<uint32_t&>(y);
}

template <int UNITS, int ADDEND>
__global__ void __launch_bounds__(kNormThreads) add_norm(const AddNormArgs p) {
  __shared__ float sums[kNormThreads / 32];
  int units = p.fake.width / 8, row = blockIdx.x, warp = threadIdx.x / 32;
  size_t base = (size_t)row * units;
  uint4 v[UNITS];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = threadIdx.x + kNormThreads * i;
    v[i] = make_uint4(0, 0, 0, 0);
    if (u >= units) continue;
    uint4 a = p.x[base + u], b = addend<ADDEND>(p, row, u);
    v[i] = make_uint4(add_pair(a.x, b.x, squares), add_pair(a.y, b.y, squares),
                      add_pair(a.z, b.z, squares), add_pair(a.w, b.w, squares));
    p.sum[base + u] = v[i];
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
  if (threadIdx.x % 32 == 0) sums[warp] = squares;
  __syncthreads();
  float total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float scale = rsqrtf(total / p.fake.width + p.eps);
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = threadIdx.x + kNormThreads * i;
    if (u >= units) continue;
    const float4* at = reinterpret_cast<const float4*>(p.weight) + 2 * u;
    float4 w = at[0], z = at[1];
    v[i].x = scale_pair_by(v[i].x, scale, w.x, w.y);
    v[i].y = scale_pair_by(v[i].y, scale, w.z, w.w);
    v[i].z = scale_pair_by(v[i].z, scale, z.x, z.y);
    v[i].w = scale_pair_by(v[i].w, scale, z.z, z.w);
    p.normed[base + u] = v[i];
  }
  if (p.fake.value)
    quantize_row<4, UNITS>(p.fake, row, threadIdx.x, v,
                           [&](int u, const uint4& q) { p.fake.value[base + u] = q; });
}

template <int ADDEND>
cudaError_t launch_add_norm(const AddNormArgs& p, cudaStream_t stream) {
  int units = (p.fake.width + 8 * kNormThreads - 1) / (8 * kNormThreads);
  if (units > 8) return cudaErrorInvalidValue;
  auto kernel = units <= 1   ? add_norm<1, ADDEND>
                : units <= 2 ? add_norm<2, ADDEND>
                : units <= 4 ? add_norm<4, ADDEND>
                             : add_norm<8, ADDEND>;
  kernel<<<p.fake.rows, kNormThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace trace_jax

using Bytes = ffi::Buffer<ffi::U8>;
using Rows = ffi::Buffer<ffi::BF16>;

static ffi::Error AddNorm(cudaStream_t stream, Rows x, ffi::AnyBuffer y,
                          ffi::Buffer<ffi::F32> gates, ffi::Buffer<ffi::F32> weight,
                          ffi::Result<Rows> sum, ffi::Result<Rows> normed, ffi::Result<Rows> value,
                          ffi::Result<Bytes> bits, ffi::Result<Bytes> scales, float eps) {
  using namespace trace_jax;
  AddNormArgs p{};
  p.x = reinterpret_cast<const uint4*>(x.typed_data());
  p.y = y.untyped_data();
  p.gates = gates.typed_data();
  p.several = gates.element_count() ? static_cast<int>(gates.dimensions().back()) : 0;
  p.weight = weight.typed_data();
  p.sum = reinterpret_cast<uint4*>(sum->typed_data());
  p.normed = reinterpret_cast<uint4*>(normed->typed_data());
  p.fake.value =
      value->element_count() ? reinterpret_cast<uint4*>(value->typed_data()) : nullptr;
  p.fake.bits = bits->element_count() ? bits->typed_data() : nullptr;
  p.fake.scales = scales->element_count() ? scales->typed_data() : nullptr;
  p.fake.width = static_cast<int>(x.dimensions().back());
  p.fake.rows = static_cast<int>(x.element_count() / p.fake.width);
  p.fake.whole_codes = bits->dimensions().back() == p.fake.width / 2;
  p.eps = eps;
  bool exact = y.element_type() == ffi::DataType::F32;
  if (p.several && !exact) return ffi::Error::InvalidArgument("add_norm: weighted rows are FP32");
  auto launch = p.several ? launch_add_norm<kWeighted>
                : exact   ? launch_add_norm<kExact>
                          : launch_add_norm<kRounded>;
  cudaError_t error = launch(p, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_add_norm, AddNorm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Rows>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<Rows>()
                                  .Ret<Rows>()
                                  .Ret<Rows>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
