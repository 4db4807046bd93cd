// Queries, keys and values from their FP32 projection, in one launch; see norm_rotary.cuh.
#include "norm_rotary.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

// q, k, v: [tokens][heads or kv heads][D].
template <int D>
__global__ void __launch_bounds__(128)
    norm_rotary(const HeadsArgs p, __nv_bfloat16* q, __nv_bfloat16* k, __nv_bfloat16* v) {
  constexpr int N = D / 64;
  int lane = threadIdx.x & 31, row = blockIdx.x * 4 + (threadIdx.x >> 5);
  HeadAt at(p, row);
  if (at.token >= p.tokens) return;
  __nv_bfloat16* to = at.is_q ? q + (size_t)(at.token * p.heads + at.head) * D
                              : (at.is_v ? v : k) + (size_t)(at.token * p.kv_heads + at.kv_head) * D;
  __nv_bfloat16 a[N], b[N];
  if (at.is_v) {
    const float* from = p.projected + (size_t)row * D + lane;
#pragma unroll
    for (int j = 0; j < N; j++) {
      a[j] = __float2bfloat16_rn(from[32 * j]);
      b[j] = __float2bfloat16_rn(from[32 * j + D / 2]);
    }
  } else {
    turned_head<D>(p, at, row, lane, a, b);
  }
#pragma unroll
  for (int j = 0; j < N; j++) {
    to[lane + 32 * j] = a[j];
    to[lane + 32 * j + D / 2] = b[j];
  }
}

}  // namespace trace_jax

using Rows = ffi::Buffer<ffi::BF16>;
using Floats = ffi::Buffer<ffi::F32>;

static ffi::Error NormRotary(cudaStream_t stream, Floats projected, Floats q_weight,
                             Floats k_weight, Floats cos, Floats sin, ffi::Result<Rows> q_out,
                             ffi::Result<Rows> k_out, ffi::Result<Rows> v_out, float eps) {
  using namespace trace_jax;
  auto bf16 = [](auto& b) { return reinterpret_cast<__nv_bfloat16*>(b->untyped_data()); };
  __nv_bfloat16 *q = bf16(q_out), *k = bf16(k_out), *v = bf16(v_out);
  int d = static_cast<int>(q_out->dimensions().back());
  HeadsArgs p{};
  p.projected = projected.typed_data();
  p.q_weight = q_weight.element_count() ? q_weight.typed_data() : nullptr;
  p.k_weight = k_weight.element_count() ? k_weight.typed_data() : nullptr;
  p.cos = cos.typed_data();
  p.sin = sin.typed_data();
  p.tokens = static_cast<int>(q_out->dimensions()[0]);
  p.heads = static_cast<int>(q_out->dimensions()[1]);
  p.kv_heads = static_cast<int>(k_out->dimensions()[1]);
  p.eps = eps;
  int grid = (p.tokens * (p.heads + 2 * p.kv_heads) + 3) / 4;
  if (d == 64) norm_rotary<64><<<grid, 128, 0, stream>>>(p, q, k, v);
  else if (d == 128) norm_rotary<128><<<grid, 128, 0, stream>>>(p, q, k, v);
  else if (d == 256) norm_rotary<256><<<grid, 128, 0, stream>>>(p, q, k, v);
  else return ffi::Error::InvalidArgument("norm_rotary: head size");
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_norm_rotary, NormRotary,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Rows>()
                                  .Ret<Rows>()
                                  .Ret<Rows>()
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
