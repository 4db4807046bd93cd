// Routed rows times expert weights (NVFP4 or BF16) on Hopper where rows are many: prefill.
//
// `unpack` writes the BF16 values of a group of experts to scratch, in the form in which the tensor
// cores read them from shared memory: [expert][block of 256 outputs][64 of K][output][128 bytes],
// 16-byte units swizzled, so that a stage of weights is one bulk copy.
// `product` runs persistent blocks over tiles of 128 rows of one expert x 256 outputs. K streams
// through a ring of stages: one warpgroup fetches (rows gathered by 16-byte copies of its threads),
// two multiply 64 rows each and write their results. While one writes, the other has the tensor
// cores to itself, as long as the ring is full.
//
// A row's sum over K runs in one chain, whatever the other rows are.
#include "common.cuh"
#include "epilogue.cuh"
#include "wgmma.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

struct PrefillArgs {
  const uint8_t* weight;       // [experts][tiles][chunks][576 or 2048]
  const float2* weight_outer;  // [experts]: of a tile's first and second 8 outputs
  const float* bias;           // [experts][tiles][16] or null
  const __nv_bfloat16* x;      // [tokens][k]
  const float* x_outer;        // [tokens] or null
  const int* slot;             // [rows]: slots ordered by expert
  const int* offset;           // [experts + 1]
  void* out;                   // plain: f32 [slots][16 tiles]; gated: bf16 [rows][8 tiles]
  uint8_t* scratch;            // [experts of a group][blocks][chunks][kWeightBytes]
  int first, experts;          // the group of experts that is in scratch
  int tiles, chunks, k, top_k, epilogue;
  bool fp4;
};

constexpr int kRows = 128, kOutputs = 256;  // of a tile
constexpr int kStages = 4;
constexpr int kRowBytes = kRows * 128, kWeightBytes = kOutputs * 128;  // 64 of K
constexpr int kStageBytes = kRowBytes + kWeightBytes;
constexpr int kMaxExperts = 1024;
constexpr int kThreads = 384;
constexpr int kShared = 1024 + kStages * (kStageBytes + 16) + (kMaxExperts + 1) * 4;

__host__ __device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// --- weights to scratch -----------------------------------------------------------------------

// A lane's 16 values of K of two outputs, as stored; see expert_layout.py.
template <int FP4>
struct Stored {
  uint4 v[FP4 ? 1 : 4];
  uint32_t scales[2];

  __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
#pragma unroll
    for (int i = 0; i < (FP4 ? 1 : 4); i++)
      v[i] = __ldcs(reinterpret_cast<const uint4*>(chunk + i * 512 + lane * 16));
    if (FP4) {
      scales[0] = __ldcs(chunk + 512 + lane);
      scales[1] = __ldcs(chunk + 544 + lane);
    }
  }

  // BF16 values of output HALF, in the order of K; FP4 ones / kUnscale.
  template <int HALF>
  __device__ __forceinline__ void decode(uint4* out) const {
    uint32_t words[8];
    if constexpr (FP4) {
      decode_weights(HALF ? v[0].z : v[0].x, words);
      decode_weights(HALF ? v[0].w : v[0].y, words + 4);
      uint32_t scale = scale_twice(scales[HALF]);
#pragma unroll
      for (int i = 0; i < 8; i++) words[i] = mul_bf16x2(words[i], scale);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        words[2 * i] = HALF ? v[i].y : v[i].x;
        words[2 * i + 1] = HALF ? v[i].w : v[i].z;
      }
    }
    out[0] = make_uint4(words[0], words[1], words[2], words[3]);
    out[1] = make_uint4(words[4], words[5], words[6], words[7]);
  }
};

