// Warpgroup products, 16 of K: with the A operand in registers, 64 outputs x N rows, or with both
// operands in shared memory, 64 rows x 256 outputs.
#pragma once
#include <stdint.h>

namespace trace_jax {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most PENDING of this warpgroup's commit groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Descriptor of a B operand in shared memory, no swizzle: 8 rows x 16 bytes contiguous, the
// other 8 of K 128 bytes on, the next 8 rows `stride` bytes on. Its low half, of a place `bytes` on,
// is `operand_low` of the first plus bytes / 16. (In halves: 64-bit sums would cost as much as the
// decoding of a pair.)
__device__ __forceinline__ uint32_t operand_low(uint32_t address) {
  return (address >> 4) | (8u << 16);
}
__device__ __forceinline__ uint64_t operand_b(uint32_t low, uint32_t stride) {
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(stride >> 4));
  return descriptor;
}

#define TJ_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TJ_F16(d, i) TJ_F4(d, i), TJ_F4(d, i + 4), TJ_F4(d, i + 8), TJ_F4(d, i + 12)
#define TJ_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define TJ_R24 TJ_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define TJ_R32 TJ_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TJ_R48 TJ_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define TJ_R64 TJ_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TJ_WGMMA(n, regs, a, desc)                                                     \
  "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                           \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" regs "}, {" a "}, " desc \
  ", p, 1, 1, 0;\n}"
#define TJ_IN "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)

// d += A x B; d[4 j + i]: lane 4 g + t holds outputs g (i < 2) and g + 8 of rows 8 j + 2 t + i % 2.
template <int N>
__device__ __forceinline__ void wgmma(float* d, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                      uint64_t b) {
  if constexpr (N == 32)
    asm volatile(TJ_WGMMA("32", TJ_R16, "%16,%17,%18,%19", "%20") : TJ_F16(d, 0) : TJ_IN);
  else if constexpr (N == 64)
    asm volatile(TJ_WGMMA("64", TJ_R32, "%32,%33,%34,%35", "%36")
                 : TJ_F16(d, 0), TJ_F16(d, 16) : TJ_IN);
  else
    asm volatile(TJ_WGMMA("128", TJ_R64, "%64,%65,%66,%67", "%68")
                 : TJ_F16(d, 0), TJ_F16(d, 16), TJ_F16(d, 32), TJ_F16(d, 48) : TJ_IN);
}

// Descriptor of an operand in shared memory, rows of 128 bytes (64 of K) whose 16-byte units are
// swizzled: unit u of row r stands at u ^ (r % 8). `address`: of a row that 8 divides, plus 32 bytes
// for every 16 of K.
__device__ __forceinline__ uint64_t operand_swizzled(uint32_t address) {
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"((address >> 4) | (1u << 16)),
      "r"((1024u >> 4) | (1u << 30)));
  return descriptor;
}

#define TJ_R80 TJ_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define TJ_R96 TJ_R80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define TJ_R112 TJ_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define TJ_R128 TJ_R112 \
  ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d = A x B (+ d if `add`) with 64 rows in A and 256 outputs in B; d[4 j + i]: lane 4 g + t of warp
// w holds rows 16 w + g (i < 2) and 8 more, and outputs 8 j + 2 t + i % 2.
__device__ __forceinline__ void wgmma_shared(float* d, uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" TJ_R128 "}, %128, %129, "
      "p, 1, 1, 0, 0;\n}"
      : TJ_F16(d, 0), TJ_F16(d, 16), TJ_F16(d, 32), TJ_F16(d, 48), TJ_F16(d, 64), TJ_F16(d, 80),
        TJ_F16(d, 96), TJ_F16(d, 112)
      : "l"(a), "l"(b), "r"(add));
}

}  // namespace trace_jax
