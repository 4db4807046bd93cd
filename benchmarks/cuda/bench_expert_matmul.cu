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
    return kVariants[variant].launch(a, nullptr, stream);
  });
}

// A whole layer; `inner` of the values between its products: packed rows, their info.
extern "C" float bench_expert_layer(int variant, const void** gate_up, const void** down, int n,
                                    const void* outer, const void* x, const void* slot,
                                    const void* offset, void* out, void* mid, void* packed,
                                    void* info, void* inner_packed, void* inner_info, int experts,
                                    int hidden, int width, int rows, int top_k, int quantize,
                                    int reps) {
  trace_jax::Args a{};
  a.weight_outer = static_cast<const float2*>(outer);
  a.slot = static_cast<const int*>(slot);
  a.offset = static_cast<const int*>(offset);
  a.experts = experts;
  a.rows = rows;
  trace_jax::Args first = a, second = a;
  first.x = static_cast<const __nv_bfloat16*>(x);
  first.out = mid;
  first.packed = static_cast<uint8_t*>(packed);
  first.info = static_cast<int2*>(info);
  first.tiles = width / 8;
  first.k = hidden;
  first.top_k = top_k;
  first.epilogue = trace_jax::kSilu;
  second.x = static_cast<const __nv_bfloat16*>(mid);
  second.out = out;
  second.packed = static_cast<uint8_t*>(inner_packed);
  second.info = static_cast<int2*>(inner_info);
  second.tiles = hidden / 16;
  second.k = width;
  first.chunks = (hidden + 63) / 64, second.chunks = (width + 63) / 64;
  trace_jax::FakeArgs fake{};
  fake.x = static_cast<const uint4*>(mid);
  fake.width = width;
  fake.rows = rows;
  return median_us(n, reps, [&](int i, cudaStream_t stream) {
    first.weight = static_cast<const uint8_t*>(gate_up[i]);
    second.weight = static_cast<const uint8_t*>(down[i]);
    cudaError_t error = kVariants[variant].launch(first, nullptr, stream);
    if (error != cudaSuccess) return error;
    return kVariants[variant].launch(second, quantize ? &fake : nullptr, stream);
  });
}
