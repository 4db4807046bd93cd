// Routed rows times expert weights (NVFP4 or BF16), for decode on Hopper.
//
// Persistent blocks, each with one contiguous share of the weights of all experts that have
// rows. Tiles of 16 outputs stream into shared memory by bulk copies, several ahead; a tile's
// K is split over SPLIT warps, each of which keeps its K-slice of up to 8*NT rows in registers
// as the tensor cores' B operand for as long as the expert lasts. Weights are laid out so that
// a lane's 16-byte load is its A operand. The partial sums meet in shared memory; the warps
// take turns to finish a tile and to refill its stage, and no other warp waits for that.
#include "common.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

enum Epilogue { kPlain = 0, kSilu = 1, kClamped = 2 };

struct Args {
  const uint8_t* weight;      // [experts][tiles][chunks][chunk bytes]
  const float2* weight_outer; // [experts]: of a tile's first and second 8 outputs
  const __nv_bfloat16* x;     // [tokens][k]
  const float* x_outer;       // [tokens] or null
  const int* slot;            // [rows]: slots ordered by expert
  const int* offset;          // [experts + 1]
  void* out;                  // plain: f32 [slots][16 tiles]; gated: bf16 [rows][8 tiles]
  int experts, tiles, k, top_k, epilogue;
};

constexpr int kMaxExperts = 512;

// Relative time of a tile by the number of 8-row groups that share it.
__device__ __forceinline__ int tile_cost(int groups) { return 6 + 2 * groups; }

template <int FP4> constexpr int kChunkBytes = FP4 ? 576 : 2048;

template <int FP4, int CHUNKS, int SPLIT, int NT, int STAGES>
struct Config {
  static constexpr int kThreads = SPLIT * 32;
  static constexpr int kStageBytes = CHUNKS * SPLIT * kChunkBytes<FP4>;
  static constexpr int kSumBytes = STAGES * SPLIT * NT * 512;
  static constexpr int kRows = NT * 8;
  static constexpr int kShared =
      STAGES * (kStageBytes + 16) + kSumBytes + (2 * kMaxExperts + 2) * 4;
};

// A block's share of all tiles, in units of tile_cost; walks it expert by expert.
struct Walk {
  const int* offset;
  const int* cost;
  int experts, tiles, rows, low, high;
  int expert, first, last, row, tile;

  // First expert of the share; every lane of a warp looks at other experts.
  __device__ __forceinline__ void start(int lane) {
    expert = experts;
    for (int e = lane; e < experts; e += 32)
      if (cost[e + 1] > low) { expert = e; break; }
    expert = __reduce_min_sync(~0u, expert);
    enter();
  }
  __device__ __forceinline__ bool done() const { return expert >= experts; }
  __device__ __forceinline__ void enter() {
    for (; expert < experts; expert++) {
      if (cost[expert] >= high) { expert = experts; return; }
      int total = cost[expert + 1] - cost[expert];
      if (total == 0) continue;
      int each = total / tiles;  // exact
      first = max(low - cost[expert] + each - 1, 0) / each;
      last = min((high - cost[expert] + each - 1) / each, tiles);
      if (first < last) break;
    }
    if (done()) return;
    row = offset[expert];
    tile = first;
  }
  // To the next tile; past the last one to the next pass over the expert, or the next expert.
  __device__ __forceinline__ void next() {
    if (done() || ++tile < last) return;
    row += rows;
    tile = first;
    if (row >= offset[expert + 1]) { expert++; enter(); }
  }
};

