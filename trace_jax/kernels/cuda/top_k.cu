// Router logits to the chosen experts and their weights, and the slots in the order of their experts,
// in one launch of one cluster of blocks: a warp a token, then, when all have chosen, a warp an expert.
#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

constexpr int kMostChosen = 32, kBlocks = 8, kThreads = 512, kStaged = 8192;

struct TopKArgs {
  const float* logits;  // [tokens][parts][experts]
  int* ids;             // [tokens][chosen]
  float* gates;         // [tokens][chosen]
  int* slot;            // [tokens * chosen]: of expert 0 in order, then of expert 1, ...
  int* offset;          // [experts + 1]: where an expert's slots begin
  int tokens, experts, chosen;
  bool normalize;
};

// A key that orders floats as unsigned integers; NaN below all numbers, and both zeros equal.
__device__ __forceinline__ uint32_t key_of(float x) {
  if (x != x) return 0;
  uint32_t bits = __float_as_uint(x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t key) {
  if (key == 0) return -INFINITY;
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// VALUES logits a lane; lane l has experts l, l + 32, ... PARTS of a logit are loaded at once.
template <int VALUES, int PARTS>
__device__ __forceinline__ void choose(const TopKArgs& p, int token, int lane) {
  constexpr uint32_t kTaken = 0;
  uint32_t key[VALUES], best = 0;
  float x[VALUES], total = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    int e = lane + 32 * i;
    x[i] = -INFINITY;
    key[i] = kTaken;
    if (e < p.experts) {
      const float* from = p.logits + (size_t)token * PARTS * p.experts + e;
      float part[PARTS];
#pragma unroll
      for (int k = 0; k < PARTS; k++) part[k] = from[k * p.experts];
      x[i] = part[PARTS - 1];
#pragma unroll
      for (int k = PARTS - 2; k >= 0; k--) x[i] += part[k];
      key[i] = key_of(x[i]);
    }
    best = max(best, key[i]);
  }
  float most = value_of(__reduce_max_sync(~0u, best));
#pragma unroll
  for (int i = 0; i < VALUES; i++) total += expf(x[i] - most);
  for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d);
  float gate = 0, sum = 0;  // lane j keeps the j-th choice
  int id = 0;
  for (int j = 0; j < p.chosen; j++) {
    uint32_t mine = 0;
    int at = p.experts - 1;
#pragma unroll
    for (int i = VALUES - 1; i >= 0; i--) {
      if (key[i] >= mine && key[i] != kTaken) mine = key[i], at = lane + 32 * i;
    }
    uint32_t top = __reduce_max_sync(~0u, mine);  // and of equals the lowest
    int chosen = __reduce_min_sync(~0u, mine == top ? at : p.experts - 1);
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      if (lane + 32 * i == chosen) key[i] = kTaken;
    }
    float share = expf(value_of(top) - most) / total;
    if (lane == j) gate = share, id = chosen;
    sum += share;
  }
  if (lane < p.chosen) {
    p.ids[(size_t)token * p.chosen + lane] = id;
    p.gates[(size_t)token * p.chosen + lane] = p.normalize ? gate / sum : gate;
  }
}

// Slots of one expert, stably, among ids [slots].
__device__ __forceinline__ void sort_slots(const TopKArgs& p, const int* ids, int slots, int expert,
                                           int lane) {
  int before = 0;
#pragma unroll 4
  for (int i = lane; i < slots; i += 32) before += ids[i] < expert;
  before = __reduce_add_sync(~0u, before);
  if (lane == 0) p.offset[expert] = before;
  if (expert == p.experts) return;
#pragma unroll 4
  for (int i0 = 0; i0 < slots; i0 += 32) {
    int i = i0 + lane;
    bool mine = i < slots && ids[i] == expert;
    unsigned all = __ballot_sync(~0u, mine);
    if (mine) p.slot[before + __popc(all & ((1u << lane) - 1))] = i;
    before += __popc(all);
  }
}

template <int VALUES, int PARTS>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    top_k(const __grid_constant__ TopKArgs p) {
  __shared__ int staged[kStaged];
  int lane = threadIdx.x & 31, me = (threadIdx.x >> 5) * kBlocks + blockIdx.x;
  constexpr int kWarps = kBlocks * kThreads / 32;
  for (int token = me; token < p.tokens; token += kWarps) choose<VALUES, PARTS>(p, token, lane);
  __threadfence();
  cooperative_groups::this_cluster().sync();
  int slots = p.tokens * p.chosen;
  const int* ids = p.ids;
  if (slots <= kStaged) {
    for (int i = threadIdx.x; i < slots; i += kThreads) staged[i] = __ldcg(p.ids + i);
    __syncthreads();
    ids = staged;
  }
  for (int expert = me; expert <= p.experts; expert += kWarps)
    sort_slots(p, ids, slots, expert, lane);
}

}  // namespace trace_jax

static ffi::Error TopK(cudaStream_t stream, ffi::Buffer<ffi::F32> logits,
                       ffi::Result<ffi::Buffer<ffi::S32>> ids,
                       ffi::Result<ffi::Buffer<ffi::F32>> gates,
                       ffi::Result<ffi::Buffer<ffi::S32>> slot,
                       ffi::Result<ffi::Buffer<ffi::S32>> offset, bool normalize) {
  using namespace trace_jax;
  TopKArgs p{logits.typed_data(), ids->typed_data(), gates->typed_data(), slot->typed_data(),
             offset->typed_data()};
  p.experts = static_cast<int>(logits.dimensions().back());
  p.tokens = static_cast<int>(logits.dimensions()[0]);
  p.chosen = static_cast<int>(ids->dimensions().back());
  p.normalize = normalize;
  int parts = static_cast<int>(logits.dimensions()[1]);
  if (p.experts > 512 || p.chosen > kMostChosen)
    return ffi::Error::InvalidArgument("top_k: too many");
  if (parts != 1 && parts != 3) return ffi::Error::InvalidArgument("top_k: 1 or 3 parts");
  auto one = p.experts <= 64    ? top_k<2, 1>
             : p.experts <= 128 ? top_k<4, 1>
             : p.experts <= 256 ? top_k<8, 1>
                                : top_k<16, 1>;
  auto three = p.experts <= 64    ? top_k<2, 3>
               : p.experts <= 128 ? top_k<4, 3>
               : p.experts <= 256 ? top_k<8, 3>
                                  : top_k<16, 3>;
  auto kernel = parts == 1 ? one : three;
  kernel<<<kBlocks, kThreads, 0, stream>>>(p);
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
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<bool>("normalize"),
                              {ffi::Traits::kCmdBufferCompatible});
