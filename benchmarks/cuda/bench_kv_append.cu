// Timing of appending a token a sequence without JAX's dispatch; see benchmarks/kernels.py.
#include "../../trace_jax/kernels/cuda/kv_append.cu"
#include "timing.cuh"

extern "C" float bench_kv_append(int kind, const void** pages, int n, const void* table,
                                 const void* positions, const void* k, const void* v, void* bits,
                                 void* scales, int batch, int kv_heads, int head_size, int pool,
                                 int max_pages, int reps) {
  using namespace trace_jax;
  AppendArgs a{};
  a.table = static_cast<const int*>(table);
  a.positions = static_cast<const int*>(positions);
  a.k = {static_cast<uint8_t*>(bits), static_cast<uint8_t*>(scales)};
  a.v = a.k;
  a.batch = batch;
  a.kv_heads = kv_heads;
  a.pool = pool;
  a.max_pages = max_pages;
  return median_us(n, reps, [&](int i, cudaStream_t stream) {
    a.pages = const_cast<uint8_t*>(static_cast<const uint8_t*>(pages[i]));
    auto launch = kind == kNvfp4 ? launch_append<kNvfp4>
                  : kind == kFp8 ? launch_append<kFp8>
                                 : launch_append<kBf16>;
    return launch(a, static_cast<const uint16_t*>(k), static_cast<const uint16_t*>(v), head_size,
                  stream);
  });
}
