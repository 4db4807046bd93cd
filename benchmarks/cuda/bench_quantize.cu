// Timing of the one-pass quantizer without JAX's dispatch; see benchmarks/kernels.py.
#include "../../trace_jax/kernels/cuda/quantize.cu"
#include "timing.cuh"

extern "C" float bench_quantize(const void** x, int n, void* packed, void* scale, void* outer,
                                void* bits, int rows, int width, int reps) {
  trace_jax::Args a{};
  a.packed = static_cast<decltype(a.packed)>(packed);
  a.scale = static_cast<uint8_t*>(scale);
  a.outer = static_cast<float*>(outer);
  a.bits = static_cast<decltype(a.bits)>(bits);
  a.rows = rows;
  a.width = width;
  return median_us(n, reps, [&](int i, cudaStream_t stream) {
    a.x = static_cast<const uint4*>(x[i]);
    return trace_jax::launch(a, stream);
  });
}
