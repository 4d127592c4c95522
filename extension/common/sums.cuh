// Sums over the threads of a block, and over groups of neighbouring threads of a warp.
#pragma once

#include "common/vector.cuh"

namespace voxelfield {

// All threads of the warp must take part.
template <int Width, typename T>
__device__ __forceinline__ T group_sum(T value) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step, Width);
  return value;
}

// Returns the sum of the values up to and including the thread's own, whose place in its group of `size` threads, a
// power of two, is `place`. All threads of the warp must take part.
template <typename T>
__device__ __forceinline__ T group_inclusive_sum(T value, int place, int size) {
  for (int step = 1; step < size; step *= 2) {
    const T below = __shfl_up_sync(kFullWarp, value, step);
    if (place >= step) value += below;
  }
  return value;
}

// Returns the block's sum to all threads. Every thread of the block must call it. Two calls without a barrier between
// them need different `scratch`.
template <int Threads, typename T>
__device__ __forceinline__ T block_sum(T value, T (&scratch)[Threads / kWarp]) {
  value = group_sum<kWarp>(value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  T total = 0;
#pragma unroll
  for (int warp = 0; warp < Threads / kWarp; ++warp) total += scratch[warp];
  return total;
}

// Returns the sum of the values up to and including the thread's own. As above, but scratch may be reused after the
// call.
template <int Threads, typename T>
__device__ __forceinline__ T block_inclusive_sum(T value, T (&scratch)[Threads / kWarp]) {
  const int lane = threadIdx.x % kWarp, own = threadIdx.x / kWarp;
  value = group_inclusive_sum(value, lane, kWarp);
  if (lane == kWarp - 1) scratch[own] = value;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < Threads / kWarp - 1; ++warp) value += warp < own ? scratch[warp] : T(0);
  __syncthreads();
  return value;
}

}  // namespace voxelfield
