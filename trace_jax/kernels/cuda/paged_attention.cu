// Decode attention over paged K and V (NVFP4, FP8 or BF16), for Hopper.
//
// A (sequence, KV head) is cut into equal splits of about so many pages, by its own length alone, so
// that what a sequence gives does not depend on the others. All splits form one list; each warp takes
// those that begin in an equal contiguous share of the pages, so the load balances whatever the
// lengths are. A warp streams its pages through its own ring in shared memory (bulk copies, one
// unit for K and one for V), multiplies K and V as the tensor cores' left operand with up to 8
// query heads on the right, and writes the result of a (sequence, KV head) of one split, or
// leaves a partial one. The warp that leaves the last of eight adds them up, and the warp that leaves
// the last sum of a (sequence, KV head) adds up those.
//
// `decode_attention` puts token_rows.cuh ahead of it. The two overlap: pages that the new token does
// not go to are fetched early.
#include "common.cuh"
#include "token_rows.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

constexpr int kPage = 64;
constexpr int kMaxBatch = 4096;
constexpr float kLow = -1e30f;
constexpr float kLog2e = 1.4426950408889634f;

struct Args {
  const uint8_t* pages;        // [pages][kv heads][2][unit bytes]
  const int* table;            // [batch][max_pages]
  const int* lengths;          // [batch]
  const __nv_bfloat16* query;  // [batch][kv heads][group][head size]
  const float* sink;           // [kv heads * group] or null
  const uint8_t* recent;       // BF16 [rings * recent_tokens / 64][kv heads][2][unit bytes] or null
  float* partial;              // [batch][head tiles][splits][8][head size]
  float2* partial_ml;          // [batch][head tiles][splits][8]: maximum, sum
  int* arrived;                // [batch][head tiles][counters]: partial results written, of all
                               // (or sums of eight) and of every eight; zero before
  __nv_bfloat16* out;          // [batch][kv heads][group][head size]
  int batch, kv_heads, group, max_pages, window, warps;
  int split, splits;           // pages of a split; places for partial results, the last for the
                               // recent window
  int recent_tokens;           // the last of each sequence, read from `recent`; a multiple of 64
  float scale;                 // softmax scale * log2 e
};

template <int KIND, int D> struct Unit {
  static constexpr int kScales = 32 * D;                       // of NVFP4: the block scales
  static constexpr int kOuter = KIND == kNvfp4 ? 36 * D : 64 * D;  // the row scales' exponents
  static constexpr int kBytes = KIND == kBf16 ? 128 * D : kOuter + 64;
};

// Decoded FP8 carries 2^-120. The query makes up for 2^100 of it before the first product, the
// probabilities for 2^104 before the second.
constexpr uint32_t kTimesQueryScale = 0x71807180u;   // two of 2^100
constexpr float kValueScale = 2.028240960365167e31f;  // 2^104

// What the first product's sums lack, and the second's.
__host__ __device__ constexpr float score_unscale(int kind) {
  return kind == kNvfp4 ? kUnscale : kind == kFp8 ? 1048576.0f : 1.0f;
}
__host__ __device__ constexpr float value_unscale(int kind) {
  return kind == kBf16 ? 1.0f : 65536.0f;
}

__device__ __forceinline__ int head_tiles(const Args& p) {
  return p.kv_heads * ((p.group + 7) / 8);
}

constexpr int kAtOnce = 8;  // partial results added up by one warp, at one level
__host__ __device__ __forceinline__ int counters(const Args& p) {
  return 1 + (p.splits + kAtOnce - 1) / kAtOnce;
}

// Tokens start <= i < end of a sequence count; those from `paged` on are in the recent window.
struct Span {
  int start, paged, end;
  __device__ __forceinline__ Span(const Args& p, int b) {
    end = min(max(p.lengths[b], 0), p.max_pages * kPage);
    start = p.window > 0 ? max(end - p.window, 0) : 0;
    paged = max(end - p.recent_tokens, start);
  }
  __device__ __forceinline__ int first_page() const { return start / kPage; }
  __device__ __forceinline__ int pages() const {
    return paged > start ? (paged + kPage - 1) / kPage - first_page() : 0;
  }
};

// Splits of so many pages; a short rest makes none of its own, which would be a second one for
// some warp. Split i begins at page i * pages / count.
__host__ __device__ __forceinline__ int split_count(int split, int pages) {
  return pages ? max(1, (pages + split / 2) / split) : 0;
}

