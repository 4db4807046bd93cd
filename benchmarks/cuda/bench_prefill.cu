// Timing of the products of many rows without JAX's dispatch; see benchmarks/kernels_prefill.py.
#include "../../trace_jax/kernels/cuda/prefill.cu"
#include "timing.cuh"

// `parts`: 1 unpacks weights alone, 2 multiplies what scratch[i] holds of weight[i], 3 does both in
// groups of experts.
extern "C" float bench_prefill(const void** weight, void** scratch, int n, int parts,
                               const void* outer, const void* x, const void* slot,
                               const void* offset, void* out, int experts, int group, int tiles,
                               int k, int top_k, int epilogue, int reps) {
  trace_jax::PrefillArgs a{};
  a.weight_outer = static_cast<const float2*>(outer);
  a.x = static_cast<const __nv_bfloat16*>(x);
  a.slot = static_cast<const int*>(slot);
  a.offset = static_cast<const int*>(offset);
  a.out = out;
  a.experts = experts;
  a.tiles = tiles;
  a.chunks = (k + 63) / 64;
  a.k = k;
  a.top_k = top_k;
  a.epilogue = epilogue;
  a.fp4 = true;
  return median_us(n, reps, [&](int i, cudaStream_t stream) {
    a.weight = static_cast<const uint8_t*>(weight[i]);
    a.scratch = static_cast<uint8_t*>(scratch[i]);
    if (parts == 1) return trace_jax::launch_unpack(a, stream);
    if (parts == 3) return trace_jax::launch_prefill(a, experts, group, stream);
    return trace_jax::launch_product(a, stream);
  });
}
