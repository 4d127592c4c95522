// Sums over the threads of a warp.
#pragma once

#include "vector.cuh"

namespace voxelfield {

template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T value, int lane) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T below = __shfl_up_sync(kFullWarp, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

}  // namespace voxelfield
