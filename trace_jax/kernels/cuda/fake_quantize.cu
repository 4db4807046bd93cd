// Rows of activations, quantized and decoded again, in one launch; see fake_quantize.cuh.
#include "fake_quantize.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

template <int WARPS, int UNITS>
__global__ void __launch_bounds__(128) fake_quantize(const FakeArgs p) {
  constexpr int kLanes = 32 * WARPS, kRows = 4 / WARPS;
  int lane = threadIdx.x % kLanes, row = blockIdx.x * kRows + threadIdx.x / kLanes;
  int units = p.width / 8;
  if (row >= p.rows) return;  // whole warps, and with WARPS 4 the whole block
  uint4 x[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = lane + kLanes * i;
    x[i] = u < units ? p.x[(size_t)row * units + u] : make_uint4(0, 0, 0, 0);
  }
  quantize_row<WARPS, UNITS>(
      p, row, lane, x, [&](int u, const uint4& v) { p.value[(size_t)row * units + u] = v; });
}

cudaError_t launch_fake(const FakeArgs& p, cudaStream_t stream) {
  int grid = (p.rows + 3) / 4;
  if (p.width <= 256) fake_quantize<1, 1><<<grid, 128, 0, stream>>>(p);
  else if (p.width <= 512) fake_quantize<1, 2><<<grid, 128, 0, stream>>>(p);
  else if (p.width <= 768) fake_quantize<1, 3><<<grid, 128, 0, stream>>>(p);
  else if (p.width <= 1024) fake_quantize<4, 1><<<p.rows, 128, 0, stream>>>(p);
  else if (p.width <= 2048) fake_quantize<4, 2><<<p.rows, 128, 0, stream>>>(p);
  else if (p.width <= 4096) fake_quantize<4, 4><<<p.rows, 128, 0, stream>>>(p);
  else return cudaErrorInvalidValue;
  return cudaGetLastError();
}

}  // namespace trace_jax

using Bytes = ffi::Buffer<ffi::U8>;
using Rows = ffi::Buffer<ffi::BF16>;

static ffi::Error FakeQuantize(cudaStream_t stream, Rows x, ffi::Result<Rows> value,
                               ffi::Result<Bytes> bits, ffi::Result<Bytes> scales) {
  using namespace trace_jax;
  FakeArgs p{};
  p.x = reinterpret_cast<const uint4*>(x.typed_data());
  p.value = reinterpret_cast<uint4*>(value->typed_data());
  p.bits = bits->element_count() ? bits->typed_data() : nullptr;
  p.scales = scales->element_count() ? scales->typed_data() : nullptr;
  p.width = static_cast<int>(x.dimensions().back());
  p.rows = static_cast<int>(x.element_count() / p.width);
  p.whole_codes = bits->dimensions().back() == p.width / 2;
  cudaError_t error = launch_fake(p, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_fake_quantize, FakeQuantize,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Rows>()
                                  .Ret<Rows>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>(),
                              {ffi::Traits::kCmdBufferCompatible});
