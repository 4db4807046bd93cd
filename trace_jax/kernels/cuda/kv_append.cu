// One new token a sequence into the pages of K and V, in place; see kernels/kv_append.py.
#include "kv_append.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

// k, v: [batch][kv heads][D] bf16.
template <int KIND, int D>
__global__ void __launch_bounds__(256)
    append(const AppendArgs p, const uint16_t* k, const uint16_t* v) {
  constexpr int N = D / 32;
  int lane = threadIdx.x & 31, warp = blockIdx.x * 8 + (threadIdx.x >> 5);
  int is_v = warp & 1, row = warp >> 1;
  if (row >= p.batch * p.kv_heads) return;
  uint16_t x[N];
  const uint32_t* from = reinterpret_cast<const uint32_t*>((is_v ? v : k) + (size_t)row * D + lane * N);
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    uint32_t both = from[i / 2];
    x[i] = both, x[i + 1] = both >> 16;
  }
  append_row<KIND, D>(p, is_v, row, lane, x);
}

template <int KIND>
cudaError_t launch_append(const AppendArgs& p, const uint16_t* k, const uint16_t* v, int head_size,
                          cudaStream_t stream) {
  int grid = (2 * p.batch * p.kv_heads + 7) / 8;
  if (head_size == 64) append<KIND, 64><<<grid, 256, 0, stream>>>(p, k, v);
  else if (head_size == 128) append<KIND, 128><<<grid, 256, 0, stream>>>(p, k, v);
  else if (head_size == 256) append<KIND, 256><<<grid, 256, 0, stream>>>(p, k, v);
  else return cudaErrorInvalidValue;
  return cudaGetLastError();
}

}  // namespace trace_jax

using Bytes = ffi::Buffer<ffi::U8>;
using Rows = ffi::Buffer<ffi::BF16>;

static ffi::Error KvAppend(cudaStream_t stream, Bytes pages, ffi::Buffer<ffi::S32> table,
                           ffi::Buffer<ffi::S32> positions, Rows k, Rows v,
                           ffi::Result<Bytes> out, ffi::Result<Bytes> k_bits,
                           ffi::Result<Bytes> k_scales, ffi::Result<Bytes> v_bits,
                           ffi::Result<Bytes> v_scales, int64_t kind) {
  using namespace trace_jax;
  if (pages.untyped_data() != out->untyped_data())
    return ffi::Error::Internal("kv_append: the pool and its result are not one buffer");
  auto or_null = [](ffi::Result<Bytes>& b) {
    return b->element_count() ? b->typed_data() : nullptr;
  };
  int d = static_cast<int>(k.dimensions().back());
  AppendArgs p{};
  p.pages = out->typed_data();
  p.table = table.typed_data();
  p.positions = positions.typed_data();
  p.k = {or_null(k_bits), or_null(k_scales)};
  p.v = {or_null(v_bits), or_null(v_scales)};
  p.whole_codes = k_bits->dimensions().back() == d / 2;
  p.batch = static_cast<int>(k.dimensions()[0]);
  p.kv_heads = static_cast<int>(k.dimensions()[1]);
  p.pool = static_cast<int>(pages.dimensions()[0]);
  p.max_pages = static_cast<int>(table.dimensions()[1]);
  auto launch = kind == kNvfp4  ? launch_append<kNvfp4>
                : kind == kFp8  ? launch_append<kFp8>
                : kind == kBf16 ? launch_append<kBf16>
                                : nullptr;
  if (!launch) return ffi::Error::InvalidArgument("kv_append: no such kind");
  auto rows = [](Rows& b) { return reinterpret_cast<const uint16_t*>(b.typed_data()); };
  cudaError_t error = launch(p, rows(k), rows(v), d, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_kv_append, KvAppend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Bytes>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<Rows>()
                                  .Arg<Rows>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Attr<int64_t>("kind"),
                              {ffi::Traits::kCmdBufferCompatible});
