// Decode attention over paged K and V (NVFP4 or BF16), for Hopper.
//
// All pages of all sequences and KV heads form one list; each warp takes an equal contiguous
// share of it, so the load balances whatever the lengths are. A warp streams its pages through
// its own ring in shared memory (bulk copies, one unit for K and one for V), multiplies K and V
// as the tensor cores' left operand with up to 8 query heads on the right, and leaves one
// partial result for each (sequence, KV head) it touched. A second kernel merges them.
#include "common.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

constexpr int kPage = 64;
constexpr int kMaxBatch = 1024;
constexpr float kLow = -1e30f;

struct Args {
  const uint8_t* pages;        // [pages][kv heads][2][unit bytes]
  const int* table;            // [batch][max_pages]
  const int* lengths;          // [batch]
  const __nv_bfloat16* query;  // [batch][kv heads][group][head size]
  const float* sink;           // [kv heads * group] or null
  float* partial;              // [warps + batch * head tiles][8][head size]
  float2* partial_ml;          // [warps + batch * head tiles][8]: maximum, sum
  __nv_bfloat16* out;          // [batch][kv heads][group][head size]
  int batch, kv_heads, group, max_pages, window, warps;
  float scale;                 // softmax scale * log2 e
};

template <int FP4, int D> struct Unit {
  static constexpr int kScales = 32 * D;     // offset of the block scales
  static constexpr int kOuter = 36 * D;      // offset of the row scales' exponents
  static constexpr int kBytes = FP4 ? 36 * D + 64 : 128 * D;
};

__device__ __forceinline__ int head_tiles(const Args& p) {
  return p.kv_heads * ((p.group + 7) / 8);
}

__device__ __forceinline__ int first_page(const Args& p, int length) {
  return p.window > 0 ? max(length - p.window, 0) / kPage : 0;
}

__device__ __forceinline__ int page_count(const Args& p, int b) {
  int length = min(p.lengths[b], p.max_pages * kPage);
  return length > 0 ? (length + kPage - 1) / kPage - first_page(p, length) : 0;
}

