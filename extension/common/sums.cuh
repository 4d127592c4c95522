// Sums over the threads of a warp or of a block, and over teams and other groups of neighbouring threads of a warp.
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
__device__ __forceinline__ T warp_sum(T value) {
  return group_sum<kWarp>(value);
}

// Prefix sums over a team: neighbouring threads of a warp, a power of two of them, that hold consecutive samples of a
// ray. `through` sums the threads up to and including this one, before() those ahead of it, total() the whole team. All
// threads of the warp must call these together: a call exchanges values, so a sum that nobody asks for costs nothing.
template <typename T>
struct TeamScan {
  T through;
  int seat, size;  // the thread's place in its team, and the team's threads

  // Not `through - value`: beside a dense sample that difference loses the samples ahead of it, and it is NaN where the
  // dense sample is infinite.
  __device__ __forceinline__ T before() const {
    if (size == 1) return T(0);
    const T above = __shfl_up_sync(kFullWarp, through, 1, size);
    return seat > 0 ? above : T(0);
  }

  __device__ __forceinline__ T total() const {
    return size == 1 ? through : __shfl_sync(kFullWarp, through, size - 1, size);
  }
};

template <typename T>
__device__ __forceinline__ TeamScan<T> team_scan(T value, int seat, int size) {
  for (int step = 1; step < size; step *= 2) {
    const T below = __shfl_up_sync(kFullWarp, value, step);
    if (seat >= step) value += below;
  }
  return {value, seat, size};
}

// Returns the block's sum to all threads. Every thread of the block must call it. Two calls without a barrier between
// them need different `scratch`.
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
  value = group_inclusive_sum<kWarp>(value, lane);
  if (lane == kWarp - 1) scratch[own] = value;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < Threads / kWarp - 1; ++warp) value += warp < own ? scratch[warp] : T(0);
  __syncthreads();
  return value;
}

}  // namespace voxelfield