// Lanes 2 i and 2 i + 1 hold two units each, v[0] and v[1] of the first's and of the second's 32
// bytes; together they write whole sectors.
__device__ __forceinline__ void write_units(uint8_t* row, int lane, int g, const uint4* v) {
  bool odd = lane & 1;
  uint4 send = odd ? v[0] : v[1], got;
  got.x = __shfl_xor_sync(~0u, send.x, 1);
  got.y = __shfl_xor_sync(~0u, send.y, 1);
  got.z = __shfl_xor_sync(~0u, send.z, 1);
  got.w = __shfl_xor_sync(~0u, send.w, 1);
  int unit = (lane & 2) * 2 + odd;  // of the first's sector
  *reinterpret_cast<uint4*>(row + ((unit ^ g) * 16)) = odd ? got : v[0];
  *reinterpret_cast<uint4*>(row + (((unit + 2) ^ g) * 16)) = odd ? v[1] : got;
}

constexpr int kUnpackChunks = 4;  // that a warp loads at once

template <int FP4>
__global__ void __launch_bounds__(256) unpack(const __grid_constant__ PrefillArgs p) {
  constexpr int bytes = FP4 ? 576 : 2048;
  int lane = threadIdx.x & 31, g = lane >> 2;
  int64_t item = ((int64_t)blockIdx.x * 8 + (threadIdx.x >> 5)) * kUnpackChunks;
  int64_t items = (int64_t)p.experts * p.tiles * p.chunks;
  const uint8_t* from = p.weight + ((int64_t)p.first * p.tiles * p.chunks + item) * bytes;
  Stored<FP4> stored[kUnpackChunks];
#pragma unroll
  for (int i = 0; i < kUnpackChunks; i++)
    if (item + i < items) stored[i].load(from + i * bytes, lane);
  int blocks = ceil_div(p.tiles, 16);
#pragma unroll
  for (int i = 0; i < kUnpackChunks; i++, item++) {
    if (item >= items) return;
    int chunk = item % p.chunks, tile = item / p.chunks % p.tiles;
    int64_t expert = item / p.chunks / p.tiles;
    uint8_t* to = p.scratch +
                  ((expert * blocks + tile / 16) * p.chunks + chunk) * kWeightBytes +
                  (tile % 16 * 16 + g) * 128;
    uint4 v[2];
    stored[i].template decode<0>(v);
    write_units(to, lane, g, v);
    stored[i].template decode<1>(v);
    write_units(to + 8 * 128, lane, g, v);
  }
}

// --- tiles --------------------------------------------------------------------------------------

struct Tile {
  int expert, block;  // of the group; of 256 outputs
  int row, rows;      // first row, and how many of its expert follow
};

// Tiles of a block: the outputs of 128 rows come one after the other, so that the rows that run
// at a time, and their weights, are in the cache.
struct Walk {
  const int* ends;  // [experts]: tiles of rows up to and with an expert
  int blocks, at, total;

  __device__ __forceinline__ bool next(const PrefillArgs& p, Tile& t) {
    if (at >= total) return false;
    int index = at / blocks, low = 0, high = p.experts - 1;
    t.block = at % blocks;
    while (low < high) {
      int middle = (low + high) / 2;
      if (ends[middle] > index) high = middle;
      else low = middle + 1;
    }
    t.expert = low;
    int begin = __ldg(p.offset + p.first + low), end = __ldg(p.offset + p.first + low + 1);
    t.row = begin + (index - (low ? ends[low - 1] : 0)) * kRows;
    t.rows = end - t.row;
    at += gridDim.x;
    return true;
  }
};

__device__ __forceinline__ void count_tiles(const PrefillArgs& p, int* ends) {
  for (int e = threadIdx.x; e < p.experts; e += kThreads)
    ends[e] = ceil_div(p.offset[p.first + e + 1] - p.offset[p.first + e], kRows);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  int sum = 0;
  for (int e0 = 0; e0 < p.experts; e0 += 32) {
    int e = e0 + threadIdx.x, value = e < p.experts ? ends[e] : 0;
    for (int d = 1; d < 32; d *= 2) {
      int other = __shfl_up_sync(~0u, value, d);
      if (threadIdx.x >= d) value += other;
    }
    if (e < p.experts) ends[e] = sum + value;
    sum += __shfl_sync(~0u, value, 31);
  }
}

