// Decode attention over paged K and V (NVFP4, FP8 or BF16), for Hopper.
//
// A (sequence, KV head) is cut into equal splits of about so many pages, by its own length alone, so
// that what a sequence gives does not depend on the others. All splits form one list; each warp takes
// those that begin in an equal contiguous share of the pages, so the load balances whatever the
// lengths are. A warp streams its pages through its own ring in shared memory (bulk copies, one
// unit for K and one for V), multiplies K and V as the tensor cores' left operand with up to 8
// query heads on the right, and writes the result of a (sequence, KV head) of one split, or
// leaves a partial one. A second kernel merges those.
#include "common.cuh"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace trace_jax {

constexpr int kPage = 64;
constexpr int kMaxBatch = 4096;
constexpr int kMergeWarps = 4;
constexpr float kLow = -1e30f;
constexpr float kLog2e = 1.4426950408889634f;

enum Kind { kNvfp4 = 0, kFp8 = 1, kBf16 = 2 };

struct Args {
  const uint8_t* pages;        // [pages][kv heads][2][unit bytes]
  const int* table;            // [batch][max_pages]
  const int* lengths;          // [batch]
  const __nv_bfloat16* query;  // [batch][kv heads][group][head size]
  const float* sink;           // [kv heads * group] or null
  const uint8_t* recent;       // BF16 [rings * recent_tokens / 64][kv heads][2][unit bytes] or null
  const int* ring;             // [batch], which ring is a sequence's; null: its own number
  float* partial;              // [batch][head tiles][splits][8][head size]
  float2* partial_ml;          // [batch][head tiles][splits][8]: maximum, sum
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
__device__ __forceinline__ int used_warps(const Args& p, long long total) {
  return (int)min((long long)p.warps, (total + p.split - 1) / p.split);
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
  int b, head, split, page, end;  // `end`: the split's last page, exclusive
  bool whole;                     // there is no other split
  long long at, high;
  __device__ __forceinline__ void find(const Args& p, const int* prefix) {
    int low = 0, top = p.batch;  // prefix[low] <= at < prefix[top], in pages of all heads
    while (top - low > 1) {
      int middle = (low + top) / 2;
      if ((long long)prefix[middle] * head_tiles(p) <= at) low = middle;
      else top = middle;
    }
    b = low;
    // A split that began before belongs to another warp.
    int count = prefix[b + 1] - prefix[b], parts = split_count(p.split, count);
    int first = (int)((at - (long long)prefix[b] * head_tiles(p)) % count);
    int next = (first * parts + count - 1) / count;  // the first split that begins here or later
    at += next * count / parts - first;
  }
  __device__ __forceinline__ void enter(const Args& p, const int* prefix) {
    if (at >= high) { b = -1; return; }
    int heads = head_tiles(p);
    while (at >= (long long)prefix[b + 1] * heads) b++;
    int count = prefix[b + 1] - prefix[b], rest = (int)(at - (long long)prefix[b] * heads);
    head = rest / count;
    int first = rest % count, parts = split_count(p.split, count);
    split = (first * parts + count - 1) / count;
    int many = (split + 1) * count / parts - first;
    page = first + Span(p, b).first_page();
    end = page + many;
    whole = parts == 1 && !p.recent;
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

// The result of (b, head) to `out` if the split is all of it, else a partial one; clears `acc`.
template <int KIND, int D>
__device__ __forceinline__ void finish(const Args& p, const Walk& walk, int lane, Softmax sm,
                                       float (*acc)[4]) {
  int g = lane >> 2, t = lane & 3, tiles = (p.group + 7) / 8;
  add_up_sums(sm);
  if (walk.whole) {
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

template <int KIND, int D>
constexpr int kScaleBytes = KIND == kNvfp4 ? 8 * D : 0;  // a warp's converted scales of V

template <int KIND, int D, int WARPS, int UNITS>
__global__ void __launch_bounds__(WARPS * 32, 1) paged_attention(const Args p) {
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
  long long total = (long long)prefix[p.batch] * head_tiles(p);
  int warps = used_warps(p, total);
  if (me >= warps) return;
  Walk walk{0, 0, 0, 0, 0, false, total * me / warps, total * (me + 1) / warps};
  walk.find(p, prefix);
  uint8_t* units = shared + warp * UNITS * kUnit;
  Ring<KIND, D, UNITS> ring{p, prefix, units, full, evict_first_policy(), lane, walk, 0, 0, 0};
  ring.start();
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
  int kv_head = head / ((p.group + 7) / 8), size = p.recent_tokens, ring = p.ring ? p.ring[b] : b;
  int first = span.paged % size, last = first + span.end - span.paged;
  float acc[D / 16][4] = {};
  uint32_t q[D / 8];
  load_query<kBf16, D>(p, b, head, lane, q);
  Softmax sm{kLow, kLow, 0.0f, 0.0f};
  for (int page = 0; page < size / kPage; page++) {
    int at = page * kPage;
    size_t unit = ((size_t)(ring * (size / kPage) + page) * p.kv_heads + kv_head) * 2;
    const uint8_t* k_unit = p.recent + unit * Unit<kBf16, D>::kBytes;
    add_recent<D>(p, k_unit, lane, max(first - at, 0), min(last - at, kPage), q, sm, acc);
    add_recent<D>(p, k_unit, lane, 0, min(last - size - at, kPage), q, sm, acc);
  }
  add_up_sums(sm);
  write_partial<D>(p, (tile + 1) * p.splits - 1, lane, sm, acc, 1.0f);
}

// Adds up the partial results of the (sequence, head tile)s that have several, in an order that
// their number alone decides, and gives zeros where there are no tokens. TEAM warps take one head of
// a tile, each of them every TEAM-th of its partial results.
template <int D, int TEAM>
__global__ void __launch_bounds__(kMergeWarps * 32) merge(const Args p) {
  constexpr int N = D / 32, kAhead = 4;  // dimensions a lane; partial results loaded at once
  __shared__ float sums[kMergeWarps][D];
  __shared__ float2 totals[kMergeWarps];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = head_tiles(p);
  int each = blockIdx.x * (kMergeWarps / TEAM) + warp / TEAM;  // a head of a tile
  int tile = each / 8, h = each % 8, b = tile / heads, head = tile % heads;
  int tiles = (p.group + 7) / 8, row = head % tiles * 8 + h;
  if (TEAM == kMergeWarps && row >= p.group) return;
  int splits = split_count(p.split, Span(p, b).pages()), all = splits + (p.recent ? 1 : 0);
  // Its warp wrote the result, or there is no such head.
  bool done = (splits == 1 && !p.recent) || row >= p.group;
  if (TEAM == kMergeWarps && done) return;
  float m = kLow, l = 0.0f, sum[N] = {};
  for (int i = done ? all : warp % TEAM; i < all; i += kAhead * TEAM) {
    float2 ml[kAhead];
    float o[kAhead][N], top = m;
#pragma unroll
    for (int j = 0; j < kAhead; j++) {
      int at = i + j * TEAM, place = at < splits ? at : p.splits - 1;
      size_t slot = ((size_t)tile * p.splits + place) * 8 + h;
      ml[j] = at < all ? p.partial_ml[slot] : make_float2(kLow, 0.0f);
#pragma unroll
      for (int n = 0; n < N; n++) o[j][n] = at < all ? p.partial[slot * D + lane * N + n] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kAhead; j++) top = fmaxf(top, ml[j].x);
    float keep = exp2f(m - top);
    l *= keep;
#pragma unroll
    for (int n = 0; n < N; n++) sum[n] *= keep;
#pragma unroll
    for (int j = 0; j < kAhead; j++) {
      float weight = exp2f(ml[j].x - top);
      l += weight * ml[j].y;
#pragma unroll
      for (int n = 0; n < N; n++) sum[n] += weight * o[j][n];
    }
    m = top;
  }
  size_t of_all = (size_t)(head / tiles) * p.group + row;
  __nv_bfloat16* out = p.out + ((size_t)b * p.kv_heads * p.group + of_all) * D;
  float weight;
  if constexpr (TEAM == 1) {
    if (done) return;
    float scale = inverse_total(p, of_all, m, l, weight) * weight;
#pragma unroll
    for (int n = 0; n < N; n++) out[lane * N + n] = __float2bfloat16_rn(sum[n] * scale);
  } else {
#pragma unroll
    for (int n = 0; n < N; n++) sums[warp][lane * N + n] = sum[n];
    if (lane == 0) totals[warp] = make_float2(m, l);
    __syncthreads();
    float top = kLow, total = 0.0f, weights[TEAM];
#pragma unroll
    for (int w = 0; w < TEAM; w++) top = fmaxf(top, totals[w].x);
#pragma unroll
    for (int w = 0; w < TEAM; w++) {
      weights[w] = exp2f(totals[w].x - top);
      total += weights[w] * totals[w].y;
    }
    float scale = inverse_total(p, of_all, top, total, weight);
    for (int d = threadIdx.x; d < D; d += TEAM * 32) {
      float both = 0.0f;
#pragma unroll
      for (int w = 0; w < TEAM; w++) both += weights[w] * sums[w][d];
      out[d] = __float2bfloat16_rn(both * scale * weight);
    }
  }
}

template <int KIND, int D, int WARPS, int UNITS>
cudaError_t launch(Args args, cudaStream_t stream) {
  constexpr int shared = WARPS * (UNITS * (Unit<KIND, D>::kBytes + 8) + kScaleBytes<KIND, D>) +
                         (kMaxBatch + 1) * 4;
  static_assert(shared <= 227 * 1024 - 256 && WARPS * UNITS % 2 == 0, "shared memory");
  auto kernel = paged_attention<KIND, D, WARPS, UNITS>;
  static cudaError_t ready =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  // The same division of memory and cache for both, or the switch costs time.
  auto carve = [](const void* other) {
    return cudaFuncSetAttribute(other, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  };
  static cudaError_t one = carve((const void*)merge<D, 1>);
  static cudaError_t team = carve((const void*)merge<D, kMergeWarps>);
  if (ready != cudaSuccess) return ready;
  if (one != cudaSuccess || team != cudaSuccess) return one != cudaSuccess ? one : team;
  int blocks = args.warps / WARPS;
  kernel<<<blocks, WARPS * 32, shared, stream>>>(args);
  int tiles = args.batch * args.kv_heads * ((args.group + 7) / 8);
  if (args.recent) recent_attention<D><<<(tiles + 3) / 4, 128, 0, stream>>>(args);
  if (args.splits <= 4) merge<D, 1><<<tiles * 8 / kMergeWarps, kMergeWarps * 32, 0, stream>>>(args);
  else merge<D, kMergeWarps><<<tiles * 8, kMergeWarps * 32, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace trace_jax

// --- the call from XLA ------------------------------------------------------------------

struct Variant {
  int kind, head_size, warps;
  cudaError_t (*launch)(trace_jax::Args, cudaStream_t);
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

static ffi::Error PagedAttention(cudaStream_t stream, ffi::Buffer<ffi::U8> pages,
                                 ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lengths,
                                 ffi::Buffer<ffi::BF16> query, ffi::Buffer<ffi::F32> sink,
                                 ffi::Buffer<ffi::U8> recent, ffi::Buffer<ffi::S32> ring,
                                 ffi::Result<ffi::Buffer<ffi::BF16>> out,
                                 ffi::Result<ffi::Buffer<ffi::F32>> partial,
                                 ffi::Result<ffi::Buffer<ffi::F32>> partial_ml, int64_t variant,
                                 int64_t kv_heads, int64_t window, int64_t warps, int64_t split,
                                 int64_t recent_tokens, float scale) {
  trace_jax::Args args{};
  args.pages = pages.typed_data();
  args.table = table.typed_data();
  args.lengths = lengths.typed_data();
  args.query = reinterpret_cast<const __nv_bfloat16*>(query.typed_data());
  args.sink = sink.element_count() ? sink.typed_data() : nullptr;
  args.recent = recent.element_count() ? recent.typed_data() : nullptr;
  args.ring = ring.element_count() ? ring.typed_data() : nullptr;
  args.partial = partial->typed_data();
  args.partial_ml = reinterpret_cast<float2*>(partial_ml->typed_data());
  args.out = reinterpret_cast<__nv_bfloat16*>(out->typed_data());
  args.batch = static_cast<int>(query.dimensions()[0]);
  args.kv_heads = static_cast<int>(kv_heads);
  args.recent_tokens = static_cast<int>(recent_tokens);
  args.group = static_cast<int>(query.dimensions()[1] / kv_heads);
  args.max_pages = static_cast<int>(table.dimensions()[1]);
  args.split = static_cast<int>(split);
  args.splits = static_cast<int>(partial->dimensions()[1]);
  args.window = static_cast<int>(window);
  args.warps = static_cast<int>(warps);
  args.scale = scale * trace_jax::kLog2e;
  if (variant < 0 || variant >= static_cast<int64_t>(sizeof(kVariants) / sizeof(Variant)))
    return ffi::Error::InvalidArgument("paged_attention: no such variant");
  int needed = split < 1 ? 0 : trace_jax::split_count(args.split, args.max_pages);
  if (split < 1 || args.splits != needed + (args.recent ? 1 : 0))
    return ffi::Error::InvalidArgument("paged_attention: no room for the splits");
  if (args.batch > trace_jax::kMaxBatch)
    return ffi::Error::InvalidArgument("paged_attention: batch above 4096");
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
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("kv_heads")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("warps")
                                  .Attr<int64_t>("split")
                                  .Attr<int64_t>("recent_tokens")
                                  .Attr<float>("scale"),
                              {ffi::Traits::kCmdBufferCompatible});
