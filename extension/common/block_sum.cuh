// Sums over the threads of a block.
#pragma once

#include "common/warp.cuh"

namespace voxelfield {

// Returns the sum to all threads. Every thread of the block must call it. Two calls without a barrier between them need
// different `scratch`.
template <int Threads, typename T>
__device__ __forceinline__ T block_sum(T value, T (&scratch)[Threads / kWarp]) {
  value = warp_sum(value);
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
  value = warp_inclusive_sum(value, lane);
  if (lane == kWarp - 1) scratch[own] = value;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < Threads / kWarp - 1; ++warp) value += warp < own ? scratch[warp] : T(0);
  __syncthreads();
  return value;
}

}  // namespace voxelfield
