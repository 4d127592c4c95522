// Prefix sums over a team: neighbouring threads of a warp, a power of two of them, that hold consecutive samples of a
// ray.
#pragma once

#include "common/warp.cuh"

namespace voxelfield {

// `through` sums the threads up to and including this one, `before` those ahead of it, `total` the whole team.
template <typename T>
struct TeamScan {
  T through, before, total;
};

// `before` is not `through - value`: beside a dense sample that difference loses the samples ahead of it, and it is NaN
// where the dense sample is infinite.
template <typename T>
__device__ __forceinline__ TeamScan<T> finish_team_scan(T through, int seat, int size) {
  const T above = __shfl_up_sync(kFullWarp, through, 1, size);
  return {through, seat > 0 ? above : T(0), __shfl_sync(kFullWarp, through, size - 1, size)};
}

// `seat` is the thread's place in its team. All threads of the warp must call this together.
template <int Size, typename T>
__device__ __forceinline__ TeamScan<T> team_scan(T value, int seat) {
  if constexpr (Size == 1) {
    return {value, T(0), value};
  } else {
    return finish_team_scan(group_inclusive_sum<Size>(value, seat), seat, Size);
  }
}

// The same for a team whose size is known only when the kernel runs.
template <typename T>
__device__ __forceinline__ TeamScan<T> team_scan(T value, int seat, int size) {
  T through = value;
  for (int step = 1; step < size; step *= 2) {
    const T below = __shfl_up_sync(kFullWarp, through, step);
    if (seat >= step) through += below;
  }
  return finish_team_scan(through, seat, size);
}

}  // namespace voxelfield