// One 64-wide chunk of K: the weights of 16 outputs times NT * 8 rows.
template <int FP4, int NT, int CHAINS>
__device__ __forceinline__ void chunk_product(const uint8_t* w, int lane, const uint4 (*x)[2],
                                              float (*acc)[4], int chain) {
  if constexpr (FP4) {
    uint4 codes = *reinterpret_cast<const uint4*>(w + lane * 16);
    uint32_t bytes = *reinterpret_cast<const uint16_t*>(w + 512 + lane * 2);
    uint32_t s0 = scale_pair<0, 0>(bytes), s1 = scale_pair<1, 1>(bytes);
    uint32_t a[4], b[4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      decode_word(half ? codes.y : codes.x, a);
      decode_word(half ? codes.w : codes.z, b);
#pragma unroll
      for (int i = 0; i < 4; i++) { a[i] = mul_bf16x2(a[i], s0); b[i] = mul_bf16x2(b[i], s1); }
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint4& v = x[j][half];
        float* c = acc[j * CHAINS + chain];
        mma(c, a[0], b[0], a[1], b[1], v.x, v.y);
        mma(c, a[2], b[2], a[3], b[3], v.z, v.w);
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < 4; step++) {
      uint4 a = *reinterpret_cast<const uint4*>(w + step * 512 + lane * 16);
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const uint4& v = x[j][step / 2];
        float* c = acc[j * CHAINS + chain];
        mma(c, a.x, a.y, a.z, a.w, step % 2 ? v.z : v.x, step % 2 ? v.w : v.y);
      }
    }
  }
}

__device__ __forceinline__ float gated(float gate, float up, int epilogue) {
  if (epilogue == kClamped) {
    gate = fminf(gate, 7.0f);
    up = fminf(fmaxf(up, -7.0f), 7.0f);
    return gate / (1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
  }
  return gate / (1.0f + __expf(-gate)) * up;
}

// The sums of one tile and 8 rows: scale, activate, write. Lane 4 r + . knows row r.
__device__ __forceinline__ void finish(const Args& p, const float4& c, int tile, int lane,
                                       int row, int rows_left, float2 outer, float x_outer,
                                       int slot) {
  int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int r = 2 * t + i;
    float scale = __shfl_sync(~0u, x_outer, r * 4);
    int target = __shfl_sync(~0u, slot, r * 4);
    if (r >= rows_left) continue;
    float first = (i ? c.y : c.x) * (outer.x * scale);
    float second = (i ? c.w : c.z) * (outer.y * scale);
    if (p.epilogue == kPlain) {
      float* out = static_cast<float*>(p.out) + (size_t)target * p.tiles * 16 + tile * 16 + g;
      out[0] = first;
      out[8] = second;
    } else {
      auto* out = static_cast<__nv_bfloat16*>(p.out);
      out[(size_t)(row + r) * p.tiles * 8 + tile * 8 + g] =
          __float2bfloat16(gated(first, second, p.epilogue));
    }
  }
}

template <int FP4, int CHUNKS, int SPLIT, int NTMAX, int STAGES, int DELAY>
struct Block {
  using C = Config<FP4, CHUNKS, SPLIT, NTMAX, STAGES>;
  const Args& p;
  uint8_t* stage;
  float4* sums;  // [stages][warps][NTMAX][32]
  uint64_t* full;
  uint64_t* done;
  uint64_t policy;
  int lane, warp, step, pending;  // pending: the step whose sums this warp will reduce
  Walk walk, ahead;  // where this warp computes, and STAGES steps ahead, where copies go
  int pending_tile;  // the tile that takes the pending step's stage

  __device__ __forceinline__ int tile_ahead() const {
    return ahead.done() ? -1 : ahead.expert * p.tiles + ahead.tile;
  }

  // One thread: the weights of tile `index` of all experts' tiles to stage `at`.
  __device__ __forceinline__ void copy(int at, int index) {
    if (index < 0) return;
    bulk_copy(stage + at * C::kStageBytes, p.weight + (size_t)index * C::kStageBytes,
              C::kStageBytes, full + at, policy);
  }