struct Ring {
  uint8_t* stages;
  uint64_t *full, *empty;
  int at = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint8_t* stage() const { return stages + at * kStageBytes; }
  __device__ __forceinline__ void advance() {
    if (++at == kStages) { at = 0; parity ^= 1; }
  }
};

// --- the fetching warpgroup -----------------------------------------------------------------------

__device__ __forceinline__ void copy_unit(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// `bar` is told once this thread's copies so far have ended.
__device__ __forceinline__ void arrive_when_copied(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar))
               : "memory");
}

__device__ __forceinline__ void fetch(const PrefillArgs& p, Ring ring, Walk walk) {
  int thread = threadIdx.x & 127, unit = thread & 7, first = thread >> 3;
  uint32_t to = shared_address(ring.stages) + first * 128 + ((unit ^ (first & 7)) * 16);
  uint64_t policy = evict_last_policy();
  Tile t;
  while (walk.next(p, t)) {
    const __nv_bfloat16* from[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int row = t.row + min(first + 16 * j, t.rows - 1);
      int source = p.epilogue == kPlain ? row : __ldg(p.slot + row) / p.top_k;
      from[j] = p.x + (size_t)source * p.k + unit * 8;
    }
    const uint8_t* weights =
        p.scratch + ((size_t)t.expert * walk.blocks + t.block) * p.chunks * kWeightBytes;
    bool both = t.rows > 64;
    for (int chunk = 0; chunk < p.chunks; chunk++, ring.advance()) {
      barrier_wait(ring.empty + ring.at, ring.parity ^ 1);
      if (thread == 0)
        bulk_copy(ring.stage() + kRowBytes, weights + (size_t)chunk * kWeightBytes, kWeightBytes,
                  ring.full + ring.at, policy);
      int bytes = chunk * 64 + unit * 8 < p.k ? 16 : 0;
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (j < 4 || both)
          copy_unit(to + ring.at * kStageBytes + j * 2048, from[j] + (bytes ? chunk * 64 : 0),
                    bytes);
      arrive_when_copied(ring.full + ring.at);
    }
  }
}

// --- the multiplying warpgroups -------------------------------------------------------------------

// What is needed at the end of a tile and loaded at its start: a lane's two rows.
struct RowInfo {
  int place;    // of the result; < 0: no row
  float scale;
};

__device__ __forceinline__ RowInfo row_info(const PrefillArgs& p, const Tile& t, int row) {
  if (row >= t.rows) return {-1, 0.0f};
  int slot = __ldg(p.slot + t.row + row);
  int source = p.epilogue == kPlain ? t.row + row : slot / p.top_k;
  float scale = p.x_outer ? __ldg(p.x_outer + source) : 1.0f;
  return {p.epilogue == kPlain ? slot : t.row + row, scale * (p.fp4 ? kUnscale : 1.0f)};
}

// Sums of a row and its tile j of 16 outputs (a lane's 2 + 2), scaled and with biases.
__device__ __forceinline__ float4 scaled(const PrefillArgs& p, const Tile& t, float2 outer,
                                         float scale, const float* acc, int tile, int lane) {
  float4 b = make_float4(0, 0, 0, 0);
  if (p.bias) {
    const float* from = p.bias + ((size_t)(p.first + t.expert) * p.tiles + tile) * 16 + lane % 4 * 2;
    b = make_float4(__ldg(from), __ldg(from + 1), __ldg(from + 8), __ldg(from + 9));
  }
  float x = outer.x * scale, y = outer.y * scale;
  return make_float4(fmaf(acc[0], x, b.x), fmaf(acc[1], x, b.y), fmaf(acc[4], y, b.z),
                     fmaf(acc[5], y, b.w));
}

// Of a tile of 16 outputs: a quad of lanes stores 64 bytes of a row in one go.
__device__ __forceinline__ void store_plain(const PrefillArgs& p, int place, int tile, int lane,
                                            float4 v) {
  bool odd = lane & 1;
  float a = __shfl_xor_sync(~0u, odd ? v.x : v.z, 1), b = __shfl_xor_sync(~0u, odd ? v.y : v.w, 1);
  if (place < 0) return;
  float4 whole = odd ? make_float4(a, b, v.z, v.w) : make_float4(v.x, v.y, a, b);
  float* out = static_cast<float*>(p.out) + (size_t)place * p.tiles * 16 + tile * 16;
  __stcs(reinterpret_cast<float4*>(out + odd * 8 + (lane & 2) * 2), whole);
}

