// Sums over the threads of a warp, or over groups of neighbouring threads of it.
#pragma once

#include "common/vector.cuh"

namespace voxelfield {

// Returns the sum of the values up to and including the thread's own, whose place in its group of `Width` is `lane`.
// All threads of the warp must take part.
template <int Width, typename T>
__device__ __forceinline__ T group_inclusive_sum(T value, int lane) {
#pragma unroll
  for (int step = 1; step < Width; step *= 2) {
    const T below = __shfl_up_sync(kFullWarp, value, step, Width);
    if (lane >= step) value += below;
  }
  return value;
}

template <int Width, typename T>
__device__ __forceinline__ T group_sum(T value) {
#pragma unroll
  for (int step = Width / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step, Width);
  return value;
}

template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T value, int lane) {
  return group_inclusive_sum<kWarp>(value, lane);
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
  return group_sum<kWarp>(value);
}

}  // namespace voxelfield
