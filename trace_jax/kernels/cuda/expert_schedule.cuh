// Which units of work a block takes, for expert_matmul.cu. A unit is up to C::kTiles tiles of 16
// outputs times up to C::NMAX rows of one expert.
#pragma once
#include <cuda_runtime.h>

namespace trace_jax {

constexpr int kMaxExperts = 511;
constexpr int kClasses = 7;  // of experts, by the time that a unit takes

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Experts do not share groups of 8 rows; the first group of an expert. There are
// rows / 8 + experts groups at most.
__device__ __forceinline__ int first_group(int expert, int offset) { return offset / 8 + expert; }

// Rows of an expert are cut into parts of equal height, a multiple of 8 up to NMAX.
template <int NMAX>
__device__ __forceinline__ int part_height(int rows) {
  if (rows <= NMAX) return NMAX;
  return ceil_div(ceil_div(rows, ceil_div(rows, NMAX)), 8) * 8;
}

struct alignas(16) Unit {
  int expert, tile, tiles, row, rows;
  int group;    // the first one, in the packed rows
  bool shared;  // other units read the same weights
};

// What a schedule keeps in shared memory.
struct Table {
  int *offset, *before, *order, *totals, *counts;
  static constexpr int kBytes = (3 * kMaxExperts + 34 + kClasses * 16) * 4;

  __device__ __forceinline__ explicit Table(void* at) {
    offset = static_cast<int*>(at);
    before = offset + kMaxExperts + 1;
    order = before + kMaxExperts + 1;
    totals = order + kMaxExperts;
    counts = totals + 32;
  }
};

__device__ __forceinline__ int inclusive_sum(int v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    int other = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += other;
  }
  return v;
}

// A block's units. All units stand in one list, those with many rows first, and are dealt to
// the blocks back and forth, so that long units meet short ones.
template <class C>
struct Deal {
  const int* offset;
  const int* order;   // experts that have rows, by size class
  const int* before;  // parts of all experts ahead of this one in `order`
  int experts, all_tiles, size, cuts;  // tiles of a unit, units along the tiles
  int pass = 0;

  // By a whole warp: every lane looks at other experts.
  __device__ __forceinline__ bool next(Unit& u) {
    int blocks = gridDim.x, b = blockIdx.x;
    int index = pass * blocks + (pass & 1 ? blocks - 1 - b : b), at = index / cuts, rank = 0;
    pass++;
    if (at >= before[experts]) return false;
    for (int r = threadIdx.x & 31; r < experts; r += 32) rank += before[r + 1] <= at;
    rank = __reduce_add_sync(~0u, rank);
    int expert = order[rank], begin = offset[expert], rows = offset[expert + 1] - begin;
    int parts = before[rank + 1] - before[rank], within = index - before[rank] * cuts;
    int tile = within * size, first = 0, height = rows;
    if (parts > 1) {
      height = part_height<C::NMAX>(rows);
      first = within % parts * height;
      tile = within / parts * size;
    }
    u = {expert, tile, min(size, all_tiles - tile), begin + first, min(height, rows - first),
         first_group(expert, begin) + first / 8, parts > 1};
    return true;
  }
};

// The size class of an expert by the rows of its units, most rows first; kClasses without rows.
__device__ __forceinline__ int size_class(int rows) {
  return rows == 0 ? kClasses : rows > 96 ? 0 : rows > 64 ? 1 : rows > 48 ? 2 : rows > 32 ? 3
         : rows > 16 ? 4 : rows > 8 ? 5 : 6;
}

// Tiles of a unit for `parts` parts of all experts: the fewest rounds of all blocks times the
// time of a unit, which grows with its tiles from a floor of about ten. Lanes try other sizes.
template <class C>
__device__ __forceinline__ int unit_size(int tiles, int parts, int lane) {
  auto divide = [](int a, int b) { return (int)ceilf(__fdividef(a, b) - 1e-3f); };
  int least = ceil_div(tiles, C::kTiles);
  int size = max(divide(tiles, lane < 16 ? least + lane : least * (lane - 14)), 1);
  int rounds = divide(divide(tiles, size) * parts, gridDim.x);
  return __reduce_min_sync(~0u, rounds * (size + 10) * 32 + size) % 32;
}

// Orders the experts and counts their parts, a thread an expert.
template <class C>
__device__ __forceinline__ Deal<C> deal(const int* offset, int experts, int tiles, Table s) {
  int e = threadIdx.x, lane = e & 31, warp = e >> 5, warps = ceil_div(experts, 32), rows = 0;
  if (e < experts) {
    int first = offset[e], end = offset[e + 1];
    s.offset[e] = first;
    if (e == experts - 1) s.offset[e + 1] = end;
    rows = end - first;
  }
  int parts = ceil_div(rows, C::NMAX), rank = 0;
  int own = size_class(parts > 1 ? part_height<C::NMAX>(rows) : rows);
#pragma unroll
  for (int c = 0; c < kClasses; c++) {
    uint32_t same = __ballot_sync(~0u, own == c);
    if (lane == 0 && warp < warps) s.counts[c * warps + warp] = __popc(same);
    if (own == c) rank = __popc(same & ((1u << lane) - 1));
  }
  __syncthreads();
  int active = 0, place = own * warps + warp;  // where this expert's class and warp are counted
  for (int base = 0; base < kClasses * warps; base += 32) {
    int count = base + lane < kClasses * warps ? s.counts[base + lane] : 0;
    int sum = inclusive_sum(count, lane);
    int ahead = __shfl_sync(~0u, sum - count, place & 31);
    if (place / 32 == base / 32) rank += active + ahead;
    active += __shfl_sync(~0u, sum, 31);
  }
  if (rows) {
    s.order[rank] = e;
    s.before[rank + 1] = parts;
  }
  __syncthreads();
  int sum = inclusive_sum(e < active ? s.before[e + 1] : 0, lane);
  if (lane == 31) s.totals[warp] = sum;
  __syncthreads();
  int other = lane < C::kThreads / 32 ? s.totals[lane] : 0;
  sum += __reduce_add_sync(~0u, lane < warp ? other : 0);
  if (e < active) s.before[e + 1] = sum;
  if (e == 0) s.before[0] = 0;
  int size = unit_size<C>(tiles, __reduce_add_sync(~0u, other), lane);
  __syncthreads();
  return {s.offset, s.order, s.before, active, tiles, size, ceil_div(tiles, size)};
}

}  // namespace trace_jax
