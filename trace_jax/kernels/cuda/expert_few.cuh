// Few rows an expert: rows stay in registers, for expert_matmul.cu.
//
// Persistent blocks, each with one contiguous share of the weights of all experts that have
// rows. Tiles of 16 outputs stream into shared memory by bulk copies, several ahead; a tile's K
// is split over SPLIT warps, each of which keeps its part of up to 8 * NT rows in registers as
// the tensor cores' B operand for as long as the expert lasts. Partial sums meet in shared memory;
// the warps take turns to finish a tile and to refill its stage, and no other warp waits for that.
// Nothing is gathered ahead. A row's sum runs in the same order whatever the other rows are.
#pragma once
#include "common.cuh"
#include "expert_schedule.cuh"
#include "fake_quantize.cuh"

namespace trace_jax {

template <int FP4_, int CHUNKS_, int SPLIT_, int NT_, int STAGES_, int MINB_, bool EARLY_>
struct FewConfig {
  static constexpr int FP4 = FP4_, CHUNKS = CHUNKS_, SPLIT = SPLIT_, NT = NT_, STAGES = STAGES_;
  static constexpr int MINB = MINB_;  // blocks a multiprocessor
  // Whether the next kernel may start as soon as this one's blocks run. It gains 1 to 7 %, or
  // loses 9 to 31 %, by the shape of the blocks (benchmarks/kernels_log.md; the cause is not known).
  static constexpr bool EARLY = EARLY_;
  static constexpr int kThreads = SPLIT * 32, kRows = NT * 8;
  static constexpr int kPartBytes = CHUNKS * kChunkBytes<FP4>;  // of a warp
  static constexpr int kStageBytes = SPLIT * kPartBytes;        // a whole tile
  static constexpr int kSumBytes = STAGES * SPLIT * NT * 512;
  static constexpr int kShared =
      STAGES * (kStageBytes + 16) + kSumBytes + (2 * kMaxExperts + 2) * 4;
};

// A block's share of all tiles, in units of their relative time; walks it expert by expert.
template <class C>
struct FewWalk {
  const int *offset, *cost;
  int experts, tiles, low, high;
  int expert, first, last, row, tile;

  static __device__ __forceinline__ int each(int rows) {
    int full = rows / C::kRows, rest = rows % C::kRows;
    return full * (6 + 2 * C::NT) + (rest ? 6 + 2 * ceil_div(rest, 8) : 0);
  }
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
      int step = each(offset[expert + 1] - offset[expert]);
      if (step == 0) continue;
      first = ceil_div(max(low - cost[expert], 0), step);
      last = min(ceil_div(high - cost[expert], step), tiles);
      if (first < last) break;
    }
    if (done()) return;
    row = offset[expert];
    tile = first;
  }
  // To the next tile; past the last one to the next pass over the expert, or the next expert.
  __device__ __forceinline__ void next() {
    if (done() || ++tile < last) return;
    row += C::kRows;
    tile = first;
    if (row >= offset[expert + 1]) { expert++; enter(); }
  }
};

template <class C>
struct FewBlock {
  static constexpr int CHAINS = C::CHUNKS > 1 ? 2 : 1;
  const Args& p;
  uint8_t* stage;
  float4* sums;  // [stages][warps][NT][32]
  uint64_t *full, *done;
  uint64_t policy;
  int lane, warp, step, pending;  // pending: the step whose sums this warp will add
  FewWalk<C> walk, ahead;  // where this warp computes, and STAGES steps ahead, where copies go
  int pending_tile;        // the tile that takes the pending step's stage
  bool primed;

  __device__ __forceinline__ int tile_ahead() const {
    return ahead.done() ? -1 : ahead.expert * p.tiles + ahead.tile;
  }
  // One thread: the weights of tile `index` of all experts' tiles to stage `at`.
  __device__ __forceinline__ void copy(int at, int index) const {
    if (index < 0) return;
    bulk_copy(stage + at * C::kStageBytes, p.weight + (size_t)index * C::kStageBytes,
              C::kStageBytes, full + at, policy);
  }