// Lane i of a quad gives w[j] to lane j, as its w[i].
__device__ __forceinline__ void transpose(uint32_t* w, int lane) {
#pragma unroll
  for (int d = 1; d <= 2; d++) {
    bool upper = lane & d;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & d) continue;
      uint32_t got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + d], d);
      if (upper) w[i] = got;
      else w[i + d] = got;
    }
  }
}

// Four tiles of 16 sums, 8 of a gate and 8 of an up: 32 BF16 outputs of a row, 8 a lane.
__device__ __forceinline__ void store_gated(const PrefillArgs& p, int place, int tile, int lane,
                                            const float4* v) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(gated(v[i].x, v[i].z, p.epilogue),
                                                gated(v[i].y, v[i].w, p.epilogue));
    w[i] = *reinterpret_cast<uint32_t*>(&pair);
  }
  transpose(w, lane);
  if (place < 0 || tile + lane % 4 >= p.tiles) return;
  auto* out = static_cast<__nv_bfloat16*>(p.out) + (size_t)place * p.tiles * 8;
  *reinterpret_cast<uint4*>(out + (tile + lane % 4) * 8) = make_uint4(w[0], w[1], w[2], w[3]);
}

__device__ __forceinline__ void finish(const PrefillArgs& p, const Tile& t, const RowInfo* info,
                                       float2 outer, const float* acc, int lane) {
#pragma unroll
  for (int j = 0; j < 16; j += 4) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float4 v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int tile = t.block * 16 + j + i;
        bool live = tile < p.tiles;
        v[i] = make_float4(0, 0, 0, 0);
        if (live)
          v[i] = scaled(p, t, outer, info[half].scale, acc + (j + i) * 8 + half * 2, tile, lane);
        if (p.epilogue == kPlain)
          store_plain(p, live ? info[half].place : -1, tile, lane, v[i]);
      }
      if (p.epilogue != kPlain) store_gated(p, info[half].place, t.block * 16 + j, lane, v);
    }
  }
}

__device__ __forceinline__ void multiply(const PrefillArgs& p, Ring ring, Walk walk) {
  int lane = threadIdx.x & 31, first = threadIdx.x / 128 * 64;
  int row = first + (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
  auto release = [&](int at) {
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.empty + at);
  };
  float acc[128];
  Tile t;
  while (walk.next(p, t)) {
    if (first >= t.rows) {  // the other warpgroup has all rows
      for (int chunk = 0; chunk < p.chunks; chunk++, ring.advance()) {
        barrier_wait(ring.full + ring.at, ring.parity);
        release(ring.at);
      }
      continue;
    }
    RowInfo info[2] = {row_info(p, t, row), row_info(p, t, row + 8)};
    float2 outer = __ldg(p.weight_outer + p.first + t.expert);
    int before = 0;
    for (int chunk = 0; chunk < p.chunks; chunk++) {
      barrier_wait(ring.full + ring.at, ring.parity);
      async_proxy_fence();  // rows came by ordinary copies
      uint32_t rows = shared_address(ring.stage()) + first * 128;
      uint32_t weights = shared_address(ring.stage() + kRowBytes);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++)
        wgmma_shared(acc, operand_swizzled(rows + j * 32), operand_swizzled(weights + j * 32),
                     chunk + j);
      wgmma_commit();
      wgmma_wait<1>();
      if (chunk > 0) release(before);
      before = ring.at;
      ring.advance();
    }
    wgmma_wait<0>();
    for (float& sum : acc) asm volatile("" : "+f"(sum));  // not read before the wait
    release(before);
    finish(p, t, info, outer, acc, lane);
  }
}