// Warps that get at least one page, so that each leaves its partial results.
__device__ __forceinline__ int used_warps(const Args& p, long long total) {
  return (int)min((long long)p.warps, total);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ uint32_t transpose(uint32_t a) {
  uint32_t d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// Byte I of w as the exponent of a float: the power of two that a row was divided by.
template <int I>
__device__ __forceinline__ float power_of_two(uint2 w) {
  uint32_t v = I < 4 ? w.x : w.y;
  constexpr int at = (I % 4) * 8;
  return __uint_as_float((at < 23 ? v << (23 - at) : v >> (at - 23)) & 0x7F800000u);
}

__device__ __forceinline__ void powers_of_two(uint2 w, float* f) {
  f[0] = power_of_two<0>(w); f[1] = power_of_two<1>(w);
  f[2] = power_of_two<2>(w); f[3] = power_of_two<3>(w);
  f[4] = power_of_two<4>(w); f[5] = power_of_two<5>(w);
  f[6] = power_of_two<6>(w); f[7] = power_of_two<7>(w);
}

__device__ __forceinline__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Walks a warp's share of the pages, one sequence and head tile at a time.
struct Walk {
  int b, head, page, end;  // `end`: this warp's last page of (b, head), exclusive
  long long at, high;
  __device__ __forceinline__ void find(const Args& p, const int* prefix) {
    int low = 0, top = p.batch;  // prefix[low] <= at < prefix[top], in pages of all heads
    while (top - low > 1) {
      int middle = (low + top) / 2;
      if ((long long)prefix[middle] * head_tiles(p) <= at) low = middle;
      else top = middle;
    }
    b = low;
  }
  __device__ __forceinline__ void enter(const Args& p, const int* prefix) {
    if (at >= high) { b = -1; return; }
    int heads = head_tiles(p), count = prefix[b + 1] - prefix[b];
    while (at >= (long long)prefix[b + 1] * heads) { b++; count = prefix[b + 1] - prefix[b]; }
    int rest = (int)(at - (long long)prefix[b] * heads);
    head = rest / count;
    int first = rest % count, many = (int)min((long long)(count - first), high - at);
    page = first + first_page(p, p.lengths[b]);
    end = page + many;
    at += many;
  }
};

template <int FP4, int D, int UNITS>
struct Ring {
  const Args& p;
  const int* prefix;
  uint8_t* units;
  uint64_t* full;
  uint64_t policy;
  int lane;
  Walk walk;
  int ids, ids_base;  // lane i holds the page id of page ids_base + i
  int copied;

  __device__ __forceinline__ void load_ids() {
    ids_base = walk.page;
    int i = min(walk.page + lane, walk.end - 1);
    ids = p.table[(size_t)walk.b * p.max_pages + i];
  }
  __device__ __forceinline__ void start() {
    walk.enter(p, prefix);
    if (walk.b >= 0) load_ids();
    for (copied = 0; copied < UNITS;) copy_next();
  }
  // K and V of a page are consecutive units.
  __device__ __forceinline__ void copy_next() {
    int slot = copied % UNITS, is_v = copied & 1;
    copied++;
    if (walk.b < 0) return;
    int id = __shfl_sync(~0u, ids, walk.page - ids_base);
    int kv_head = walk.head / ((p.group + 7) / 8);
    if (lane == 0) {
      size_t unit = ((size_t)id * p.kv_heads + kv_head) * 2 + is_v;
      bulk_copy(units + slot * Unit<FP4, D>::kBytes, p.pages + unit * Unit<FP4, D>::kBytes,
                Unit<FP4, D>::kBytes, full + slot, policy);
    }
    if (!is_v) return;
    if (++walk.page >= walk.end) {
      walk.enter(p, prefix);
      if (walk.b >= 0) load_ids();
    } else if (walk.page - ids_base >= 32) {
      load_ids();
    }
  }
};

// Scores of 64 tokens and 8 heads; FP4 scores carry 2^-9.
template <int FP4, int D>
__device__ __forceinline__ void scores(const uint8_t* unit, int lane, const uint32_t* q,
                                       float (*s)[4]) {
  constexpr int C = D / 64;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll
    for (int c = 0; c < C; c++) {
      const uint32_t* qc = q + c * 8;
      if constexpr (FP4) {
        uint4 codes = *reinterpret_cast<const uint4*>(unit + (i * C + c) * 512 + lane * 16);
        uint32_t bytes = *reinterpret_cast<const uint16_t*>(
            unit + Unit<1, D>::kScales + (i * C + c) * 64 + lane * 2);
        uint32_t s0 = scale_pair<0, 0>(bytes), s1 = scale_pair<1, 1>(bytes);
        uint32_t a[4], b[4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          decode_word(half ? codes.y : codes.x, a);
          decode_word(half ? codes.w : codes.z, b);
#pragma unroll
          for (int k = 0; k < 4; k++) { a[k] = mul_bf16x2(a[k], s0); b[k] = mul_bf16x2(b[k], s1); }
          mma(s[i], a[0], b[0], a[1], b[1], qc[half * 4], qc[half * 4 + 1]);
          mma(s[i], a[2], b[2], a[3], b[3], qc[half * 4 + 2], qc[half * 4 + 3]);
        }
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          uint4 a = *reinterpret_cast<const uint4*>(unit + ((i * C + c) * 4 + j) * 512 + lane * 16);
          mma(s[i], a.x, a.y, a.z, a.w, qc[j * 2], qc[j * 2 + 1]);
        }
      }
    }
  }
}

// Bits of the tokens at, at + 1 that count, of a bf16x2.
__device__ __forceinline__ uint32_t token_mask(int at, int begin, int end) {
  return (at >= begin && at < end ? 0xFFFFu : 0u) |
         (at + 1 >= begin && at + 1 < end ? 0xFFFF0000u : 0u);
}