  // The first copies of all stages.
  __device__ __forceinline__ void prime() {
    primed = true;
    for (int s = 0; s < C::STAGES; s++) {
      if (threadIdx.x == 0) copy(s, tile_ahead());
      ahead.next();
    }
  }

  // This warp's part of K of NT * 8 rows as B operands; the rows' targets and outer scales.
  template <int NT>
  __device__ __forceinline__ void load_rows(int row, int rows, uint4 (*x)[NT][2], int* target,
                                            float* scale) const {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < NT; j++) {
      int r = j * 8 + g;
      bool live = r < rows;
      int slot = live ? p.slot[row + r] : 0;
      // A gated product reads tokens; a plain one reads the rows of the former.
      int source = p.epilogue == kPlain ? row + r : slot / p.top_k;
      target[j] = p.epilogue == kPlain ? slot : row + r;
      scale[j] = (live && p.x_outer ? p.x_outer[source] : 1.0f) * (C::FP4 ? kUnscale : 1.0f);
      const __nv_bfloat16* from = p.x + (size_t)source * p.k;
#pragma unroll
      for (int c = 0; c < C::CHUNKS; c++) {
        int k = (warp * C::CHUNKS + c) * 64 + t * 16;
        bool valid = live && k < p.k;
        const uint4* v = reinterpret_cast<const uint4*>(from + k);
        x[c][j][0] = valid ? v[0] : make_uint4(0, 0, 0, 0);
        x[c][j][1] = valid ? v[1] : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // All of this block's tiles of one expert for NT * 8 rows.
  template <int NT>
  __device__ __forceinline__ void run(int rows) {
    uint4 x[C::CHUNKS][NT][2];
    int target[NT], tile = walk.first, last = walk.last, expert = walk.expert;
    float scale[NT];
    load_rows<NT>(walk.row, rows, x, target, scale);
    // Not before: the rows would wait for the memory behind all of these weights.
    if (!primed) prime();
    float2 outer = __ldg(p.weight_outer + expert);
    for (; tile < last; tile++, step++) {
      int at = step % C::STAGES;
      barrier_wait(full + at, (step / C::STAGES) & 1);
      float acc[CHAINS][NT][4] = {};
      const uint8_t* w = stage + at * C::kStageBytes + warp * C::kPartBytes;
#pragma unroll
      for (int c = 0; c < C::CHUNKS; c++) {
        uint32_t a[16];
        decode(load_stored<C::FP4>(w + c * kChunkBytes<C::FP4>, lane), a);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int j = 0; j < NT; j++) {
            const uint32_t* h = a + half * 8;
            const uint4& v = x[c][j][half];
            float* sum = acc[c % CHAINS][j];
            mma(sum, h[0], h[1], h[2], h[3], v.x, v.y);
            mma(sum, h[4], h[5], h[6], h[7], v.z, v.w);
          }
      }
      float4* mine = sums + (at * C::SPLIT + warp) * C::NT * 32 + lane;
#pragma unroll
      for (int j = 0; j < NT; j++) {
        float* a = acc[0][j];
        if constexpr (CHAINS == 2)
          for (int i = 0; i < 4; i++) a[i] += acc[1][j][i];
        mine[j * 32] = make_float4(a[0], a[1], a[2], a[3]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(done + at);
      if (step % C::SPLIT == warp) {
        pending = step;
        pending_tile = tile_ahead();
      }
      // A step later than it could: the others have arrived by then, and do not wait for this warp.
      if (step - pending == 1) reduce<NT>(expert, tile - 1, rows, outer, scale, target);
      ahead.next();
    }
    if (step - 1 == pending) reduce<NT>(expert, last - 1, rows, outer, scale, target);
    pending = -2;
  }

  // Finishes the pending tile and refills its stage.
  template <int NT>
  __device__ __forceinline__ void reduce(int expert, int tile, int rows, float2 outer,
                                         const float* scale, const int* target) const {
    int at = pending % C::STAGES;
    barrier_wait(done + at, (pending / C::STAGES) & 1);
    float4 c[NT];
    const float4* all = sums + at * C::SPLIT * C::NT * 32 + lane;
#pragma unroll
    for (int j = 0; j < NT; j++) {
      c[j] = all[j * 32];
#pragma unroll
      for (int s = 1; s < C::SPLIT; s++) {
        float4 d = all[(s * C::NT + j) * 32];
        c[j].x += d.x; c[j].y += d.y; c[j].z += d.z; c[j].w += d.w;
      }
    }
    __syncwarp();  // the sums are read: their place may be used again with the stage
    if (lane == 0) copy(at, pending_tile);
    float2 bias = make_float2(0.0f, 0.0f);
    if (p.bias) {
      const float* from = p.bias + ((size_t)expert * p.tiles + tile) * 16 + (lane >> 2);
      bias = make_float2(__ldg(from), __ldg(from + 8));
    }
#pragma unroll
    for (int j = 0; j < NT; j++)
      write(c[j], tile, rows - j * 8, outer, bias, scale[j], target[j]);
  }

  // The sums of one tile and 8 rows: scale, activate, write. Lane 4 r + . knows row r.
  __device__ __forceinline__ void write(const float4& c, int tile, int rows, float2 outer,
                                        float2 bias, float scale, int target) const {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int r = 2 * t + i;
      float s = __shfl_sync(~0u, scale, r * 4);
      size_t to = __shfl_sync(~0u, target, r * 4);
      if (r >= rows) continue;
      float first = fmaf(i ? c.y : c.x, outer.x * s, bias.x);
      float second = fmaf(i ? c.w : c.z, outer.y * s, bias.y);
      if (p.epilogue == kPlain) {
        float* out = static_cast<float*>(p.out) + to * p.tiles * 16 + tile * 16 + g;
        out[0] = first;
        out[8] = second;
      } else {
        static_cast<__nv_bfloat16*>(p.out)[to * p.tiles * 8 + tile * 8 + g] =
            __float2bfloat16(gated(first, second, p.epilogue));
      }
    }
  }

  __device__ __forceinline__ void run_all() {
    while (!walk.done()) {
      int rows = min(walk.offset[walk.expert + 1] - walk.row, C::kRows);
      if (C::NT > 1 && rows > 8) run<C::NT>(rows);
      else run<1>(rows);
      walk.tile = walk.last - 1;
      walk.next();
    }
  }
};

// cost[e]: prefix sums of the experts' costs, by one warp, a lane a run of experts.
template <class C>
__device__ __forceinline__ void few_costs(int experts, int tiles, const int* offset, int* cost,
                                          int lane) {
  int each = ceil_div(experts, 32), begin = min(lane * each, experts);
  int end = min(begin + each, experts), mine = 0;
  for (int e = begin; e < end; e++) mine += FewWalk<C>::each(offset[e + 1] - offset[e]) * tiles;
  int sum = inclusive_sum(mine, lane) - mine;
  if (lane == 0) cost[0] = 0;
  for (int e = begin; e < end; e++)
    cost[e + 1] = sum += FewWalk<C>::each(offset[e + 1] - offset[e]) * tiles;
}

// `routed`: a kernel launched before has waited for the routing, so that weights are fetched
// while the rows are still made.
template <class C>
__global__ void __launch_bounds__(C::kThreads, C::MINB)
    expert_few(const __grid_constant__ Args p, bool routed) {
  extern __shared__ __align__(128) uint8_t shared[];
  uint8_t* at = shared + C::STAGES * C::kStageBytes;
  float4* sums = reinterpret_cast<float4*>(at);
  uint64_t* full = reinterpret_cast<uint64_t*>(at += C::kSumBytes);
  uint64_t* done = full + C::STAGES;
  int* offset = reinterpret_cast<int*>(done + C::STAGES);
  int* cost = offset + kMaxExperts + 1;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x < C::STAGES) {
    barrier_init(full + threadIdx.x, 1);
    barrier_init(done + threadIdx.x, C::SPLIT);
  }
  barrier_init_fence();
  if (!routed) grid_wait();
  for (int e = threadIdx.x; e <= p.experts; e += C::kThreads) offset[e] = p.offset[e];
  __syncthreads();
  if (warp == 0) few_costs<C>(p.experts, p.tiles, offset, cost, lane);
  __syncthreads();
  long long total = cost[p.experts];
  FewWalk<C> walk{offset, cost, p.experts, p.tiles, (int)(total * blockIdx.x / gridDim.x),
                  (int)(total * (blockIdx.x + 1) / gridDim.x), 0, 0, 0, 0, 0};
  walk.start(lane);
  FewBlock<C> block{p, shared, sums, full, done, evict_first_policy(), lane, warp, 0, -2,
                    walk, walk, 0, false};
  if (C::EARLY) grid_release();
  if (routed) {
    block.prime();
    grid_wait();
  }
  block.run_all();
}

// Rows of the gated product, quantized where the next one reads them. A warp a row.
template <int UNITS>
__global__ void __launch_bounds__(128) quantize_mid(const __grid_constant__ FakeArgs fake) {
  int lane = threadIdx.x & 31, row = blockIdx.x * 4 + (threadIdx.x >> 5);
  grid_release();  // what follows reads the routing ahead, which its predecessor has waited for
  grid_wait();
  if (row >= fake.rows) return;
  int units = fake.width / 8;
  uint4 x[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = lane + 32 * i;
    x[i] = u < units ? fake.x[(size_t)row * units + u] : make_uint4(0, 0, 0, 0);
  }
  quantize_row<1, UNITS>(fake, row, lane, x, [&](int u, const uint4& v) {
    fake.value[(size_t)row * units + u] = v;
  });
}

template <class C>
cudaError_t launch_few_of(const Args& args, bool routed, cudaStream_t stream) {
  static_assert(C::MINB * (C::kShared + 1024) <= 233472, "blocks do not fit a multiprocessor");
  static_assert(C::STAGES > 1 && C::SPLIT > 1, "a warp finishes one tile at a time");
  auto kernel = expert_few<C>;
  static cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared);
  if (ready != cudaSuccess) return ready;
  return launch_dependent(kernel, multiprocessors() * C::MINB, C::kThreads, C::kShared, stream,
                          args, routed);
}

// As `launch`, in one launch or, with `fake`, two.
template <class GateUp, class Down>
cudaError_t launch_few(const Args& args, const FakeArgs* fake, cudaStream_t stream) {
  Args a = args;
  if (fake) {
    FakeArgs f = *fake;
    f.value = reinterpret_cast<uint4*>(args.packed);
    a.x = reinterpret_cast<const __nv_bfloat16*>(args.packed);
    auto quantize = f.width <= 256    ? quantize_mid<1>
                    : f.width <= 768  ? quantize_mid<3>
                    : f.width <= 1536 ? quantize_mid<6>
                                      : quantize_mid<12>;
    cudaError_t error = launch_dependent(quantize, (f.rows + 3) / 4, 128, 0, stream, f);
    if (error != cudaSuccess) return error;
  }
  if (a.chunks == GateUp::CHUNKS * GateUp::SPLIT) return launch_few_of<GateUp>(a, fake, stream);
  if (a.chunks == Down::CHUNKS * Down::SPLIT) return launch_few_of<Down>(a, fake, stream);
  return cudaErrorInvalidValue;
}

}  // namespace trace_jax
