// Routed rows times expert weights (NVFP4 or BF16) on Hopper: one product in two launches, or a
// layer of experts (gate and up, activation, quantization, down) in four that overlap.
//
// `pack_rows` gathers the rows by expert into the order in which the tensor cores read them;
// `pack_mid` quantizes what lies between the two products on the way.
// `expert_matmul` runs persistent blocks, one a multiprocessor, each with an equal share of the
// work of all experts that have rows. A unit of work is up to 4 * WGS tiles of 16 outputs times
// up to NMAX rows of one expert; the warp that fetches rows says which unit a stage belongs to. K streams through a ring of stages: four warps fetch weights
// and rows by bulk copies, WGS warpgroups multiply, one tile a warp. Weights are laid out so that
// a lane's 16-byte load is its A operand; up to 16 rows use mma.sync, more use wgmma with the
// decoded weights in registers, so that decoding is paid once for all rows of a unit.
// Few rows of some K have a kernel of their own, which gathers nothing: expert_few.cuh.
//
// A row's result does not depend on the other rows: however it is computed, its sum over K runs in
// one chain of tensor-core products.
#include "common.cuh"
#include "epilogue.cuh"
#include "expert_schedule.cuh"
#include "fake_quantize.cuh"
#include "wgmma.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

struct Args {
  const uint8_t* weight;       // [experts][tiles][chunks][chunk bytes]
  const float2* weight_outer;  // [experts]: of a tile's first and second 8 outputs
  const float* bias;           // [experts][tiles][16] or null
  const __nv_bfloat16* x;      // [tokens][k]
  const float* x_outer;        // [tokens] or null
  const int* slot;             // [rows]: slots ordered by expert
  const int* offset;           // [experts + 1]
  void* out;                   // plain: f32 [slots][16 tiles]; gated: bf16 [rows][8 tiles]
  uint8_t* packed;             // [groups][chunks][1024], a group 8 rows of an expert
  int2* info;                  // [groups][8]: where a row's results go, and its scale
  int experts, tiles, chunks, k, rows, top_k, epilogue;
};

constexpr int kInfoRing = 8;       // units whose row information is kept; more than stages + 1
constexpr int kWeightWarps = 3;    // a bulk copy costs its warp about a hundred cycles

template <int FP4> constexpr int kChunkBytes = FP4 ? 576 : 2048;

template <int FP4_, int WGS_, int NMAX_, int KS_, int STAGES_>
struct Config {
  static constexpr int FP4 = FP4_, WGS = WGS_, NMAX = NMAX_, KS = KS_, STAGES = STAGES_;
  static constexpr int kTiles = WGS * 4;  // of 16 outputs, one a warp
  static constexpr int kConsumers = WGS * 128;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kTileBytes = KS * kChunkBytes<FP4>;
  static constexpr int kWeightBytes = kTiles * kTileBytes;
  static constexpr int kGroupBytes = KS * 1024;  // 8 rows of a stage
  static constexpr int kStageBytes = kWeightBytes + NMAX / 8 * kGroupBytes;
  static constexpr int kInfoBytes = kInfoRing * NMAX * 8;
  static constexpr int kUnitBytes = kInfoRing * sizeof(Unit);
  static constexpr int kShared =
      STAGES * (kStageBytes + 16) + kInfoBytes + kUnitBytes + Table::kBytes;
};

// A ring position and the parity of its barriers.
template <int STAGES>
struct Cursor {
  int at = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++at == STAGES) { at = 0; parity ^= 1; }
  }
};

template <class C>
struct Shared {
  uint8_t* stages;
  int2* info;   // [kInfoRing][NMAX]
  Unit* units;  // [kInfoRing]; one without rows ends them
  uint64_t *full, *empty;
  void* table;

  __device__ __forceinline__ explicit Shared(uint8_t* at) {
    stages = at;
    info = reinterpret_cast<int2*>(at += C::STAGES * C::kStageBytes);
    units = reinterpret_cast<Unit*>(at += C::kInfoBytes);
    full = reinterpret_cast<uint64_t*>(at += C::kUnitBytes);
    empty = full + C::STAGES;
    table = empty + C::STAGES;
  }
};

// --- producers -------------------------------------------------------------------------------

// A warp takes one group and kPackChunks chunks of K: lane 4 r + t reads the 16 values of row r
// from 16 t on. For every 16 of K a group holds [half][row][4 pairs], in the weights' order of K.
constexpr int kPackChunks = 4;