  // This warp's K-slice of NT * 8 rows as B operands; the rows' slots and outer scales.
  template <int NT>
  __device__ __forceinline__ void load_rows(int row, int rows, uint4 (*x)[NT][2], int* slot,
                                            float* x_outer) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < NT; j++) {
      int r = j * 8 + g;
      bool live = r < rows;
      slot[j] = live ? p.slot[row + r] : 0;
      // A gated product reads tokens; a plain one reads the rows of the former.
      int source = p.epilogue == kPlain ? row + r : slot[j] / p.top_k;
      x_outer[j] = (live && p.x_outer ? p.x_outer[source] : 1.0f) * (FP4 ? kUnscale : 1.0f);
      const __nv_bfloat16* from = p.x + (size_t)source * p.k;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        int k = (warp * CHUNKS + c) * 64 + t * 16;
        bool valid = live && k < p.k;
        const uint4* v = reinterpret_cast<const uint4*>(from + k);
        x[c][j][0] = valid ? __ldg(v) : make_uint4(0, 0, 0, 0);
        x[c][j][1] = valid ? __ldg(v + 1) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // All of this block's tiles of one expert for NT * 8 rows.
  template <int NT>
  __device__ __forceinline__ void run(int rows) {
    constexpr int CHAINS = NT == 1 && CHUNKS > 1 ? 2 : 1;
    uint4 x[CHUNKS][NT][2];
    int slot[NT];
    float x_outer[NT];
    int row = walk.row, tile = walk.first, last = walk.last;
    load_rows<NT>(row, rows, x, slot, x_outer);
    float2 outer = p.weight_outer[walk.expert];
    for (; tile < last; tile++, step++) {
      int at = step % STAGES;
      uint32_t parity = (step / STAGES) & 1;
      barrier_wait(full + at, parity);
      float acc[NT * CHAINS][4] = {};
      const uint8_t* w = stage + at * C::kStageBytes + warp * CHUNKS * kChunkBytes<FP4>;
#pragma unroll
      for (int c = 0; c < CHUNKS; c++)
        chunk_product<FP4, NT, CHAINS>(w + c * kChunkBytes<FP4>, lane, x[c], acc, c % CHAINS);
      float4* mine = sums + (at * SPLIT + warp) * NTMAX * 32 + lane;
#pragma unroll
      for (int j = 0; j < NT; j++) {
        float* a = acc[j * CHAINS];
        if (CHAINS == 2)
          for (int i = 0; i < 4; i++) a[i] += acc[CHAINS - 1][i];
        mine[j * 32] = make_float4(a[0], a[1], a[2], a[3]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(done + at);
      if (step % SPLIT == warp) { pending = step; pending_tile = tile_ahead(); }
      // Later than it could: the others have arrived by then, and do not wait for this warp.
      if (step - pending == DELAY)
        reduce<NT>(pending, tile - DELAY, row, rows, outer, x_outer, slot);
      ahead.next();
    }
    if (step - 1 - pending < DELAY)
      reduce<NT>(pending, last - (step - pending), row, rows, outer, x_outer, slot);
    pending = -SPLIT - DELAY;
  }

  // Finishes the tile of step `at_step` and refills its stage.
  template <int NT>
  __device__ __forceinline__ void reduce(int at_step, int tile, int row, int rows, float2 outer,
                                         const float* x_outer, const int* slot) {
    int at = at_step % STAGES;
    barrier_wait(done + at, (at_step / STAGES) & 1);
    float4 c[NT];
    const float4* all = sums + at * SPLIT * NTMAX * 32 + lane;
#pragma unroll
    for (int j = 0; j < NT; j++) {
      c[j] = all[j * 32];
#pragma unroll
      for (int s = 1; s < SPLIT; s++) {
        float4 d = all[(s * NTMAX + j) * 32];
        c[j].x += d.x; c[j].y += d.y; c[j].z += d.z; c[j].w += d.w;
      }
    }
    __syncwarp();  // the sums are read: their place may be used again with the stage
    if (lane == 0) copy(at, pending_tile);
#pragma unroll
    for (int j = 0; j < NT; j++)
      finish(p, c[j], tile, lane, row + j * 8, rows - j * 8, outer, x_outer[j], slot[j]);
  }

  __device__ __forceinline__ void run_all() {
    while (!walk.done()) {
      int rows = min(walk.offset[walk.expert + 1] - walk.row, C::kRows);
      if (NTMAX >= 4 && rows > 24) run<(NTMAX >= 4 ? 4 : 1)>(rows);
      else if (NTMAX >= 4 && rows > 16) run<(NTMAX >= 4 ? 3 : 1)>(rows);
      else if (NTMAX >= 2 && rows > 8) run<(NTMAX >= 2 ? 2 : 1)>(rows);
      else run<1>(rows);
      walk.tile = walk.last - 1;
      walk.next();
    }
  }
};

// cost[e]: prefix sums of the experts' costs, by one warp, a lane a run of experts.
template <class C>
__device__ void prefix_costs(const Args& p, const int* offset, int* cost, int lane) {
  int each = (p.experts + 31) / 32, e0 = min(lane * each, p.experts);
  int e1 = min(e0 + each, p.experts), mine = 0;
  for (int pass = 0; pass < 2; pass++) {
    for (int e = e0; e < e1; e++) {
      int rows = offset[e + 1] - offset[e], full = rows / C::kRows, rest = rows % C::kRows;
      mine += (full * tile_cost(C::kRows / 8) + (rest ? tile_cost((rest + 7) / 8) : 0)) * p.tiles;
      if (pass) cost[e + 1] = mine;
    }
    if (pass) return;
    int own = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      int other = __shfl_up_sync(~0u, mine, d);
      if (lane >= d) mine += other;
    }
    mine -= own;
    if (lane == 0) cost[0] = 0;
  }
}

template <int FP4, int CHUNKS, int SPLIT, int NT, int STAGES, int DELAY, int MINB>
__global__ void __launch_bounds__(SPLIT * 32, MINB) expert_matmul(const Args p) {
  using C = Config<FP4, CHUNKS, SPLIT, NT, STAGES>;
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* at = shared + STAGES * C::kStageBytes;
  float4* sums = reinterpret_cast<float4*>(at);
  uint64_t* full = reinterpret_cast<uint64_t*>(at += C::kSumBytes);
  uint64_t* done = full + STAGES;
  int* offset = reinterpret_cast<int*>(done + STAGES);
  int* cost = offset + kMaxExperts + 1;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x < STAGES) {
    barrier_init(full + threadIdx.x, 1);
    barrier_init(done + threadIdx.x, SPLIT);
  }
  barrier_init_fence();
  for (int e = threadIdx.x; e <= p.experts; e += C::kThreads) offset[e] = p.offset[e];
  __syncthreads();
  if (warp == 0) prefix_costs<C>(p, offset, cost, lane);
  __syncthreads();
  long long total = cost[p.experts];
  Walk walk{offset, cost, p.experts, p.tiles, C::kRows, (int)(total * blockIdx.x / gridDim.x),
            (int)(total * (blockIdx.x + 1) / gridDim.x)};
  walk.start(lane);
  Block<FP4, CHUNKS, SPLIT, NT, STAGES, DELAY> block{
      p, shared, sums, full, done, evict_first_policy(), lane, warp, 0, -SPLIT - DELAY, walk, walk, 0};
  for (int s = 0; s < STAGES; s++) {
    if (threadIdx.x == 0) block.copy(s, block.tile_ahead());
    block.ahead.next();
  }
  block.run_all();
}

