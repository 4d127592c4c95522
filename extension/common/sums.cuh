// Sums over the threads of a block, and over groups of neighbouring threads of a warp.
#pragma once

#include "common/vector.cuh"

namespace voxelfield {

// Returns the sum over a group of `Width` threads. All threads of the warp must take part.
template <int Width, typename T>
__device__ __forceinline__ T group_sum(T value) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step, Width);
  return value;
}

// The same for a group of `size` threads, a power of two.
template <typename T>
__device__ __forceinline__ T group_sum(T value, int size) {
  for (int step = size / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

// Returns the inclusive prefix sum within a group of `size` threads, a power of two. `place` is the position of the
// thread in its group. All threads of the warp must take part.
template <typename T>
__device__ __forceinline__ T group_inclusive_sum(T value, int place, int size) {
  for (int step = 1; step < size; step *= 2) {
    const T below = __shfl_up_sync(kFullWarp, value, step);
    if (place >= step) value += below;
  }
  return value;
}

// Returns the sum over the block to all threads. All threads of the block must take part. Two calls without a barrier
// between them need different `scratch`.
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

// Returns the inclusive prefix sum within the block. All threads of the block must take part. Unlike with block_sum,
// `scratch` may be reused immediately after the call.
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