__global__ void __launch_bounds__(128) pack_rows(const __grid_constant__ Args p) {
  __shared__ int offset[kMaxExperts + 1];
  int lane = threadIdx.x & 31, parts = ceil_div(p.chunks, kPackChunks);
  int item = blockIdx.x * 4 + (threadIdx.x >> 5), group = item / parts;
  int chunk = item % parts * kPackChunks;
  grid_wait();
  grid_release();
  for (int e = threadIdx.x; e <= p.experts; e += 128) offset[e] = p.offset[e];
  __syncthreads();
  int before = 0;  // experts whose groups end before this one
  for (int e = lane; e < p.experts; e += 32) before += first_group(e + 1, offset[e + 1]) <= group;
  int expert = __reduce_add_sync(~0u, before);
  if (expert >= p.experts) return;
  int row = offset[expert] + (group - first_group(expert, offset[expert])) * 8 + lane / 4;
  if (row >= offset[expert + 1]) return;
  int slot = p.slot[row];
  // A gated product reads tokens; a plain one reads the rows of the former.
  int source = p.epilogue == kPlain ? row : slot / p.top_k;
  if (chunk == 0 && lane % 4 == 0)
    p.info[group * 8 + lane / 4] = make_int2(p.epilogue == kPlain ? slot : row,
                                             __float_as_int(p.x_outer ? p.x_outer[source] : 1.0f));
  int k = chunk * 64 + lane % 4 * 16;
  const uint4* from = reinterpret_cast<const uint4*>(p.x + (size_t)source * p.k + k);
  uint4 v[kPackChunks][2] = {};
#pragma unroll
  for (int c = 0; c < kPackChunks; c++) {
    if (k + c * 64 >= p.k) continue;
    v[c][0] = __ldg(from + c * 8);
    v[c][1] = __ldg(from + c * 8 + 1);
  }
  uint32_t* to =
      reinterpret_cast<uint32_t*>(p.packed + ((size_t)group * p.chunks + chunk) * 1024) + lane;
#pragma unroll
  for (int c = 0; c < kPackChunks; c++) {
    if (chunk + c >= p.chunks) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t* at = to + c * 256 + half * 128;
      at[0] = v[c][half].x;
      at[32] = v[c][half].y;
      at[64] = v[c][half].z;
      at[96] = v[c][half].w;
    }
  }
}

// Rows of the gated product, quantized (NVFP4, a power-of-two outer scale a row) and packed for the
// next one; their guidance as `fake` asks for it. A warp a row.
template <int UNITS>
__global__ void __launch_bounds__(128) pack_mid(const __grid_constant__ Args p,
                                                const __grid_constant__ FakeArgs fake) {
  int lane = threadIdx.x & 31, row = blockIdx.x * 4 + (threadIdx.x >> 5);
  grid_wait();
  grid_release();
  if (row >= p.rows) return;
  int before = 0;  // experts whose rows end before this one
  for (int e = lane; e < p.experts; e += 32) before += p.offset[e + 1] <= row;
  int expert = __reduce_add_sync(~0u, before), first = p.offset[expert];
  int group = first_group(expert, first) + (row - first) / 8, within = (row - first) % 8;
  if (lane == 0)
    p.info[group * 8 + within] = make_int2(p.slot[row], __float_as_int(1.0f));
  int units = fake.width / 8;
  uint4 x[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int u = lane + 32 * i;
    x[i] = u < units ? fake.x[(size_t)row * units + u] : make_uint4(0, 0, 0, 0);
  }
  uint32_t* to = reinterpret_cast<uint32_t*>(p.packed + (size_t)group * p.chunks * 1024);
  // Where K ends inside a chunk, its rest must be zero.
  for (int u = units + lane; u < p.chunks * 8; u += 32) {
    uint32_t* at = to + u / 8 * 256 + u % 2 * 128 + within * 4 + u % 8 / 2;
    at[0] = at[32] = at[64] = at[96] = 0;
  }
  quantize_row<1, UNITS>(fake, row, lane, x, [&](int u, const uint4& v) {
    uint32_t* at = to + u / 8 * 256 + u % 2 * 128 + within * 4 + u % 8 / 2;
    at[0] = v.x;
    at[32] = v.y;
    at[64] = v.z;
    at[96] = v.w;
  });
}

