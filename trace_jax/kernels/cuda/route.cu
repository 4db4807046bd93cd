// Sorts routed slots by expert, stably, in one launch: one warp an expert.
#include <cuda_runtime.h>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

// slot[r]: the slots of expert 0 in order, then those of expert 1, ...; offset[e]: where
// expert e begins.
__global__ void __launch_bounds__(128) route(const int* ids, int slots, int experts, int* slot,
                                             int* offset) {
  int lane = threadIdx.x & 31, expert = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (expert > experts) return;
  int before = 0;
  for (int i = lane; i < slots; i += 32) before += ids[i] < expert;
  before = __reduce_add_sync(~0u, before);
  if (lane == 0) offset[expert] = before;
  if (expert == experts) return;
  for (int i0 = 0; i0 < slots; i0 += 32) {
    int i = i0 + lane;
    bool mine = i < slots && ids[i] == expert;
    unsigned all = __ballot_sync(~0u, mine);
    if (mine) slot[before + __popc(all & ((1u << lane) - 1))] = i;
    before += __popc(all);
  }
}

static ffi::Error Route(cudaStream_t stream, ffi::Buffer<ffi::S32> ids,
                        ffi::Result<ffi::Buffer<ffi::S32>> slot,
                        ffi::Result<ffi::Buffer<ffi::S32>> offset) {
  int experts = static_cast<int>(offset->element_count()) - 1;
  route<<<(experts + 4) / 4, 128, 0, stream>>>(ids.typed_data(),
                                               static_cast<int>(ids.element_count()), experts,
                                               slot->typed_data(), offset->typed_data());
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_route, Route,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::S32>>(),
                              {ffi::Traits::kCmdBufferCompatible});