// acc += V^T P for 64 tokens; with FP4 the sums carry 2^-16. BF16 slots outside
// [begin, end) may hold NaN, so they are replaced; FP4 codes and scales are always finite.
template <int FP4, int D>
__device__ __forceinline__ void values(const uint8_t* unit, int lane, int begin, int end,
                                       const uint32_t* P, float (*acc)[4]) {
#pragma unroll
  for (int G = 0; G < D / 16; G++) {
    if constexpr (FP4) {
      uint4 codes = *reinterpret_cast<const uint4*>(unit + G * 512 + lane * 16);
      uint4 scales = *reinterpret_cast<const uint4*>(unit + Unit<1, D>::kScales +
                                                     (G * 4 + (lane & 3)) * 16);
      uint32_t a[4], b[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        decode_word(half ? codes.y : codes.x, a);
        decode_word(half ? codes.w : codes.z, b);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint32_t w = word(scales, half * 2 + j);
          uint32_t b0 = mul_bf16x2(P[half * 4 + j * 2], (scale_pair<0, 1, 110>(w)));
          uint32_t b1 = mul_bf16x2(P[half * 4 + j * 2 + 1], (scale_pair<2, 3, 110>(w)));
          mma(acc[G], a[j * 2], b[j * 2], a[j * 2 + 1], b[j * 2 + 1], b0, b1);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint4 a = *reinterpret_cast<const uint4*>(unit + (G * 4 + j) * 512 + lane * 16);
        if (begin > 0 || end < kPage) {
          uint32_t low = token_mask(j * 16 + (lane & 3) * 2, begin, end);
          uint32_t high = token_mask(j * 16 + 8 + (lane & 3) * 2, begin, end);
          a.x &= low; a.y &= low; a.z &= high; a.w &= high;
        }
        mma(acc[G], a.x, a.y, a.z, a.w, P[j * 2], P[j * 2 + 1]);
      }
    }
  }
}

struct Softmax {  // of heads 2t and 2t + 1; maxima in units of log2
  float m0, m1, l0, l1;
};

// Scores to probabilities P (bf16, transposed to the right operand, times V's row scale).
template <int FP4, int D>
__device__ __forceinline__ void probabilities(const Args& p, const uint8_t* k_unit, int lane,
                                              int begin, int end, float (*s)[4], Softmax& sm,
                                              float (*acc)[4]) {
  int g = lane >> 2;
  float f[8];
  if constexpr (FP4) {
    powers_of_two(*reinterpret_cast<const uint2*>(k_unit + Unit<1, D>::kOuter + g * 8), f);
  }
  float x0 = kLow, x1 = kLow;
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float scale = FP4 ? f[i * 2 + h] * (p.scale * kUnscale) : p.scale;
      s[i][2 * h] *= scale;
      s[i][2 * h + 1] *= scale;
    }
  }
  if (begin > 0 || end < kPage) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int token = i * 16 + h * 8 + g;
        if (token < begin || token >= end) s[i][2 * h] = s[i][2 * h + 1] = kLow;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    x0 = fmaxf(x0, fmaxf(s[i][0], s[i][2]));
    x1 = fmaxf(x1, fmaxf(s[i][1], s[i][3]));
  }
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) {
    x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, d));
    x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, d));
  }
  // The reference maximum moves only when it is far off: sums stay below 2^8 a token.
  if (__any_sync(~0u, x0 > sm.m0 + 8.0f || x1 > sm.m1 + 8.0f)) {
    float n0 = fmaxf(sm.m0, x0), n1 = fmaxf(sm.m1, x1);
    float r0 = exp2_fast(sm.m0 - n0), r1 = exp2_fast(sm.m1 - n1);
    sm = {n0, n1, sm.l0 * r0, sm.l1 * r1};
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      acc[i][0] *= r0; acc[i][2] *= r0;
      acc[i][1] *= r1; acc[i][3] *= r1;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sm.l0 += s[i][2 * h] = exp2_fast(s[i][2 * h] - sm.m0);
      sm.l1 += s[i][2 * h + 1] = exp2_fast(s[i][2 * h + 1] - sm.m1);
    }
  }
}