// One of kWeightWarps: every unit's weights, a lane a tile.
template <class C>
__device__ __forceinline__ void fetch_weights(const Args& p, const Shared<C>& s, Deal<C> walk,
                                              int warp) {
  constexpr int bytes = kChunkBytes<C::FP4>;
  int lane = threadIdx.x & 31, tile = lane * kWeightWarps + warp;
  uint64_t once = evict_first_policy(), again = evict_last_policy();
  Cursor<C::STAGES> ring;
  Unit u;
  int count = 0;
  while (walk.next(u)) {
    const uint8_t* from =
        p.weight + (size_t)(u.expert * p.tiles + u.tile + tile) * p.chunks * bytes;
    int tiles = (u.tiles - warp + kWeightWarps - 1) / kWeightWarps;  // of this warp
    for (int chunk = 0; chunk < p.chunks; chunk += C::KS, ring.advance()) {
      int size = min(C::KS, p.chunks - chunk) * bytes;
      barrier_wait(s.empty + ring.at, ring.parity ^ 1);
      // The first rows would wait for the memory behind more weights than one stage.
      if (count++ == 1) named_barrier(2, 128);
      if (lane == 0) barrier_expect(s.full + ring.at, tiles * size);
      __syncwarp();
      if (lane < tiles)
        bulk_load(s.stages + ring.at * C::kStageBytes + tile * C::kTileBytes,
                  from + (size_t)chunk * bytes, size, s.full + ring.at, u.shared ? again : once);
    }
  }
  if (count < 2) named_barrier(2, 128);
  barrier_wait(s.empty + ring.at, ring.parity ^ 1);
  if (lane == 0) barrier_arrive(s.full + ring.at);
}

// One warp: every unit's packed rows, a lane a group, and with its first stage their information.
template <class C>
__device__ __forceinline__ void fetch_rows(const Args& p, const Shared<C>& s, Deal<C> walk) {
  int lane = threadIdx.x & 31, index = 0;
  uint64_t policy = evict_last_policy();
  Cursor<C::STAGES> ring;
  Unit u;
  int count = 0;
  bool more = walk.next(u);
  grid_wait();
  async_proxy_fence();
  for (; more; more = walk.next(u)) {
    int groups = ceil_div(u.rows, 8);
    const uint8_t* from = p.packed + (size_t)(u.group + lane) * p.chunks * 1024;
    for (int chunk = 0; chunk < p.chunks; chunk += C::KS, ring.advance()) {
      int size = min(C::KS, p.chunks - chunk) * 1024;
      barrier_wait(s.empty + ring.at, ring.parity ^ 1);
      if (lane == 0) {
        if (chunk == 0) s.units[index] = u;
        barrier_expect(s.full + ring.at, groups * (size + (chunk == 0 ? 64 : 0)));
      }
      __syncwarp();
      if (lane < groups)
        bulk_load(s.stages + ring.at * C::kStageBytes + C::kWeightBytes + lane * C::kGroupBytes,
                  from + chunk * 1024, size, s.full + ring.at, policy);
      if (chunk == 0 && lane == 31)
        bulk_load(s.info + index * C::NMAX, p.info + u.group * 8, groups * 64, s.full + ring.at,
                  policy);
      if (++count == C::STAGES) named_barrier(2, 128);
    }
    index = (index + 1) % kInfoRing;
  }
  if (count < C::STAGES) named_barrier(2, 128);
  barrier_wait(s.empty + ring.at, ring.parity ^ 1);
  if (lane == 0) {
    s.units[index].rows = 0;
    barrier_arrive(s.full + ring.at);
  }
}

// --- consumers -------------------------------------------------------------------------------

// A lane's stored weights of one 64-wide chunk of K.
template <int FP4>
struct Stored {
  uint4 v[FP4 ? 1 : 4];
  uint32_t scales[2];
};

template <int FP4>
__device__ __forceinline__ Stored<FP4> load_stored(const uint8_t* w, int lane) {
  Stored<FP4> s;
#pragma unroll
  for (int i = 0; i < (FP4 ? 1 : 4); i++)
    s.v[i] = *reinterpret_cast<const uint4*>(w + i * 512 + lane * 16);
  // Two loads of a byte: taking a pair apart costs two integer instructions.
  if (FP4) {
    s.scales[0] = w[512 + lane];
    s.scales[1] = w[544 + lane];
  }
  return s;
}

