// Router logits to the chosen experts and their weights: one warp a token.
#include <cuda_runtime.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

constexpr int kMostChosen = 32;

// VALUES logits a lane; lane l has experts l, l + 32, ... PARTS of a logit are loaded at once.
template <int VALUES, int PARTS>
__global__ void __launch_bounds__(128) top_k(const float* logits, int* ids, float* gates,
                                             int tokens, int experts, int chosen,
                                             bool normalize) {
  int lane = threadIdx.x & 31, token = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (token >= tokens) return;
  float x[VALUES], most = -INFINITY;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    int e = lane + 32 * i;
    x[i] = -INFINITY;
    if (e < experts) {
      const float* from = logits + (size_t)token * PARTS * experts + e;
      float part[PARTS];
#pragma unroll
      for (int k = 0; k < PARTS; k++) part[k] = from[k * experts];
      x[i] = part[PARTS - 1];
#pragma unroll
      for (int k = PARTS - 2; k >= 0; k--) x[i] += part[k];
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
  if (parts != 1 && parts != 3) return ffi::Error::InvalidArgument("top_k: 1 or 3 parts");
  auto one = experts <= 64    ? top_k<2, 1>
             : experts <= 128 ? top_k<4, 1>
             : experts <= 256 ? top_k<8, 1>
                              : top_k<16, 1>;
  auto three = experts <= 64    ? top_k<2, 3>
               : experts <= 128 ? top_k<4, 3>
               : experts <= 256 ? top_k<8, 3>
                                : top_k<16, 3>;
  auto kernel = parts == 1 ? one : three;
  kernel<<<(tokens + 3) / 4, 128, 0, stream>>>(logits.typed_data(), ids->typed_data(),
                                               gates->typed_data(), tokens, experts, chosen,
                                               normalize);
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