template <int FP4, int D>
__device__ __forceinline__ void to_operand(const uint8_t* v_unit, int lane, int begin, int end,
                                           float (*s)[4], uint32_t* P) {
  int g = lane >> 2;
  float f[8];
  if constexpr (FP4) {
    powers_of_two(*reinterpret_cast<const uint2*>(v_unit + Unit<1, D>::kOuter + g * 8), f);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if constexpr (FP4) {
        int token = i * 16 + h * 8 + g;
        float scale = token < begin || token >= end ? 0.0f : f[i * 2 + h];
        s[i][2 * h] *= scale;
        s[i][2 * h + 1] *= scale;
      }
      P[i * 2 + h] = transpose(pack_bf16(s[i][2 * h], s[i][2 * h + 1]));
    }
  }
}

template <int D>
__device__ __forceinline__ void write_partial(const Args& p, int slot, int lane, Softmax sm,
                                              float (*acc)[4], float unscale) {
  int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) {
    sm.l0 += __shfl_xor_sync(~0u, sm.l0, d);
    sm.l1 += __shfl_xor_sync(~0u, sm.l1, d);
  }
  float* o = p.partial + (size_t)slot * 8 * D + 2 * t * D + g;
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    o[i * 16] = acc[i][0] * unscale;
    o[D + i * 16] = acc[i][1] * unscale;
    o[i * 16 + 8] = acc[i][2] * unscale;
    o[D + i * 16 + 8] = acc[i][3] * unscale;
    acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
  }
  if (g == 0) {
    p.partial_ml[slot * 8 + 2 * t] = make_float2(sm.m0, sm.l0);
    p.partial_ml[slot * 8 + 2 * t + 1] = make_float2(sm.m1, sm.l1);
  }
}

template <int D>
__device__ __forceinline__ void load_query(const Args& p, int b, int head, int lane,
                                           uint32_t* q) {
  int tiles = (p.group + 7) / 8, g = lane >> 2, t = lane & 3;
  int row = (head % tiles) * 8 + g;
  const __nv_bfloat16* source =
      p.query + (((size_t)b * p.kv_heads + head / tiles) * p.group + row) * D + t * 16;
#pragma unroll
  for (int c = 0; c < D / 64; c++) {
    uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 a = row < p.group ? *reinterpret_cast<const uint4*>(source + c * 64) : zero;
    uint4 d = row < p.group ? *reinterpret_cast<const uint4*>(source + c * 64 + 8) : zero;
    q[c * 8 + 0] = a.x; q[c * 8 + 1] = a.y; q[c * 8 + 2] = a.z; q[c * 8 + 3] = a.w;
    q[c * 8 + 4] = d.x; q[c * 8 + 5] = d.y; q[c * 8 + 6] = d.z; q[c * 8 + 7] = d.w;
  }
}

// prefix[b]: pages of the sequences before b, by one warp.
__device__ void prefix_pages(const Args& p, int* prefix, int lane) {
  int base = 0;
  if (lane == 0) prefix[0] = 0;
  for (int b0 = 0; b0 < p.batch; b0 += 32) {
    int b = b0 + lane, mine = b < p.batch ? page_count(p, b) : 0;
    for (int d = 1; d < 32; d <<= 1) {
      int other = __shfl_up_sync(~0u, mine, d);
      if (lane >= d) mine += other;
    }
    if (b < p.batch) prefix[b + 1] = base + mine;
    base += __shfl_sync(~0u, mine, 31);
  }
}