// The A operands for one chunk: 4 steps of 4 registers.
template <int FP4>
__device__ __forceinline__ void decode(const Stored<FP4>& s, uint32_t* a) {
  if constexpr (FP4) {
    const uint4& codes = s.v[0];
    uint32_t s0 = scale_twice(s.scales[0]), s1 = scale_twice(s.scales[1]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t first[4], second[4];
      decode_weights(half ? codes.y : codes.x, first);
      decode_weights(half ? codes.w : codes.z, second);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int at = half * 8 + i / 2 * 4 + i % 2 * 2;
        a[at] = mul_bf16x2(first[i], s0);
        a[at + 1] = mul_bf16x2(second[i], s1);
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < 4; step++) {
      const uint4& v = s.v[step];
      a[step * 4] = v.x; a[step * 4 + 1] = v.y; a[step * 4 + 2] = v.z; a[step * 4 + 3] = v.w;
    }
  }
}

template <class C>
struct Consumer {
  const Args& p;
  const Shared<C>& s;
  int lane, warp;
  Cursor<C::STAGES> ring;
  int index = 0;  // of the unit, in the ring of row information

  __device__ __forceinline__ const uint8_t* stage() const {
    return s.stages + ring.at * C::kStageBytes;
  }
  __device__ __forceinline__ void wait() const { barrier_wait(s.full + ring.at, ring.parity); }
  __device__ __forceinline__ void release(int at) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(s.empty + at);
  }

  // Outer scales and biases of a lane's two outputs of a tile. Loaded at the start of a unit and
  // not touched before its end: while weights stream, a load takes thousands of cycles.
  __device__ __forceinline__ float4 factors(const Unit& u, int tile) const {
    float2 outer = __ldg(p.weight_outer + u.expert), bias = make_float2(0.0f, 0.0f);
    if (p.bias) {
      const float* from = p.bias + ((size_t)u.expert * p.tiles + u.tile + tile) * 16 + (lane >> 2);
      bias = make_float2(__ldg(from), __ldg(from + 8));
    }
    return make_float4(outer.x, outer.y, bias.x, bias.y);
  }

  // Scales, activates and writes a tile's sums for GROUPS * 8 rows.
  template <int GROUPS>
  __device__ __forceinline__ void finish(const Unit& u, int tile, const float4& f,
                                         const float (*acc)[4]) const {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        int r = j * 8 + 2 * t + i;
        if (r >= u.rows) continue;
        int2 info = s.info[index * C::NMAX + r];
        float scale = __int_as_float(info.y) * (C::FP4 ? kUnscale : 1.0f);
        float first = fmaf(acc[j][i], f.x * scale, f.z);
        float second = fmaf(acc[j][i + 2], f.y * scale, f.w);
        if (p.epilogue == kPlain) {
          float* out = static_cast<float*>(p.out) + (size_t)info.x * p.tiles * 16 + tile * 16 + g;
          out[0] = first;
          out[8] = second;
        } else {
          auto* out = static_cast<__nv_bfloat16*>(p.out);
          out[(size_t)info.x * p.tiles * 8 + tile * 8 + g] =
              __float2bfloat16(gated(first, second, p.epilogue));
        }
      }
    }
  }

  // What a warp reads for one chunk and up to 16 rows.
  template <int GROUPS>
  struct Chunk {
    Stored<C::FP4> weights;
    uint4 rows[GROUPS][2];
  };
  template <int GROUPS>
  __device__ __forceinline__ Chunk<GROUPS> load_chunk(int c) const {
    Chunk<GROUPS> v;
    v.weights =
        load_stored<C::FP4>(stage() + warp * C::kTileBytes + c * kChunkBytes<C::FP4>, lane);
    uint32_t rows = shared_address(stage() + C::kWeightBytes) + c * 1024 + lane * 16;
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        v.rows[j][half] = load_matrices(rows + j * C::kGroupBytes + half * 512);
    return v;
  }
  template <int GROUPS>
  __device__ __forceinline__ void chunk_product(const Chunk<GROUPS>& v, float (*acc)[4]) const {
    uint32_t a[16];
    decode(v.weights, a);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32_t* w = a + half * 8;
#pragma unroll
      for (int j = 0; j < GROUPS; j++) {
        const uint4& b = v.rows[j][half];
        mma(acc[j], w[0], w[1], w[2], w[3], b.x, b.y);
        mma(acc[j], w[4], w[5], w[6], w[7], b.z, b.w);
      }
    }
  }

  // A unit of up to 16 rows.
  template <int GROUPS>
  __device__ __forceinline__ void few_rows(const Unit& u) {
    bool active = warp < u.tiles;
    float4 f = active ? factors(u, warp) : float4{};
    float acc[GROUPS][4] = {};
    for (int chunk = 0; chunk < p.chunks; chunk += C::KS) {
      wait();
      int count = active ? min(C::KS, p.chunks - chunk) : 0;
      if (count == C::KS) {
        Chunk<GROUPS> next = load_chunk<GROUPS>(0);
#pragma unroll
        for (int c = 0; c < C::KS; c++) {
          Chunk<GROUPS> now = next;
          if (c + 1 < C::KS) next = load_chunk<GROUPS>(c + 1);
          else release(ring.at);
          chunk_product<GROUPS>(now, acc);
        }
      } else {
        for (int c = 0; c < count; c++) chunk_product<GROUPS>(load_chunk<GROUPS>(c), acc);
        release(ring.at);
      }
      ring.advance();
    }
    if (active) finish<GROUPS>(u, u.tile + warp, f, acc);
  }

  template <int N>
  __device__ __forceinline__ void multiply(float* acc, const uint32_t* a, uint32_t rows) const {
#pragma unroll
    for (int j = 0; j < 4; j++)
      wgmma<N>(acc, a[j * 4], a[j * 4 + 1], a[j * 4 + 2], a[j * 4 + 3],
               operand_b(rows + j * 16, C::kGroupBytes));
    wgmma_commit();
  }

  // A unit of up to N rows: the next chunk is decoded while the tensor cores work on the last.
  // (ptxas sees that only without branches in between, so shorter stages come apart.)
  template <int N>
  __device__ __forceinline__ void many_rows(const Unit& u) {
    bool active = (warp & ~3) < u.tiles;  // some warp of this warpgroup has a tile
    float4 f = warp < u.tiles ? factors(u, warp) : float4{};
    float acc[N / 2] = {};
    for (int chunk = 0; chunk < p.chunks; chunk += C::KS) {
      wait();
      __syncwarp();
      int count = active ? min(C::KS, p.chunks - chunk) : 0;
      const uint8_t* w = stage() + warp * C::kTileBytes;
      uint32_t rows =
          __shfl_sync(~0u, operand_low(shared_address(stage() + C::kWeightBytes)), 0);
      if (count == C::KS) {
        uint32_t a[2][16];
        Stored<C::FP4> next = load_stored<C::FP4>(w, lane);
        decode(next, a[0]);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < C::KS; c++) {
          if (c + 1 < C::KS)
            next = load_stored<C::FP4>(w + (c + 1) * kChunkBytes<C::FP4>, lane);
          multiply<N>(acc, a[c % 2], rows + c * 64);
          if (c + 1 < C::KS) decode(next, a[(c + 1) % 2]);
          wgmma_wait<0>();
          wgmma_fence();
        }
      } else {
        for (int c = 0; c < count; c++) {
          uint32_t a[16];
          decode(load_stored<C::FP4>(w + c * kChunkBytes<C::FP4>, lane), a);
          wgmma_fence();
          multiply<N>(acc, a, rows + c * 64);
          wgmma_wait<0>();
        }
      }
      release(ring.at);
      ring.advance();
    }
    if (warp < u.tiles)
      finish<N / 8>(u, u.tile + warp, f, reinterpret_cast<const float(*)[4]>(acc));
  }

  __device__ __forceinline__ void run() {
    for (;; index = (index + 1) % kInfoRing) {
      wait();
      __syncwarp();
      Unit u = s.units[index];
      if (u.rows == 0) return;
      // Few sizes: the instruction cache holds little more than the loops of these.
      if (u.rows <= 8) few_rows<1>(u);
      else if (u.rows <= 16) few_rows<2>(u);
      else if (u.rows <= 32) many_rows<32>(u);
      else if (u.rows <= 64) many_rows<64>(u);
      else many_rows<C::NMAX>(u);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) expert_matmul(const __grid_constant__ Args p) {
  extern __shared__ __align__(128) uint8_t bytes[];
  Shared<C> s(bytes);
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (threadIdx.x < C::STAGES) {
    barrier_init(s.full + threadIdx.x, kWeightWarps + 1);
    barrier_init(s.empty + threadIdx.x, C::kTiles);
  }
  barrier_init_fence();
  // `pack_rows` has waited for all that was launched before it, so routing can be read.
  Deal<C> walk = deal<C>(p.offset, p.experts, p.tiles, Table(s.table));
  if (warp < C::kTiles) Consumer<C>{p, s, lane, warp}.run();
  else if (warp < C::kTiles + kWeightWarps) fetch_weights<C>(p, s, walk, warp - C::kTiles);
  else fetch_rows<C>(p, s, walk);
}

// Packs the rows and multiplies them. `fake`: the rows are those of a gated product, to be
// quantized on the way.
template <class C>
cudaError_t launch(const Args& args, const FakeArgs* fake, cudaStream_t stream) {
  static_assert(C::kShared <= 232448, "a block does not fit a multiprocessor");
  static_assert(C::STAGES + 1 < kInfoRing, "row information is overwritten too early");
  static_assert(C::kThreads > kMaxExperts, "the schedule takes a thread an expert");
  auto kernel = expert_matmul<C>;
  static cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared);
  if (ready != cudaSuccess) return ready;
  cudaError_t error;
  if (fake) {
    auto pack = fake->width <= 256    ? pack_mid<1>
                : fake->width <= 768  ? pack_mid<3>
                : fake->width <= 1536 ? pack_mid<6>
                                      : pack_mid<12>;
    error = launch_dependent(pack, (args.rows + 3) / 4, 128, 0, stream, args, *fake);
  } else {
    int groups = args.rows / 8 + args.experts;
    int blocks = (groups * ((args.chunks + kPackChunks - 1) / kPackChunks) + 3) / 4;
    error = launch_dependent(pack_rows, blocks, 128, 0, stream, args);
  }
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, multiprocessors(), C::kThreads, C::kShared, stream, args);
}

}  // namespace trace_jax