template <int FP4, int CHUNKS, int SPLIT, int NT, int STAGES, int DELAY, int MINB>
cudaError_t launch(const Args& args, cudaStream_t stream) {
  using C = Config<FP4, CHUNKS, SPLIT, NT, STAGES>;
  static_assert(MINB * (C::kShared + 1024) <= 233472, "blocks do not fit a multiprocessor");
  static_assert(DELAY < SPLIT && DELAY < STAGES, "a warp finishes one tile at a time");
  auto kernel = expert_matmul<FP4, CHUNKS, SPLIT, NT, STAGES, DELAY, MINB>;
  static cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared);
  if (ready != cudaSuccess) return ready;
  kernel<<<multiprocessors() * MINB, C::kThreads, C::kShared, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace trace_jax

// --- the call from XLA ------------------------------------------------------------------

using Launch = cudaError_t (*)(const trace_jax::Args&, cudaStream_t);

struct Variant {
  int fp4, chunks, rows;  // chunks of 64 along K; rows of an expert that one pass covers
  Launch launch;
};

#define VARIANT(fp4, chunks, split, nt, stages, delay, minb) \
  {fp4, (chunks) * (split), (nt) * 8, \
   trace_jax::launch<fp4, chunks, split, nt, stages, delay, minb>}