// With few pages, no more warps than there are splits, so that they spread over all blocks.
__device__ __forceinline__ int used_warps(const Args& p, int total) {
  return min(p.warps, (total + p.split - 1) / p.split);
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

// Two E4M3 bytes of w to a bf16x2, each value times 2^-120.
template <int LO, int HI>
__device__ __forceinline__ uint32_t decode_fp8(uint32_t w) {
  uint32_t p = __byte_perm(w, 0, 0x0404 | LO << 4 | HI << 12);
  return (p & 0x80008000u) | ((p >> 4) & 0x07F007F0u);
}

// Walks a warp's share of the pages, one split of a (sequence, head tile) at a time.
struct Walk {
  int b, head, split, page, end, parts;  // `end`: the split's last page, exclusive; of so many
  int at, high;
  __device__ __forceinline__ void find(const Args& p, const int* prefix) {
    int low = 0, top = p.batch;  // prefix[low] <= at < prefix[top], in pages of all heads
    while (top - low > 1) {
      int middle = (low + top) / 2;
      if (prefix[middle] * head_tiles(p) <= at) low = middle;
      else top = middle;
    }
    b = low;
    // A split that began before belongs to another warp.
    int count = prefix[b + 1] - prefix[b], parts = split_count(p.split, count);
    int first = (at - prefix[b] * head_tiles(p)) % count;
    int next = (first * parts + count - 1) / count;  // the first split that begins here or later
    at += next * count / parts - first;
  }
  __device__ __forceinline__ void enter(const Args& p, const int* prefix) {
    if (at >= high) { b = -1; return; }
    int heads = head_tiles(p);
    while (at >= prefix[b + 1] * heads) b++;
    int count = prefix[b + 1] - prefix[b], rest = at - prefix[b] * heads;
    head = rest / count;
    int first = rest % count;
    parts = split_count(p.split, count);
    split = (first * parts + count - 1) / count;
    int many = (split + 1) * count / parts - first;
    page = first + Span(p, b).first_page();
    end = page + many;
    at += many;
  }
};

template <int KIND, int D, int UNITS>
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
  __device__ __forceinline__ void enter() {
    walk.enter(p, prefix);
    if (walk.b >= 0) load_ids();
  }
  // Whether `start` reads other pages than a sequence's last, where a new token goes.
  __device__ __forceinline__ bool starts_early() const {
    if (walk.b < 0) return false;
    int last = (Span(p, walk.b).end - 1) / kPage;
    return walk.page + (UNITS + 1) / 2 <= min(walk.end, last);
  }
  __device__ __forceinline__ void start() {
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
      bulk_copy(units + slot * Unit<KIND, D>::kBytes, p.pages + unit * Unit<KIND, D>::kBytes,
                Unit<KIND, D>::kBytes, full + slot, policy);
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

// Scores of 64 tokens and 8 heads, over score_unscale.
template <int KIND, int D>
__device__ __forceinline__ void scores(const uint8_t* unit, int lane, const uint32_t* q,
                                       float (*s)[4]) {
  constexpr int C = D / 64;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
#pragma unroll
    for (int c = 0; c < C; c++) {
      const uint32_t* qc = q + c * 8;
      if constexpr (KIND == kNvfp4) {
        uint4 codes = *reinterpret_cast<const uint4*>(unit + (i * C + c) * 512 + lane * 16);
        uint32_t bytes = *reinterpret_cast<const uint16_t*>(
            unit + Unit<KIND, D>::kScales + (i * C + c) * 64 + lane * 2);
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
      } else if constexpr (KIND == kFp8) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint4 a = *reinterpret_cast<const uint4*>(unit + ((i * C + c) * 2 + j) * 512 + lane * 16);
          mma(s[i], decode_fp8<0, 1>(a.x), decode_fp8<2, 3>(a.x), decode_fp8<0, 1>(a.y),
              decode_fp8<2, 3>(a.y), qc[j * 4], qc[j * 4 + 1]);
          mma(s[i], decode_fp8<0, 1>(a.z), decode_fp8<2, 3>(a.z), decode_fp8<0, 1>(a.w),
              decode_fp8<2, 3>(a.w), qc[j * 4 + 2], qc[j * 4 + 3]);
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

// V's block scales as bf16x2 times 2^110, [D / 16][4 lanes t][8 pairs of tokens], once a page.
template <int D>
__device__ __forceinline__ void convert_scales(const uint8_t* unit, int lane, uint4* to) {
#pragma unroll
  for (int at = lane; at < D / 4; at += 32) {
    int stored = at % 4 * (D / 16) + at / 4;
    uint4 w = *reinterpret_cast<const uint4*>(unit + Unit<kNvfp4, D>::kScales + stored * 16);
    to[2 * at] = make_uint4(scale_pair<0, 1, 110>(w.x), scale_pair<2, 3, 110>(w.x),
                            scale_pair<0, 1, 110>(w.y), scale_pair<2, 3, 110>(w.y));
    to[2 * at + 1] = make_uint4(scale_pair<0, 1, 110>(w.z), scale_pair<2, 3, 110>(w.z),
                                scale_pair<0, 1, 110>(w.w), scale_pair<2, 3, 110>(w.w));
  }
  __syncwarp();
}

// acc += V^T P for 64 tokens, over value_unscale. BF16 slots outside [begin, end) may hold NaN,
// so they are replaced; decoded FP4 and FP8 are always finite.
template <int KIND, int D>
__device__ __forceinline__ void values(const uint8_t* unit, const uint4* scales, int lane,
                                       int begin, int end, const uint32_t* P, float (*acc)[4]) {
  int t = lane & 3, chunk = t * 8 + (((lane >> 2) + 2 * t) & 7);  // see kv_units.py
#pragma unroll
  for (int G = 0; G < D / 16; G++) {
    if constexpr (KIND == kNvfp4) {
      uint4 codes = *reinterpret_cast<const uint4*>(unit + G * 512 + chunk * 16);
      uint32_t a[4], b[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint4 scale = scales[(G * 4 + t) * 2 + half];
        decode_word(half ? codes.y : codes.x, a);
        decode_word(half ? codes.w : codes.z, b);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          uint32_t b0 = mul_bf16x2(P[half * 4 + j * 2], word(scale, 2 * j));
          uint32_t b1 = mul_bf16x2(P[half * 4 + j * 2 + 1], word(scale, 2 * j + 1));
          mma(acc[G], a[j * 2], b[j * 2], a[j * 2 + 1], b[j * 2 + 1], b0, b1);
        }
      }
    } else if constexpr (KIND == kFp8) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint4 a = *reinterpret_cast<const uint4*>(unit + (G * 2 + j) * 512 + chunk * 16);
        mma(acc[G], decode_fp8<0, 1>(a.x), decode_fp8<2, 3>(a.x), decode_fp8<0, 1>(a.y),
            decode_fp8<2, 3>(a.y), P[j * 4], P[j * 4 + 1]);
        mma(acc[G], decode_fp8<0, 1>(a.z), decode_fp8<2, 3>(a.z), decode_fp8<0, 1>(a.w),
            decode_fp8<2, 3>(a.w), P[j * 4 + 2], P[j * 4 + 3]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint4 a = *reinterpret_cast<const uint4*>(unit + (G * 4 + j) * 512 + chunk * 16);
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
template <int KIND, int D>
__device__ __forceinline__ void probabilities(const Args& p, const uint8_t* k_unit, int lane,
                                              int begin, int end, float (*s)[4], Softmax& sm,
                                              float (*acc)[4]) {
  int g = lane >> 2;
  float f[8];
  if constexpr (KIND != kBf16) {
    powers_of_two(*reinterpret_cast<const uint2*>(k_unit + Unit<KIND, D>::kOuter + g * 8), f);
  }
  float x0 = kLow, x1 = kLow;
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float scale = p.scale * score_unscale(KIND) * (KIND == kBf16 ? 1.0f : f[i * 2 + h]);
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

template <int KIND, int D>
__device__ __forceinline__ void to_operand(const uint8_t* v_unit, int lane, int begin, int end,
                                           float (*s)[4], uint32_t* P) {
  int g = lane >> 2;
  if constexpr (KIND != kBf16) {
    float f[8];
    powers_of_two(*reinterpret_cast<const uint2*>(v_unit + Unit<KIND, D>::kOuter + g * 8), f);
    if (begin > 0 || end < kPage) {  // an unused slot's power may be infinite
#pragma unroll
      for (int i = 0; i < 8; i++) {
        int token = i * 8 + g;
        if (token < begin || token >= end) f[i] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float scale = f[i * 2 + h] * (KIND == kFp8 ? kValueScale : 1.0f);
        s[i][2 * h] *= scale;
        s[i][2 * h + 1] *= scale;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) P[i * 2 + h] = transpose(pack_bf16(s[i][2 * h], s[i][2 * h + 1]));
  }
}

// A softmax's denominator and the weight of its sum, the sink included. Head `row` of all.
__device__ __forceinline__ float inverse_total(const Args& p, size_t row, float m, float l,
                                               float& weight) {
  float extra = p.sink ? p.sink[row] * kLog2e : kLow, top = fmaxf(m, extra);
  weight = exp2f(m - top);
  float total = l * weight + (p.sink ? exp2f(extra - top) : 0.0f);
  return total > 0.0f || total != total ? 1.0f / total : 0.0f;
}

// Sums over the warp are in `sm` already.
template <int D>
__device__ __forceinline__ void write_partial(const Args& p, int slot, int lane, Softmax sm,
                                              float (*acc)[4], float unscale) {
  int g = lane >> 2, t = lane & 3;
  float* o = p.partial + (size_t)slot * 8 * D + 2 * t * D + g;
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    o[i * 16] = acc[i][0] * unscale;
    o[D + i * 16] = acc[i][1] * unscale;
    o[i * 16 + 8] = acc[i][2] * unscale;
    o[D + i * 16 + 8] = acc[i][3] * unscale;
  }
  if (g == 0) {
    p.partial_ml[slot * 8 + 2 * t] = make_float2(sm.m0, sm.l0);
    p.partial_ml[slot * 8 + 2 * t + 1] = make_float2(sm.m1, sm.l1);
  }
}

__device__ __forceinline__ void add_up_sums(Softmax& sm) {
#pragma unroll
  for (int d = 4; d < 32; d <<= 1) {
    sm.l0 += __shfl_xor_sync(~0u, sm.l0, d);
    sm.l1 += __shfl_xor_sync(~0u, sm.l1, d);
  }
}

template <int N>
__device__ __forceinline__ void load_floats(const float* from, float* to) {  // of other multiprocessors
  if constexpr (N == 2) {
    float2 v = __ldcg(reinterpret_cast<const float2*>(from));
    to[0] = v.x; to[1] = v.y;
  } else {
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      float4 v = __ldcg(reinterpret_cast<const float4*>(from + n));
      to[n] = v.x; to[n + 1] = v.y; to[n + 2] = v.z; to[n + 3] = v.w;
    }
  }
}

// Which partial results of a (sequence, head tile): `first` and every `stride` on.
struct Parts {
  int first, stride, count;
};

// Adds partial results up: the result, with that of the recent window, if this is the LAST sum;
// else a partial result in place of the first. HEADS heads of a tile at a time, AHEAD of their
// partial results loaded at once; lane AHEAD * i + j has the weight of the j-th of head i.
template <int D, int HEADS, int AHEAD, bool LAST>
__device__ __forceinline__ void merge_by(const Args& p, int b, int head, Parts parts, int lane) {
  constexpr int N = D / 32;  // dimensions a lane
  int tiles = (p.group + 7) / 8, tile = b * head_tiles(p) + head, j = lane % AHEAD;
  int all = parts.count + (LAST && p.recent ? 1 : 0), rows = min(p.group - head % tiles * 8, 8);
  auto slot = [&](int h, int at) {
    int split = at < parts.count ? parts.first + at * parts.stride : p.splits - 1;
    return ((size_t)tile * p.splits + split) * 8 + h;
  };
  for (int h0 = 0; h0 < rows; h0 += HEADS) {
    int mine = h0 + lane / AHEAD;
    float m = kLow, l = 0.0f, sum[HEADS][N] = {};
    for (int i = 0; i < all; i += AHEAD) {
      float o[HEADS][AHEAD][N] = {};
      float2 ml = make_float2(kLow, 0.0f);
      if (lane / AHEAD < HEADS && mine < rows && i + j < all)
        ml = __ldcg(p.partial_ml + slot(mine, i + j));
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
          if (h0 + h < rows && i + k < all)
            load_floats<N>(p.partial + slot(h0 + h, i + k) * D + lane * N, o[h][k]);
        }
      }
      float top = fmaxf(m, ml.x);
#pragma unroll
      for (int d = 1; d < AHEAD; d <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      float keep = exp2f(m - top), weight = exp2f(ml.x - top), part = weight * ml.y;
#pragma unroll
      for (int d = 1; d < AHEAD; d <<= 1) part += __shfl_xor_sync(~0u, part, d);
      m = top;
      l = l * keep + part;
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        float kept = __shfl_sync(~0u, keep, h * AHEAD);
#pragma unroll
        for (int n = 0; n < N; n++) sum[h][n] *= kept;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
          float by = __shfl_sync(~0u, weight, h * AHEAD + k);
#pragma unroll
          for (int n = 0; n < N; n++) sum[h][n] += by * o[h][k][n];
        }
      }
    }
    if constexpr (!LAST) {
      if (lane / AHEAD < HEADS && mine < rows && j == 0)
        p.partial_ml[slot(mine, 0)] = make_float2(m, l);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      float top = __shfl_sync(~0u, m, h * AHEAD), total = __shfl_sync(~0u, l, h * AHEAD), weight;
      if (h0 + h >= rows) continue;
      if constexpr (LAST) {
        size_t row = (size_t)(head / tiles) * p.group + head % tiles * 8 + h0 + h;
        float scale = inverse_total(p, row, top, total, weight);
        scale *= weight;
        auto out = reinterpret_cast<uint32_t*>(
            p.out + ((size_t)b * p.kv_heads * p.group + row) * D + lane * N);
#pragma unroll
        for (int n = 0; n < N; n += 2)
          out[n / 2] = pack_bf16(sum[h][n] * scale, sum[h][n + 1] * scale);
      } else {
        auto out = reinterpret_cast<float2*>(p.partial + slot(h0 + h, 0) * D + lane * N);
#pragma unroll
        for (int n = 0; n < N; n += 2) out[n / 2] = make_float2(sum[h][n], sum[h][n + 1]);
      }
    }
  }
}

// As many are loaded at once as registers hold.
template <int D, bool LAST>
__device__ __forceinline__ void merge(const Args& p, int b, int head, Parts parts, int lane) {
  constexpr int kHeads = D > 128 ? 1 : 2;
  if (LAST && parts.count + (p.recent ? 1 : 0) <= 4)
    merge_by<D, 2 * kHeads, 4, LAST>(p, b, head, parts, lane);
  else
    merge_by<D, kHeads, kAtOnce, LAST>(p, b, head, parts, lane);
}

// Counts what this warp has written; whether it was the last of so many.
__device__ __forceinline__ bool is_last(int* arrived, int of, int lane) {
  __threadfence();
  __syncwarp();
  int before = lane == 0 ? atomicAdd(arrived, 1) : 0;
  bool last = __shfl_sync(~0u, before, 0) + 1 == of;
  if (last) __threadfence();
  return last;
}

// Adds up the partial results of a (sequence, head tile), of which this warp has written one: by
// eight and then the sums, in an order that their number alone decides.
template <int D>
__device__ __forceinline__ void add_up(const Args& p, const Walk& walk, int lane) {
  int* arrived = p.arrived + (walk.b * head_tiles(p) + walk.head) * counters(p);
  Parts all{0, 1, walk.parts};
  if (walk.parts > kAtOnce) {
    int group = walk.split / kAtOnce, first = group * kAtOnce;
    Parts eight{first, 1, min(kAtOnce, walk.parts - first)};
    if (!is_last(arrived + 1 + group, eight.count, lane)) return;
    merge<D, false>(p, walk.b, walk.head, eight, lane);
    all = {0, kAtOnce, (walk.parts + kAtOnce - 1) / kAtOnce};
  }
  if (is_last(arrived, all.count, lane)) merge<D, true>(p, walk.b, walk.head, all, lane);
}

// The result of (b, head) to `out` if the split is all of it, else a partial one; clears `acc`.
template <int KIND, int D>
__device__ __forceinline__ void finish(const Args& p, const Walk& walk, int lane, Softmax sm,
                                       float (*acc)[4]) {
  int g = lane >> 2, t = lane & 3, tiles = (p.group + 7) / 8;
  add_up_sums(sm);
  if (walk.parts == 1 && !p.recent) {
    int first = walk.head / tiles * p.group, row = walk.head % tiles * 8 + 2 * t;
    float w0, w1;
    w0 = row < p.group ? inverse_total(p, first + row, sm.m0, sm.l0, w0) * w0 : 0.0f;
    w1 = row + 1 < p.group ? inverse_total(p, first + row + 1, sm.m1, sm.l1, w1) * w1 : 0.0f;
    w0 *= value_unscale(KIND), w1 *= value_unscale(KIND);
    __nv_bfloat16* o = p.out + ((size_t)walk.b * p.kv_heads * p.group + first + row) * D + g;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      if (row < p.group) {
        o[i * 16] = __float2bfloat16_rn(acc[i][0] * w0);
        o[i * 16 + 8] = __float2bfloat16_rn(acc[i][2] * w0);
      }
      if (row + 1 < p.group) {
        o[D + i * 16] = __float2bfloat16_rn(acc[i][1] * w1);
        o[D + i * 16 + 8] = __float2bfloat16_rn(acc[i][3] * w1);
      }
    }
  } else {
    int tile = walk.b * head_tiles(p) + walk.head;
    write_partial<D>(p, tile * p.splits + walk.split, lane, sm, acc, value_unscale(KIND));
    add_up<D>(p, walk, lane);
  }
#pragma unroll
  for (int i = 0; i < D / 16; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
}

template <int KIND, int D>
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
    if constexpr (KIND == kFp8) {
#pragma unroll
      for (int i = 0; i < 8; i++) q[c * 8 + i] = mul_bf16x2(q[c * 8 + i], kTimesQueryScale);
    }
  }
}

// prefix[b]: pages of the sequences before b; the whole block, a run of sequences a thread.
template <int WARPS>
__device__ void prefix_pages(const Args& p, int* prefix) {
  __shared__ int sums[WARPS];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int each = (p.batch + WARPS * 32 - 1) / (WARPS * 32);
  int begin = min((int)threadIdx.x * each, p.batch), end = min(begin + each, p.batch), mine = 0;
#pragma unroll 4
  for (int b = begin; b < end; b++) mine += Span(p, b).pages();
  int before = mine;  // of this thread's run: of the warp, then of the block
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  before -= mine;
  for (int w = 0; w < warp; w++) before += sums[w];
  for (int b = begin; b < end; b++) {
    prefix[b] = before;
    before += Span(p, b).pages();
  }
  if (end == p.batch) prefix[p.batch] = before;  // of several threads: all write the total
  __syncthreads();
}

// Results of sequences without pages, dealt to all warps.
template <int D>
__device__ __forceinline__ void write_empty(const Args& p, const int* prefix, int me, int warps,
                                            int lane) {
  int heads = head_tiles(p);
  for (int tile = me; tile < p.batch * heads; tile += warps) {
    int b = tile / heads;
    if (prefix[b] == prefix[b + 1]) merge_by<D, 4, 1, true>(p, b, tile % heads, {0, 1, 0}, lane);
  }
}

template <int KIND, int D>
constexpr int kScaleBytes = KIND == kNvfp4 ? 8 * D : 0;  // a warp's converted scales of V

template <int KIND, int D, int WARPS, int UNITS>
__global__ void __launch_bounds__(WARPS * 32, 1)
    paged_attention(const __grid_constant__ Args p) {
  constexpr int kUnit = Unit<KIND, D>::kBytes;
  extern __shared__ __align__(128) uint8_t shared[];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + WARPS * UNITS * kUnit) + warp * UNITS;
  uint4* scales = reinterpret_cast<uint4*>(shared + WARPS * UNITS * (kUnit + 8)) +
                  warp * kScaleBytes<KIND, D> / 16;
  int* prefix = reinterpret_cast<int*>(shared + WARPS * (UNITS * (kUnit + 8) + kScaleBytes<KIND, D>));
  if (lane < UNITS) barrier_init(full + lane, 1);
  barrier_init_fence();
  prefix_pages<WARPS>(p, prefix);
  int me = warp * gridDim.x + blockIdx.x;  // few pages: one warp on each multiprocessor first
  int total = prefix[p.batch] * head_tiles(p), warps = used_warps(p, total);
  auto share = [&](int i) { return i <= warps ? (int)((long long)total * i / max(warps, 1)) : total; };
  Walk walk{0, 0, 0, 0, 0, 0, share(me), share(me + 1)};
  if (walk.at < walk.high) walk.find(p, prefix);
  uint8_t* units = shared + warp * UNITS * kUnit;
  Ring<KIND, D, UNITS> ring{p, prefix, units, full, evict_first_policy(), lane, walk, 0, 0, 0};
  ring.enter();
  bool early = ring.starts_early();
  if (early) ring.start();
  grid_wait();
  async_proxy_fence();
  if (!early) ring.start();
  write_empty<D>(p, prefix, me, gridDim.x * WARPS, lane);
  float acc[D / 16][4] = {};
  uint32_t q[D / 8], P[8];
  for (int used = 0; walk.at < walk.high;) {
    walk.enter(p, prefix);
    load_query<KIND, D>(p, walk.b, walk.head, lane, q);
    Span span(p, walk.b);
    Softmax sm{kLow, kLow, 0.0f, 0.0f};
    for (int page = walk.page; page < walk.end; page++) {
      int begin = max(span.start - page * kPage, 0), end = min(span.paged - page * kPage, kPage);
      float s[4][4];
      int slot = used % UNITS;
      barrier_wait(full + slot, (used / UNITS) & 1);
      scores<KIND, D>(units + slot * kUnit, lane, q, s);
      probabilities<KIND, D>(p, units + slot * kUnit, lane, begin, end, s, sm, acc);
      __syncwarp();
      ring.copy_next();
      used++;
      slot = used % UNITS;
      barrier_wait(full + slot, (used / UNITS) & 1);
      to_operand<KIND, D>(units + slot * kUnit, lane, begin, end, s, P);
      if constexpr (KIND == kNvfp4) convert_scales<D>(units + slot * kUnit, lane, scales);
      values<KIND, D>(units + slot * kUnit, scales, lane, begin, end, P, acc);
      __syncwarp();
      ring.copy_next();
      used++;
    }
    finish<KIND, D>(p, walk, lane, sm, acc);
  }
}