#include "expert_few.cuh"

// --- the calls from XLA -----------------------------------------------------------------

struct Variant {
  int fp4;
  cudaError_t (*launch)(const trace_jax::Args&, const trace_jax::FakeArgs*, cudaStream_t);
};

#define FEW(...) trace_jax::FewConfig<1, __VA_ARGS__>
#define VARIANT(fp4, ...) {fp4, trace_jax::launch<trace_jax::Config<fp4, __VA_ARGS__>>}

// The order is that of HOPPER_VARIANTS in expert_matmul.py.
static const Variant kVariants[] = {
    // FP4?; warpgroups, rows of a unit, chunks of 64 along K a stage, stages
    VARIANT(1, 4, 64, 4, 3),
    VARIANT(0, 4, 64, 1, 5), VARIANT(0, 3, 128, 1, 5),
    // Few rows: chunks a warp, warps of K, groups of 8 rows, stages, blocks a multiprocessor, early
    // starts?; for K of 32 chunks and of 12.
    {1, trace_jax::launch_few<FEW(4, 8, 1, 4, 2, true), FEW(3, 4, 1, 4, 4, true)>},
    {1, trace_jax::launch_few<FEW(8, 4, 1, 3, 3, false), FEW(3, 4, 2, 4, 4, false)>},
};

