// Router logits to the chosen experts and their weights: one warp a token.
#include <cuda_runtime.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

constexpr int kMostChosen = 32;

// VALUES logits a lane; lane l has experts l, l + 32, ...
template <int VALUES>
__global__ void __launch_bounds__(128) top_k(const float* logits, int* ids, float* gates,
                                             int tokens, int parts, int experts, int chosen,
                                             bool normalize) {
  int lane = threadIdx.x & 31, token = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (token >= tokens) return;
  float x[VALUES], most = -INFINITY;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    int e = lane + 32 * i;
    x[i] = -INFINITY;
    if (e < experts) {
      const float* from = logits + ((size_t)token * parts + parts - 1) * experts + e;
      x[i] = *from;
      for (int part = 1; part < parts; part++) x[i] += *(from -= experts);
    }
    most = fmaxf(most, x[i]);
  }
  for (int d = 16; d; d >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
  float total = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) total += expf(x[i] - most);
  for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
  float gate = 0, sum = 0;  // lane j keeps the j-th choice
  int id = 0;
  for (int j = 0; j < chosen; j++) {
    float best = -INFINITY;
    int at = experts;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      if (x[i] > best) best = x[i], at = lane + 32 * i;  // the lower index of equals
    }
    for (int d = 16; d; d >>= 1) {
      float other = __shfl_xor_sync(~0u, best, d);
      int where = __shfl_xor_sync(~0u, at, d);
      if (other > best || (other == best && where < at)) best = other, at = where;
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      if (lane + 32 * i == at) x[i] = -INFINITY;
    }
    float share = expf(best - most) / total;
    if (lane == j) gate = share, id = min(at, experts - 1);
    sum += share;
  }
  if (lane < chosen) {
    ids[(size_t)token * chosen + lane] = id;
    gates[(size_t)token * chosen + lane] = normalize ? gate / sum : gate;
  }
}

}  // namespace trace_jax

static ffi::Error TopK(cudaStream_t stream, ffi::Buffer<ffi::F32> logits,
                       ffi::Result<ffi::Buffer<ffi::S32>> ids,
                       ffi::Result<ffi::Buffer<ffi::F32>> gates, bool normalize) {
  using namespace trace_jax;
  int experts = static_cast<int>(logits.dimensions().back());
  int tokens = static_cast<int>(logits.dimensions()[0]);
  int parts = static_cast<int>(logits.dimensions()[1]);
  int chosen = static_cast<int>(ids->dimensions().back());
  if (experts > 512 || chosen > kMostChosen) return ffi::Error::InvalidArgument("top_k: too many");
  auto* kernel = experts <= 64 ? top_k<2> : experts <= 128 ? top_k<4> : experts <= 256 ? top_k<8>
                                                                                       : top_k<16>;
  kernel<<<(tokens + 3) / 4, 128, 0, stream>>>(logits.typed_data(), ids->typed_data(),
                                               gates->typed_data(), tokens, parts, experts,
                                               chosen, normalize);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_top_k, TopK,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("normalize"),
                              {ffi::Traits::kCmdBufferCompatible});