// Slots begin <= s < end of one page of a window, read where they lie.
template <int D>
__device__ __forceinline__ void add_recent(const Args& p, const uint8_t* k_unit, int lane,
                                           int begin, int end, const uint32_t* q, Softmax& sm,
                                           float (*acc)[4]) {
  if (begin >= end) return;
  const uint8_t* v_unit = k_unit + Unit<kBf16, D>::kBytes;
  float s[4][4];
  uint32_t P[8];
  scores<kBf16, D>(k_unit, lane, q, s);
  probabilities<kBf16, D>(p, k_unit, lane, begin, end, s, sm, acc);
  to_operand<kBf16, D>(v_unit, lane, begin, end, s, P);
  values<kBf16, D>(v_unit, nullptr, lane, begin, end, P, acc);
}

// The recent windows: a warp a (sequence, head tile), one partial result each. Token i is slot
// i % recent_tokens, so that what counts is one run of slots, or two.
template <int D>
__global__ void __launch_bounds__(128) recent_attention(const Args p) {
  int lane = threadIdx.x & 31, tile = blockIdx.x * 4 + (threadIdx.x >> 5);
  int heads = head_tiles(p), b = tile / heads, head = tile % heads;
  if (b >= p.batch) return;
  Span span(p, b);
  int kv_head = head / ((p.group + 7) / 8), size = p.recent_tokens;
  int first = span.paged % size, last = first + span.end - span.paged;
  float acc[D / 16][4] = {};
  uint32_t q[D / 8];
  load_query<kBf16, D>(p, b, head, lane, q);
  Softmax sm{kLow, kLow, 0.0f, 0.0f};
  for (int page = 0; page < size / kPage; page++) {
    int at = page * kPage;
    size_t unit = ((size_t)(b * (size / kPage) + page) * p.kv_heads + kv_head) * 2;
    const uint8_t* k_unit = p.recent + unit * Unit<kBf16, D>::kBytes;
    add_recent<D>(p, k_unit, lane, max(first - at, 0), min(last - at, kPage), q, sm, acc);
    add_recent<D>(p, k_unit, lane, 0, min(last - size - at, kPage), q, sm, acc);
  }
  add_up_sums(sm);
  write_partial<D>(p, (tile + 1) * p.splits - 1, lane, sm, acc, 1.0f);
}

