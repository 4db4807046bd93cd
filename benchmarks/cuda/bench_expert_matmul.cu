// Timing of the routed products without JAX's dispatch; see benchmarks/kernels.py.
#include "../../trace_jax/kernels/cuda/expert_matmul.cu"
#include "timing.cuh"

extern "C" float bench_expert_matmul(int variant, const void** weight, int n, const void* outer,
                                     const void* x, const void* slot, const void* offset,
                                     void* out, void* packed, void* info, int experts, int tiles,
                                     int k, int rows, int top_k, int epilogue, int reps) {
  trace_jax::Args a{};
  a.weight_outer = static_cast<const float2*>(outer);
  a.x = static_cast<const __nv_bfloat16*>(x);
  a.slot = static_cast<const int*>(slot);
  a.offset = static_cast<const int*>(offset);
  a.out = out;
  a.packed = static_cast<uint8_t*>(packed);
  a.info = static_cast<int2*>(info);
  a.experts = experts;
  a.tiles = tiles;
  a.chunks = (k + 63) / 64;
  a.k = k;
  a.rows = rows;
  a.top_k = top_k;
  a.epilogue = epilogue;
  return median_us(n, reps, [&](int i, cudaStream_t stream) {
    a.weight = static_cast<const uint8_t*>(weight[i]);
    return kVariants[variant].launch(a, stream);
  });
}
