// Timing of a device-to-device copy, the yardstick of the other rows.
#include "timing.cuh"

extern "C" float bench_copy(void* to, const void* from, size_t bytes, int reps) {
  return median_us(1, reps, [&](int, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  });
}
