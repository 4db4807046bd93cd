// What a decode step does between the projection of a token and its attention: queries normed and
// turned, keys as well, keys and values into their pages. A warp a head.
#pragma once
#include "common.cuh"
#include "kv_append.cuh"
#include "norm_rotary.cuh"

namespace trace_jax {

struct TokenRows {
  HeadsArgs heads;
  AppendArgs append;
  __nv_bfloat16* q;  // [tokens][heads][D]
  int* cleared;      // [words]: set to zero
  int words;
};

template <int KIND, int D>
__global__ void __launch_bounds__(128) token_rows(const __grid_constant__ TokenRows p) {
  constexpr int N = D / 64;
  __shared__ __align__(8) __nv_bfloat16 turned[4][D];
  grid_release();
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x * 4 + warp;
  for (int w = row * 32 + lane; w < p.words; w += gridDim.x * 128) p.cleared[w] = 0;
  HeadAt at(p.heads, row);
  if (at.token >= p.heads.tokens) return;
  int kv_row = at.token * p.heads.kv_heads + at.kv_head;
  uint16_t x[2 * N];
  if (at.is_v) {
    const float2* from = reinterpret_cast<const float2*>(p.heads.projected + (size_t)row * D) + lane * N;
#pragma unroll
    for (int i = 0; i < N; i++) {
      float2 pair = from[i];
      x[2 * i] = __bfloat16_as_ushort(__float2bfloat16_rn(pair.x));
      x[2 * i + 1] = __bfloat16_as_ushort(__float2bfloat16_rn(pair.y));
    }
    append_row<KIND, D>(p.append, 1, kv_row, lane, x);
    return;
  }
  __nv_bfloat16 a[N], b[N];
  turned_head<D>(p.heads, at, row, lane, a, b);
  __nv_bfloat16* to = at.is_q ? p.q + (size_t)(at.token * p.heads.heads + at.head) * D : turned[warp];
#pragma unroll
  for (int j = 0; j < N; j++) {
    to[lane + 32 * j] = a[j];
    to[lane + 32 * j + D / 2] = b[j];
  }
  if (at.is_q) return;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 2 * N; i++) x[i] = __bfloat16_as_ushort(turned[warp][lane * 2 * N + i]);
  append_row<KIND, D>(p.append, 0, kv_row, lane, x);
}

}  // namespace trace_jax