template <int FP4, int D, int WARPS, int UNITS>
__global__ void __launch_bounds__(WARPS * 32, 1) paged_attention(const Args p) {
  constexpr int kUnit = Unit<FP4, D>::kBytes;
  extern __shared__ __align__(128) uint8_t shared[];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + WARPS * UNITS * kUnit) + warp * UNITS;
  int* prefix = reinterpret_cast<int*>(shared + WARPS * UNITS * (kUnit + 8));
  if (lane < UNITS) barrier_init(full + lane, 1);
  barrier_init_fence();
  if (warp == 0) prefix_pages(p, prefix, lane);
  __syncthreads();
  int me = warp * gridDim.x + blockIdx.x;  // few pages: one warp on each multiprocessor first
  long long total = (long long)prefix[p.batch] * head_tiles(p);
  int warps = used_warps(p, total);
  if (me >= warps) return;
  Walk walk{0, 0, 0, 0, total * me / warps, total * (me + 1) / warps};
  walk.find(p, prefix);
  uint8_t* units = shared + warp * UNITS * kUnit;
  Ring<FP4, D, UNITS> ring{p, prefix, units, full, evict_first_policy(), lane, walk, 0, 0, 0};
  ring.start();
  float acc[D / 16][4] = {};
  uint32_t q[D / 8], P[8];
  for (int used = 0; walk.at < walk.high;) {
    walk.enter(p, prefix);
    load_query<D>(p, walk.b, walk.head, lane, q);
    int length = min(p.lengths[walk.b], p.max_pages * kPage);
    int start = p.window > 0 ? max(length - p.window, 0) : 0;
    Softmax sm{kLow, kLow, 0.0f, 0.0f};
    for (int page = walk.page; page < walk.end; page++) {
      int begin = max(start - page * kPage, 0), end = min(length - page * kPage, kPage);
      float s[4][4];
      int slot = used % UNITS;
      barrier_wait(full + slot, (used / UNITS) & 1);
      scores<FP4, D>(units + slot * kUnit, lane, q, s);
      probabilities<FP4, D>(p, units + slot * kUnit, lane, begin, end, s, sm, acc);
      __syncwarp();
      ring.copy_next();
      used++;
      slot = used % UNITS;
      barrier_wait(full + slot, (used / UNITS) & 1);
      to_operand<FP4, D>(units + slot * kUnit, lane, begin, end, s, P);
      values<FP4, D>(units + slot * kUnit, lane, begin, end, P, acc);
      __syncwarp();
      ring.copy_next();
      used++;
    }
    write_partial<D>(p, me + walk.b * head_tiles(p) + walk.head, lane, sm, acc,
                     FP4 ? 65536.0f : 1.0f);
  }
}

// One block a (sequence, head tile): the partial results of all warps that shared it.
template <int D>
__global__ void __launch_bounds__(2 * D) merge(const Args p) {
  __shared__ int sums[2];
  int heads = head_tiles(p), tiles = (p.group + 7) / 8;
  int b = blockIdx.x / heads, head = blockIdx.x % heads;
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.batch; i += 2 * D) {
    int count = page_count(p, i);
    atomicAdd(&sums[1], count);
    if (i < b) atomicAdd(&sums[0], count);
  }
  __syncthreads();
  int count = page_count(p, b), h = threadIdx.x / (D / 4), d = threadIdx.x % (D / 4) * 4;
  int row = head % tiles * 8 + h;
  if (row >= p.group) return;
  size_t at = ((size_t)b * p.kv_heads + head / tiles) * p.group + row;
  float m = kLow, l = 0.0f;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (count > 0) {
    long long total = (long long)sums[1] * heads;
    long long first = (long long)sums[0] * heads + (long long)head * count;
    int warps = used_warps(p, total);
    int w0 = (int)(((first + 1) * warps - 1) / total);
    int w1 = (int)(((first + count) * warps - 1) / total);
    const float2* ml = p.partial_ml + (size_t)(blockIdx.x) * 8 + h;
    for (int w = w0; w <= w1; w++) m = fmaxf(m, ml[w * 8].x);
    float extra = p.sink ? p.sink[head / tiles * p.group + row] * 1.4426950408889634f : kLow;
    m = fmaxf(m, extra);
    l = p.sink ? exp2f(extra - m) : 0.0f;
    for (int w = w0; w <= w1; w++) {
      float2 part = ml[w * 8];
      float weight = exp2f(part.x - m);
      float4 o = *reinterpret_cast<const float4*>(
          p.partial + ((size_t)(w + blockIdx.x) * 8 + h) * D + d);
      l += weight * part.y;
      sum.x += weight * o.x; sum.y += weight * o.y;
      sum.z += weight * o.z; sum.w += weight * o.w;
    }
  }
  float inverse = l > 0.0f || l != l ? 1.0f / l : 0.0f;
  __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(p.out + at * D + d);
  out[0] = __floats2bfloat162_rn(sum.x * inverse, sum.y * inverse);
  out[1] = __floats2bfloat162_rn(sum.z * inverse, sum.w * inverse);
}

