// Queries, keys and values from their FP32 projection: RMS norm of each head of queries and keys,
// then their rotation. One warp a head of a token.
#include <cuda_bf16.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

struct RotaryArgs {
  const float* projected;            // [tokens][heads + 2 kv heads][D]
  const float *q_weight, *k_weight;  // [D], or null: no norm
  const float *cos, *sin;            // [tokens][D / 2]
  __nv_bfloat16 *q, *k, *v;          // [tokens][heads or kv heads][D]
  int tokens, heads, kv_heads;
  float eps;
};

template <int D>
__global__ void __launch_bounds__(128) norm_rotary(const RotaryArgs p) {
  constexpr int N = D / 64;  // pairs (i, i + D / 2) a lane
  int lane = threadIdx.x & 31, row = blockIdx.x * 4 + (threadIdx.x >> 5);
  int all = p.heads + 2 * p.kv_heads, token = row / all, head = row % all;
  if (token >= p.tokens) return;
  bool is_q = head < p.heads, is_v = head >= p.heads + p.kv_heads;
  const float* from = p.projected + (size_t)row * D;
  int kv_head = head - p.heads - (is_v ? p.kv_heads : 0);
  __nv_bfloat16* to = is_q ? p.q + (size_t)(token * p.heads + head) * D
                           : (is_v ? p.v : p.k) + (size_t)(token * p.kv_heads + kv_head) * D;
  const float* weight = is_q ? p.q_weight : is_v ? nullptr : p.k_weight;
  float a[N], b[N], squares = 0;
#pragma unroll
  for (int j = 0; j < N; j++) {
    a[j] = __bfloat162float(__float2bfloat16_rn(from[lane + 32 * j]));
    b[j] = __bfloat162float(__float2bfloat16_rn(from[lane + 32 * j + D / 2]));
    squares += a[j] * a[j] + b[j] * b[j];
  }
  if (weight) {
    for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
    float r = rsqrtf(squares * (1.0f / D) + p.eps);
#pragma unroll
    for (int j = 0; j < N; j++) {
      int i = lane + 32 * j;
      a[j] = __bfloat162float(__float2bfloat16_rn(a[j] * r * weight[i]));
      b[j] = __bfloat162float(__float2bfloat16_rn(b[j] * r * weight[i + D / 2]));
    }
  }
#pragma unroll
  for (int j = 0; j < N; j++) {
    int i = lane + 32 * j;
    float c = is_v ? 1.0f : p.cos[(size_t)token * (D / 2) + i];
    float s = is_v ? 0.0f : p.sin[(size_t)token * (D / 2) + i];
    to[i] = __float2bfloat16_rn(a[j] * c - b[j] * s);
    to[i + D / 2] = __float2bfloat16_rn(b[j] * c + a[j] * s);
  }
}

}  // namespace trace_jax

using Rows = ffi::Buffer<ffi::BF16>;
using Floats = ffi::Buffer<ffi::F32>;

static ffi::Error NormRotary(cudaStream_t stream, Floats projected, Floats q_weight,
                             Floats k_weight, Floats cos, Floats sin, ffi::Result<Rows> q,
                             ffi::Result<Rows> k, ffi::Result<Rows> v, float eps) {
  using namespace trace_jax;
  auto bf16 = [](auto& b) { return reinterpret_cast<__nv_bfloat16*>(b->untyped_data()); };
  int d = static_cast<int>(q->dimensions().back());
  RotaryArgs p{};
  p.projected = projected.typed_data();
  p.q_weight = q_weight.element_count() ? q_weight.typed_data() : nullptr;
  p.k_weight = k_weight.element_count() ? k_weight.typed_data() : nullptr;
  p.cos = cos.typed_data();
  p.sin = sin.typed_data();
  p.q = bf16(q);
  p.k = bf16(k);
  p.v = bf16(v);
  p.tokens = static_cast<int>(q->dimensions()[0]);
  p.heads = static_cast<int>(q->dimensions()[1]);
  p.kv_heads = static_cast<int>(k->dimensions()[1]);
  p.eps = eps;
  int grid = (p.tokens * (p.heads + 2 * p.kv_heads) + 3) / 4;
  if (d == 64) norm_rotary<64><<<grid, 128, 0, stream>>>(p);
  else if (d == 128) norm_rotary<128><<<grid, 128, 0, stream>>>(p);
  else if (d == 256) norm_rotary<256><<<grid, 128, 0, stream>>>(p);
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