__global__ void __launch_bounds__(kThreads, 1) product(const __grid_constant__ PrefillArgs p) {
  extern __shared__ uint8_t bytes[];
  Ring ring;
  ring.stages = bytes + (1024 - shared_address(bytes) % 1024) % 1024;
  ring.full = reinterpret_cast<uint64_t*>(ring.stages + kStages * kStageBytes);
  ring.empty = ring.full + kStages;
  int* ends = reinterpret_cast<int*>(ring.empty + kStages);
  if (threadIdx.x < kStages) {
    barrier_init(ring.full + threadIdx.x, 129);  // 128 threads that fetch rows, one bulk copy
    barrier_init(ring.empty + threadIdx.x, 8);
  }
  barrier_init_fence();
  count_tiles(p, ends);
  __syncthreads();
  int blocks = ceil_div(p.tiles, 16);
  Walk walk{ends, blocks, static_cast<int>(blockIdx.x), ends[p.experts - 1] * blocks};
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    fetch(p, ring, walk);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    multiply(p, ring, walk);
  }
}

inline cudaError_t launch_unpack(const PrefillArgs& args, cudaStream_t stream) {
  int64_t items = (int64_t)args.experts * args.tiles * args.chunks;
  int blocks = static_cast<int>((items + 8 * kUnpackChunks - 1) / (8 * kUnpackChunks));
  if (args.fp4) unpack<1><<<blocks, 256, 0, stream>>>(args);
  else unpack<0><<<blocks, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

inline cudaError_t launch_product(const PrefillArgs& args, cudaStream_t stream) {
  static cudaError_t ready =
      cudaFuncSetAttribute(product, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (ready != cudaSuccess) return ready;
  product<<<multiprocessors(), kThreads, kShared, stream>>>(args);
  return cudaGetLastError();
}

// Both, for all experts, as many at a time as scratch holds.
inline cudaError_t launch_prefill(PrefillArgs args, int experts, int group, cudaStream_t stream) {
  for (args.first = 0; args.first < experts; args.first += group) {
    args.experts = min(group, experts - args.first);
    cudaError_t error = launch_unpack(args, stream);
    if (error == cudaSuccess) error = launch_product(args, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace trace_jax

// --- the call from XLA ----------------------------------------------------------------------------

using Bytes = ffi::Buffer<ffi::U8>;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

static ffi::Error Prefill(cudaStream_t stream, Bytes weight, Floats weight_outer, Floats bias,
                          ffi::Buffer<ffi::BF16> x, Floats x_outer, Ints slot, Ints offset,
                          ffi::Result<ffi::AnyBuffer> out, ffi::Result<Bytes> scratch,
                          int64_t epilogue, int64_t top_k, bool fp4) {
  trace_jax::PrefillArgs args{};
  args.weight = weight.typed_data();
  args.weight_outer = reinterpret_cast<const float2*>(weight_outer.typed_data());
  args.bias = bias.element_count() ? bias.typed_data() : nullptr;
  args.x = reinterpret_cast<const __nv_bfloat16*>(x.typed_data());
  args.x_outer = x_outer.element_count() ? x_outer.typed_data() : nullptr;
  args.slot = slot.typed_data();
  args.offset = offset.typed_data();
  args.out = out->untyped_data();
  args.scratch = scratch->typed_data();
  args.tiles = static_cast<int>(weight.dimensions()[1]);
  args.chunks = static_cast<int>(weight.dimensions()[2]);
  args.k = static_cast<int>(x.dimensions().back());
  args.top_k = static_cast<int>(top_k);
  args.epilogue = static_cast<int>(epilogue);
  args.fp4 = fp4;
  cudaError_t error =
      trace_jax::launch_prefill(args, static_cast<int>(weight.dimensions()[0]),
                                static_cast<int>(scratch->dimensions()[0]), stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_prefill, Prefill,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Bytes>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Bytes>()
                                  .Attr<int64_t>("epilogue")
                                  .Attr<int64_t>("top_k")
                                  .Attr<bool>("fp4"),
                              {ffi::Traits::kCmdBufferCompatible});
