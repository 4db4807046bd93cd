// What becomes of the sums of a routed product: nothing, or gate and up to one activation.
#pragma once

namespace trace_jax {

enum Epilogue { kPlain = 0, kSilu = 1, kClamped = 2 };

// The result is rounded to BF16, so approximate quotients do; exact ones have a slow path, which
// costs a tenth of a product where gates are large.
__device__ __forceinline__ float gated(float gate, float up, int epilogue) {
  if (epilogue == kClamped) {
    gate = fminf(gate, 7.0f);
    up = fminf(fmaxf(up, -7.0f), 7.0f);
    return __fdividef(gate, 1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
  }
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

}  // namespace trace_jax