// The order is that of HOPPER_VARIANTS in expert_matmul.py.
static const Variant kVariants[] = {
    // NVFP4: chunks a warp, warps, 8-row groups, stages, delay, blocks a multiprocessor
    VARIANT(1, 1, 4, 2, 4, 1, 4), VARIANT(1, 2, 4, 2, 4, 1, 4), VARIANT(1, 3, 4, 2, 4, 1, 4),
    VARIANT(1, 2, 8, 2, 4, 1, 2), VARIANT(1, 3, 8, 2, 4, 1, 2), VARIANT(1, 4, 8, 1, 4, 1, 2),
    VARIANT(1, 8, 4, 1, 3, 1, 3), VARIANT(1, 4, 8, 2, 4, 2, 2), VARIANT(1, 6, 8, 1, 3, 1, 2),
    VARIANT(1, 8, 8, 1, 5, 1, 1),
    // BF16
    VARIANT(0, 1, 4, 2, 4, 1, 2), VARIANT(0, 2, 4, 2, 4, 1, 2), VARIANT(0, 3, 4, 1, 4, 1, 2),
    VARIANT(0, 3, 4, 4, 3, 1, 2), VARIANT(0, 2, 8, 4, 3, 1, 1), VARIANT(0, 3, 8, 2, 3, 1, 1),
    VARIANT(0, 4, 8, 4, 2, 0, 1), VARIANT(0, 6, 8, 1, 2, 0, 1),
};

static ffi::Error ExpertMatmul(cudaStream_t stream, ffi::Buffer<ffi::U8> weight,
                               ffi::Buffer<ffi::F32> weight_outer, ffi::Buffer<ffi::BF16> x,
                               ffi::Buffer<ffi::F32> x_outer, ffi::Buffer<ffi::S32> slot,
                               ffi::Buffer<ffi::S32> offset, ffi::Result<ffi::AnyBuffer> out,
                               int64_t variant, int64_t epilogue, int64_t tiles, int64_t top_k) {
  trace_jax::Args args{};
  args.weight = weight.typed_data();
  args.weight_outer = reinterpret_cast<const float2*>(weight_outer.typed_data());
  args.x = reinterpret_cast<const __nv_bfloat16*>(x.typed_data());
  args.x_outer = x_outer.element_count() ? x_outer.typed_data() : nullptr;
  args.slot = slot.typed_data();
  args.offset = offset.typed_data();
  args.out = out->untyped_data();
  args.experts = static_cast<int>(offset.element_count()) - 1;
  args.tiles = static_cast<int>(tiles);
  args.k = static_cast<int>(x.dimensions().back());
  args.top_k = static_cast<int>(top_k);
  args.epilogue = static_cast<int>(epilogue);
  if (variant < 0 || variant >= static_cast<int64_t>(sizeof(kVariants) / sizeof(Variant)))
    return ffi::Error::InvalidArgument("expert_matmul: no such variant");
  cudaError_t error = kVariants[variant].launch(args, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_expert_matmul, ExpertMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("epilogue")
                                  .Attr<int64_t>("tiles")
                                  .Attr<int64_t>("top_k"),
                              {ffi::Traits::kCmdBufferCompatible});