using Bytes = ffi::Buffer<ffi::U8>;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Rows = ffi::Buffer<ffi::BF16>;

// What a product reads of its weights and its routing.
static trace_jax::Args arguments(const Bytes& weight, const Floats& outer, const Floats& bias,
                                 const Ints& slot, const Ints& offset) {
  trace_jax::Args args{};
  args.weight = weight.typed_data();
  args.weight_outer = reinterpret_cast<const float2*>(outer.typed_data());
  args.bias = bias.element_count() ? bias.typed_data() : nullptr;
  args.slot = slot.typed_data();
  args.offset = offset.typed_data();
  args.experts = static_cast<int>(weight.dimensions()[0]);
  args.tiles = static_cast<int>(weight.dimensions()[1]);
  args.chunks = static_cast<int>(weight.dimensions()[2]);
  args.rows = static_cast<int>(slot.element_count());
  return args;
}

static ffi::Error refused(cudaError_t error) {
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

static bool exists(int64_t variant) {
  return variant >= 0 && variant < static_cast<int64_t>(sizeof(kVariants) / sizeof(Variant));
}

static ffi::Error ExpertMatmul(cudaStream_t stream, Bytes weight, Floats weight_outer,
                               Floats bias, Rows x, Floats x_outer, Ints slot, Ints offset,
                               ffi::Result<ffi::AnyBuffer> out, ffi::Result<Bytes> packed,
                               ffi::Result<Ints> info, int64_t variant, int64_t epilogue,
                               int64_t top_k) {
  if (!exists(variant)) return ffi::Error::InvalidArgument("expert_matmul: no such variant");
  trace_jax::Args args = arguments(weight, weight_outer, bias, slot, offset);
  args.x = reinterpret_cast<const __nv_bfloat16*>(x.typed_data());
  args.x_outer = x_outer.element_count() ? x_outer.typed_data() : nullptr;
  args.out = out->untyped_data();
  args.packed = packed->typed_data();
  args.info = reinterpret_cast<int2*>(info->typed_data());
  args.k = static_cast<int>(x.dimensions().back());
  args.top_k = static_cast<int>(top_k);
  args.epilogue = static_cast<int>(epilogue);
  return refused(kVariants[variant].launch(args, nullptr, stream));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_expert_matmul, ExpertMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Bytes>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Rows>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<Bytes>()
                                  .Ret<Ints>()
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("epilogue")
                                  .Attr<int64_t>("top_k"),
                              {ffi::Traits::kCmdBufferCompatible});

static ffi::Error ExpertLayer(cudaStream_t stream, Bytes gate_up, Floats gate_up_outer,
                              Floats gate_up_bias, Bytes down, Floats down_outer,
                              Floats down_bias, Rows x, Ints slot, Ints offset,
                              ffi::Result<Floats> out, ffi::Result<Rows> mid,
                              ffi::Result<Bytes> packed, ffi::Result<Ints> info,
                              ffi::Result<Bytes> packed_mid, ffi::Result<Ints> info_mid,
                              ffi::Result<Bytes> bits, ffi::Result<Bytes> scales,
                              int64_t variant, int64_t down_variant, int64_t epilogue,
                              int64_t top_k, bool quantize) {
  if (!exists(variant) || !exists(down_variant))
    return ffi::Error::InvalidArgument("expert_layer: no such variant");
  trace_jax::Args first = arguments(gate_up, gate_up_outer, gate_up_bias, slot, offset);
  first.x = reinterpret_cast<const __nv_bfloat16*>(x.typed_data());
  first.out = mid->untyped_data();
  first.packed = packed->typed_data();
  first.info = reinterpret_cast<int2*>(info->typed_data());
  first.k = static_cast<int>(x.dimensions().back());
  first.top_k = static_cast<int>(top_k);
  first.epilogue = static_cast<int>(epilogue);
  cudaError_t error = kVariants[variant].launch(first, nullptr, stream);
  if (error != cudaSuccess) return refused(error);
  trace_jax::Args second = arguments(down, down_outer, down_bias, slot, offset);
  second.x = reinterpret_cast<const __nv_bfloat16*>(mid->untyped_data());
  second.out = out->untyped_data();
  second.packed = packed_mid->typed_data();
  second.info = reinterpret_cast<int2*>(info_mid->typed_data());
  second.k = static_cast<int>(mid->dimensions().back());
  second.top_k = second.epilogue = 0;
  trace_jax::FakeArgs fake{};
  fake.x = reinterpret_cast<const uint4*>(mid->untyped_data());
  fake.bits = bits->element_count() ? bits->typed_data() : nullptr;
  fake.scales = scales->element_count() ? scales->typed_data() : nullptr;
  fake.width = second.k;
  fake.rows = second.rows;
  fake.whole_codes = bits->dimensions().back() == fake.width / 2;
  return refused(kVariants[down_variant].launch(second, quantize ? &fake : nullptr, stream));
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_expert_layer, ExpertLayer,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Bytes>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Bytes>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Rows>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Ret<Floats>()
                                  .Ret<Rows>()
                                  .Ret<Bytes>()
                                  .Ret<Ints>()
                                  .Ret<Bytes>()
                                  .Ret<Ints>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("down_variant")
                                  .Attr<int64_t>("epilogue")
                                  .Attr<int64_t>("top_k")
                                  .Attr<bool>("quantize"),
                              {ffi::Traits::kCmdBufferCompatible});
