// Shared device code of the Hopper kernels: E2M1 decoding, tensor-core products, bulk copies.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace trace_jax {

// Four pairs of codes sit interlocked in a word: pair p < 3 at the bf16 positions
// (15, 8, 7, 6) shifted right by 3 p, pair 3 in the bits left over.
constexpr uint32_t kPairMask = 0x81C081C0u;
// Decoded codes carry 2^-126 and their scales 2^117 (see scale_pair).
constexpr float kUnscale = 512.0f;

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Eight codes to four bf16x2, each value times 2^-126.
__device__ __forceinline__ void decode_word(uint32_t w, uint32_t* pairs) {
  pairs[0] = w & kPairMask;
  pairs[1] = (w << 3) & kPairMask;
  pairs[2] = (w << 6) & kPairMask;
  pairs[3] = ((w << 1) & 0x80008000u) | ((w >> 5) & 0x01000100u) | ((w >> 4) & 0x00C000C0u);
}

// The same of a word of weights (bits.interlock_weights), in nine instructions.
__device__ __forceinline__ void decode_weights(uint32_t w, uint32_t* pairs) {
  pairs[0] = w & kPairMask;
  pairs[1] = __funnelshift_r(w, w, 6) & kPairMask;
  pairs[2] = (w << 4) & kPairMask;
  pairs[3] = ((w << 6) & 0x80C080C0u) | ((w >> 2) & 0x01000100u);
}

// Block scales are kept as E5M3: bits (exponent + 10) << 3 | mantissa, every E4M3 value
// normal. Bytes LO and HI of `bytes` to a bf16x2 of scale * 2^POWER, in two instructions.
template <int LO, int HI, int POWER = 117>
__device__ __forceinline__ uint32_t scale_pair(uint32_t bytes) {
  constexpr uint32_t select = 0x4040u | LO | (HI << 8);
  constexpr uint32_t bias = (POWER + 127 - 10) << 7;
  return __byte_perm(bytes, 0, select) * 16u + (bias | (bias << 16));
}

// One byte of scale to a bf16x2 of twice the same.
__device__ __forceinline__ uint32_t scale_twice(uint32_t byte) {
  constexpr uint32_t bias = (117 + 127 - 10) << 7;
  return byte * 0x00100010u + (bias | (bias << 16));
}

__device__ __forceinline__ void mma(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void barrier_init(uint64_t* bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count));
}

__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}"
      ::"r"(shared_address(bar)), "r"(parity) : "memory");
}

// `bar` also waits for `bytes` of bulk copies.
__device__ __forceinline__ void barrier_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
               "r"(bytes) : "memory");
}

// One thread: `bytes` (a multiple of 16) from global to shared memory, counted by `bar`.
__device__ __forceinline__ void bulk_load(void* dst, const void* src, uint32_t bytes,
                                          uint64_t* bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(dst)), "l"(src), "r"(bytes),
      "r"(shared_address(bar)), "l"(policy) : "memory");
}

// One thread: both; `bar` completes when the bytes are there.
__device__ __forceinline__ void bulk_copy(void* dst, const void* src, uint32_t bytes,
                                          uint64_t* bar, uint64_t policy) {
  barrier_expect(bar, bytes);
  bulk_load(dst, src, bytes, bar, policy);
}

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Orders ordinary accesses of memory, seen by this thread, before its bulk copies.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Four 8 x 16-byte matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ uint4 load_matrices(uint32_t address) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// A kernel started by `launch_dependent` may begin before the one ahead of it in the stream has
// ended: it reads nothing that others write before `grid_wait`.
__device__ __forceinline__ void grid_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void grid_release() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

template <class Kernel, class... Arguments>
cudaError_t launch_dependent(Kernel kernel, int blocks, int threads, int shared,
                             cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

inline int multiprocessors() {
  static int count = [] {
    int device = 0, n = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    return n;
  }();
  return count;
}

}  // namespace trace_jax
