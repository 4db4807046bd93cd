// Device time of back-to-back launches: median of `reps` runs over `n` launches, microseconds.
#pragma once
#include <algorithm>
#include <cuda_runtime.h>

template <class Launch>
float median_us(int n, int reps, Launch launch) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  cudaStreamCreate(&stream);
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  float times[64];
  for (int r = -1; r < reps; r++) {  // the first run warms up
    cudaEventRecord(begin, stream);
    for (int i = 0; i < n; i++)
      if (launch(i, stream) != cudaSuccess) return -1.0f;
    cudaEventRecord(end, stream);
    if (cudaEventSynchronize(end) != cudaSuccess) return -1.0f;
    if (r >= 0) cudaEventElapsedTime(&times[r], begin, end);
  }
  std::sort(times, times + reps);
  cudaStreamDestroy(stream);
  return times[reps / 2] * 1000.0f / n;
}