template <int FP4, int D, int WARPS, int UNITS>
cudaError_t launch(Args args, cudaStream_t stream) {
  constexpr int shared = WARPS * UNITS * (Unit<FP4, D>::kBytes + 8) + (kMaxBatch + 1) * 4;
  auto kernel = paged_attention<FP4, D, WARPS, UNITS>;
  static cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (ready != cudaSuccess) return ready;
  int blocks = args.warps / WARPS;
  kernel<<<blocks, WARPS * 32, shared, stream>>>(args);
  int heads = args.kv_heads * ((args.group + 7) / 8);
  merge<D><<<args.batch * heads, 2 * D, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace trace_jax

// --- the call from XLA ------------------------------------------------------------------

struct Variant {
  int fp4, head_size, warps;
  cudaError_t (*launch)(trace_jax::Args, cudaStream_t);
};

#define VARIANT(fp4, head_size, warps, units) \
  {fp4, head_size, warps, trace_jax::launch<fp4, head_size, warps, units>}

static const Variant kVariants[] = {
    VARIANT(1, 128, 16, 3), VARIANT(1, 128, 12, 4), VARIANT(1, 128, 12, 3), VARIANT(1, 128, 8, 5),
    VARIANT(0, 128, 4, 3),  VARIANT(0, 128, 6, 2),  VARIANT(1, 64, 16, 5),  VARIANT(1, 256, 8, 3),
    VARIANT(0, 64, 8, 3),   VARIANT(0, 256, 2, 3),  VARIANT(1, 128, 14, 3),
};

static ffi::Error PagedAttention(cudaStream_t stream, ffi::Buffer<ffi::U8> pages,
                                 ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lengths,
                                 ffi::Buffer<ffi::BF16> query, ffi::Buffer<ffi::F32> sink,
                                 ffi::Result<ffi::Buffer<ffi::BF16>> out,
                                 ffi::Result<ffi::Buffer<ffi::F32>> partial,
                                 ffi::Result<ffi::Buffer<ffi::F32>> partial_ml, int64_t variant,
                                 int64_t kv_heads, int64_t window, int64_t warps, float scale) {
  trace_jax::Args args{};
  args.pages = pages.typed_data();
  args.table = table.typed_data();
  args.lengths = lengths.typed_data();
  args.query = reinterpret_cast<const __nv_bfloat16*>(query.typed_data());
  args.sink = sink.element_count() ? sink.typed_data() : nullptr;
  args.partial = partial->typed_data();
  args.partial_ml = reinterpret_cast<float2*>(partial_ml->typed_data());
  args.out = reinterpret_cast<__nv_bfloat16*>(out->typed_data());
  args.batch = static_cast<int>(query.dimensions()[0]);
  args.kv_heads = static_cast<int>(kv_heads);
  args.group = static_cast<int>(query.dimensions()[1] / kv_heads);
  args.max_pages = static_cast<int>(table.dimensions()[1]);
  args.window = static_cast<int>(window);
  args.warps = static_cast<int>(warps);
  args.scale = scale * 1.4426950408889634f;
  if (variant < 0 || variant >= static_cast<int64_t>(sizeof(kVariants) / sizeof(Variant)))
    return ffi::Error::InvalidArgument("paged_attention: no such variant");
  if (args.batch > trace_jax::kMaxBatch)
    return ffi::Error::InvalidArgument("paged_attention: batch above 1024");
  cudaError_t error = kVariants[variant].launch(args, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_paged_attention, PagedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("warps")
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});
