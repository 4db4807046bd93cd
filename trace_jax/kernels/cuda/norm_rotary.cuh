// A head of a token from its FP32 projection: RMS norm, then rotation. One warp a head.
#pragma once
#include <cuda_bf16.h>

namespace trace_jax {

struct HeadsArgs {
  const float* projected;            // [tokens][heads + 2 kv heads][D]
  const float *q_weight, *k_weight;  // [D], or null: no norm
  const float *cos, *sin;            // [tokens][D / 2]
  int tokens, heads, kv_heads;
  float eps;
};

// Where a warp's row of all tokens' heads stands: a query, or a key or value of a KV head.
struct HeadAt {
  int token, head, kv_head;
  bool is_q, is_v;
  __device__ __forceinline__ HeadAt(const HeadsArgs& p, int row) {
    int all = p.heads + 2 * p.kv_heads;
    token = row / all, head = row % all;
    is_q = head < p.heads, is_v = head >= p.heads + p.kv_heads;
    kv_head = head - p.heads - (is_v ? p.kv_heads : 0);
  }
};

__device__ __forceinline__ float to_bf16_value(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}

// A query or key, normed and turned: BF16 values of dimensions lane + 32 j in a, and D / 2 further
// in b.
template <int D>
__device__ __forceinline__ void turned_head(const HeadsArgs& p, const HeadAt& at, int row, int lane,
                                            __nv_bfloat16* a, __nv_bfloat16* b) {
  constexpr int N = D / 64;
  const float* from = p.projected + (size_t)row * D;
  const float* weight = at.is_q ? p.q_weight : p.k_weight;
  float x[N], y[N], squares = 0;
#pragma unroll
  for (int j = 0; j < N; j++) {
    x[j] = to_bf16_value(from[lane + 32 * j]);
    y[j] = to_bf16_value(from[lane + 32 * j + D / 2]);
    squares += x[j] * x[j] + y[j] * y[j];
  }
  if (weight) {
    for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
    float r = rsqrtf(squares * (1.0f / D) + p.eps);
#pragma unroll
    for (int j = 0; j < N; j++) {
      int i = lane + 32 * j;
      x[j] = to_bf16_value(x[j] * r * weight[i]);
      y[j] = to_bf16_value(y[j] * r * weight[i + D / 2]);
    }
  }
#pragma unroll
  for (int j = 0; j < N; j++) {
    size_t i = (size_t)at.token * (D / 2) + lane + 32 * j;
    float c = p.cos[i], s = p.sin[i];
    a[j] = __float2bfloat16_rn(x[j] * c - y[j] * s);
    b[j] = __float2bfloat16_rn(y[j] * c + x[j] * s);
  }
}

}  // namespace trace_jax