// `rows`: of the new tokens, which are stored and attended to in one call; or null.
template <int KIND, int D, int WARPS, int UNITS>
cudaError_t launch(const Args& args, const TokenRows* rows, cudaStream_t stream) {
  constexpr int shared = WARPS * (UNITS * (Unit<KIND, D>::kBytes + 8) + kScaleBytes<KIND, D>) +
                         (kMaxBatch + 1) * 4;
  static_assert(shared <= 227 * 1024 - 256 && WARPS * UNITS % 2 == 0, "shared memory");
  auto kernel = paged_attention<KIND, D, WARPS, UNITS>;
  static cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (ready != cudaSuccess) return ready;
  int blocks = args.warps / WARPS, tiles = args.batch * args.kv_heads * ((args.group + 7) / 8);
  if (rows) {
    int heads = rows->heads.tokens * (rows->heads.heads + 2 * rows->heads.kv_heads);
    token_rows<KIND, D><<<(heads + 3) / 4, 128, 0, stream>>>(*rows);
    return launch_dependent(kernel, blocks, WARPS * 32, shared, stream, args);
  }
  if (args.recent) recent_attention<D><<<(tiles + 3) / 4, 128, 0, stream>>>(args);
  cudaError_t cleared = cudaMemsetAsync(args.arrived, 0, tiles * counters(args) * sizeof(int), stream);
  if (cleared != cudaSuccess) return cleared;
  kernel<<<blocks, WARPS * 32, shared, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace trace_jax

// --- the call from XLA ------------------------------------------------------------------

struct Variant {
  int kind, head_size, warps;
  cudaError_t (*launch)(const trace_jax::Args&, const trace_jax::TokenRows*, cudaStream_t);
};

#define VARIANT(kind, head_size, warps, units) \
  {trace_jax::kind, head_size, warps, trace_jax::launch<trace_jax::kind, head_size, warps, units>}

static const Variant kVariants[] = {
    VARIANT(kNvfp4, 128, 12, 3), VARIANT(kNvfp4, 128, 16, 2), VARIANT(kNvfp4, 128, 8, 5),
    VARIANT(kBf16, 128, 4, 3),   VARIANT(kNvfp4, 64, 16, 4),  VARIANT(kNvfp4, 256, 6, 3),
    VARIANT(kBf16, 64, 8, 3),    VARIANT(kBf16, 256, 2, 3),   VARIANT(kFp8, 128, 8, 3),
    VARIANT(kFp8, 64, 12, 4),    VARIANT(kFp8, 256, 4, 3),
    VARIANT(kFp8, 128, 12, 2),
};

using Bytes = ffi::Buffer<ffi::U8>;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;
using Rows = ffi::Buffer<ffi::BF16>;

static trace_jax::Args shapes(Ints table, Ints lengths, Rows query, Floats sink,
                              ffi::Result<Rows> out, ffi::Result<Floats> partial,
                              ffi::Result<Floats> partial_ml, ffi::Result<Ints> arrived,
                              int64_t kv_heads, int64_t window, int64_t warps, int64_t split,
                              float scale) {
  trace_jax::Args args{};
  args.table = table.typed_data();
  args.lengths = lengths.typed_data();
  args.query = reinterpret_cast<const __nv_bfloat16*>(query.typed_data());
  args.sink = sink.element_count() ? sink.typed_data() : nullptr;
  args.partial = partial->typed_data();
  args.partial_ml = reinterpret_cast<float2*>(partial_ml->typed_data());
  args.arrived = arrived->typed_data();
  args.out = reinterpret_cast<__nv_bfloat16*>(out->typed_data());
  args.batch = static_cast<int>(query.dimensions()[0]);
  args.kv_heads = static_cast<int>(kv_heads);
  args.group = static_cast<int>(query.dimensions()[1] / kv_heads);
  args.max_pages = static_cast<int>(table.dimensions()[1]);
  args.split = static_cast<int>(split);
  args.splits = static_cast<int>(partial->dimensions()[1]);
  args.window = static_cast<int>(window);
  args.warps = static_cast<int>(warps);
  args.scale = scale * trace_jax::kLog2e;
  return args;
}

static ffi::Error run(const trace_jax::Args& args, const trace_jax::TokenRows* rows,
                      int64_t variant, cudaStream_t stream) {
  if (variant < 0 || variant >= static_cast<int64_t>(sizeof(kVariants) / sizeof(Variant)))
    return ffi::Error::InvalidArgument("paged_attention: no such variant");
  int needed = args.split < 1 ? 0 : trace_jax::split_count(args.split, args.max_pages);
  if (args.split < 1 || args.splits != needed + (args.recent ? 1 : 0))
    return ffi::Error::InvalidArgument("paged_attention: no room for the splits");
  if (args.batch > trace_jax::kMaxBatch)
    return ffi::Error::InvalidArgument("paged_attention: batch above 4096");
  cudaError_t error = kVariants[variant].launch(args, rows, stream);
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

static ffi::Error PagedAttention(cudaStream_t stream, Bytes pages, Ints table, Ints lengths,
                                 Rows query, Floats sink, Bytes recent, ffi::Result<Rows> out,
                                 ffi::Result<Floats> partial, ffi::Result<Floats> partial_ml,
                                 ffi::Result<Ints> arrived, int64_t variant, int64_t kv_heads,
                                 int64_t window, int64_t warps, int64_t split,
                                 int64_t recent_tokens, float scale) {
  trace_jax::Args args = shapes(table, lengths, query, sink, out, partial, partial_ml, arrived,
                                kv_heads, window, warps, split, scale);
  args.pages = pages.typed_data();
  args.recent = recent.element_count() ? recent.typed_data() : nullptr;
  args.recent_tokens = static_cast<int>(recent_tokens);
  return run(args, nullptr, variant, stream);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_paged_attention, PagedAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Bytes>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Rows>()
                                  .Arg<Floats>()
                                  .Arg<Bytes>()
                                  .Ret<Rows>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Ints>()
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("warps")
                                  .Attr<int64_t>("split")
                                  .Attr<int64_t>("recent_tokens")
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});

static ffi::Error DecodeAttention(cudaStream_t stream, Bytes pages, Ints table, Ints lengths,
                                  Floats projected, Floats q_weight, Floats k_weight, Floats cos,
                                  Floats sin, Floats sink, ffi::Result<Bytes> stored,
                                  ffi::Result<Rows> out, ffi::Result<Rows> query,
                                  ffi::Result<Floats> partial, ffi::Result<Floats> partial_ml,
                                  ffi::Result<Ints> arrived, ffi::Result<Bytes> k_bits,
                                  ffi::Result<Bytes> k_scales, ffi::Result<Bytes> v_bits,
                                  ffi::Result<Bytes> v_scales, int64_t variant, int64_t kv_heads,
                                  int64_t window, int64_t warps, int64_t split, float scale,
                                  float eps) {
  using namespace trace_jax;
  if (pages.untyped_data() != stored->untyped_data())
    return ffi::Error::Internal("decode_attention: the pool and its result are not one buffer");
  Args args = shapes(table, lengths, *query, sink, out, partial, partial_ml, arrived, kv_heads,
                     window, warps, split, scale);
  args.pages = stored->typed_data();
  auto or_null = [](auto& b) { return b.element_count() ? b.typed_data() : nullptr; };
  TokenRows rows{};
  rows.heads = {projected.typed_data(), or_null(q_weight), or_null(k_weight), cos.typed_data(),
                sin.typed_data(), args.batch, args.kv_heads * args.group, args.kv_heads, eps};
  AppendArgs& append = rows.append;
  append.pages = stored->typed_data();
  append.table = args.table;
  append.positions = args.lengths;
  append.behind = 1;
  append.k = {or_null(*k_bits), or_null(*k_scales)};
  append.v = {or_null(*v_bits), or_null(*v_scales)};
  append.batch = args.batch;
  append.kv_heads = args.kv_heads;
  append.pool = static_cast<int>(pages.dimensions()[0]);
  append.max_pages = args.max_pages;
  append.whole_codes = k_bits->dimensions().back() == query->dimensions().back() / 2;
  rows.q = reinterpret_cast<__nv_bfloat16*>(query->typed_data());
  rows.cleared = args.arrived;
  rows.words = static_cast<int>(arrived->element_count());
  return run(args, &rows, variant, stream);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(trace_jax_decode_attention, DecodeAttention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Bytes>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Bytes>()
                                  .Ret<Rows>()
                                  .Ret<Rows>()
                                  .Ret<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Ints>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Ret<Bytes>()
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("warps")
                                  .Attr<int64_t>("split")
                                  .Attr<float>("scale")
                                  .Attr<float>("eps"),
                              {ffi::Traits::kCmdBufferCompatible});
