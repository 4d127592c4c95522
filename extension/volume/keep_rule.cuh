// Teams of threads that share a ray. All threads of the warp must make a team's calls together.
#pragma once

#include "common/sums.cuh"
#include "volume/keep_rule.h"

namespace voxelfield {

// Prefix sums over a team, which is a power of two of neighbouring threads of a warp that hold consecutive samples of a
// ray. `through` is the sum up to and including this thread, before() the sum over the threads before it, and total()
// the sum over the whole team. All threads of the warp must call these functions together. Each call exchanges values,
// so kernels should call only those that they need.
template <typename T>
struct TeamScan {
  T through;
  int seat, size;  // the position of the thread in its team, and the size of the team

  // Not computed as `through - value`: if this thread's sample is dense, the difference would lose the samples before
  // it, and it would be NaN for an infinitely dense sample.
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
  return {group_inclusive_sum(value, seat, size), seat, size};
}

// A team of a size that is known at compile time.
template <int Size>
struct ThreadTeam {
  static constexpr int kSize = Size;
  int seat;            // the position of the thread in the team
  bool leads = false;  // true for one thread of each team whose ray exists

  template <typename T>
  __device__ __forceinline__ TeamScan<T> operator()(T value) const {
    return team_scan(value, seat, Size);
  }

  template <typename T>
  __device__ __forceinline__ T sum(T value) const {
    return group_sum<Size>(value);
  }

  template <typename T>
  __device__ __forceinline__ T moved_up(T value, int step) const {
    return __shfl_up_sync(kFullWarp, value, step, Size);
  }

  template <typename T>
  __device__ __forceinline__ T last(T value) const {
    return __shfl_sync(kFullWarp, value, Size - 1, Size);
  }

  // The result covers the whole warp, so that its threads stay together.
  __device__ __forceinline__ bool any(bool value) const { return __any_sync(kFullWarp, value); }
};

// A team whose size, a power of two, is known only at run time.
struct SizedTeam {
  static constexpr int kSize = 0;  // known only at run time
  int seat, size;

  template <typename T>
  __device__ __forceinline__ TeamScan<T> operator()(T value) const {
    return team_scan(value, seat, size);
  }
};

}  // namespace voxelfield
