// Timing of paged decode attention without JAX's dispatch; see benchmarks/kernels.py.
#include "../../trace_jax/kernels/cuda/paged_attention.cu"
#include "timing.cuh"

extern "C" float bench_paged_attention(int variant, const void** pages, int n, const void* table,
                                       const void* lengths, const void* query, void* out,
                                       void* partial, void* partial_ml, void* arrived, int batch,
                                       int kv_heads, int group, int max_pages, int warps, int split,
                                       int splits, float scale, int reps) {
  trace_jax::Args a{};
  a.table = static_cast<const int*>(table);
  a.lengths = static_cast<const int*>(lengths);
  a.query = static_cast<const __nv_bfloat16*>(query);
  a.partial = static_cast<float*>(partial);
  a.partial_ml = static_cast<float2*>(partial_ml);
  a.arrived = static_cast<int*>(arrived);
  a.out = static_cast<__nv_bfloat16*>(out);
  a.batch = batch;
  a.kv_heads = kv_heads;
  a.group = group;
  a.max_pages = max_pages;
  a.warps = warps;
  a.split = split;
  a.splits = splits;
  a.scale = scale * trace_jax::kLog2e;
  return median_us(n, reps, [&](int i, cudaStream_t stream) {
    a.pages = static_cast<const uint8_t*>(pages[i]);
    return kVariants[variant].launch(a, nullptr, stream);
  });
}
