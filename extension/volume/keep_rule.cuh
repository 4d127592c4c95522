// Teams of threads that share a ray. All threads of the warp must make a team's calls together.
#pragma once

#include "common/sums.cuh"
#include "volume/keep_rule.h"

namespace voxelfield {

// Prefix sums over a team: neighbouring threads of a warp, a power of two of them, that hold consecutive samples of a
// ray. `through` sums the threads up to and including this one, before() those ahead of it, total() the whole team. All
// threads of the warp must call these together, and a kernel calls those that it needs: each call exchanges values.
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
  return {group_inclusive_sum(value, seat, size), seat, size};
}

// A team of a size that is known at compile time.
template <int Size>
struct ThreadTeam {
  static constexpr int kSize = Size;
  int seat;            // the thread's place in the team
  bool leads = false;  // true for one thread of a team whose ray exists

  template <typename T>
  __device__ __forceinline__ TeamScan<T> operator()(T value) const {
    return team_scan(value, seat, Size);
  }

  template <typename T>
  __device__ __forceinline__ T sum(T value) const {
    return group_sum<Size>(value);
  }

  // Over the whole warp, so that its threads stay together.
  __device__ __forceinline__ bool any(bool value) const { return __any_sync(kFullWarp, value); }
};

// A team of any power of two of threads.
struct SizedTeam {
  static constexpr int kSize = 0;  // known when the kernel runs
  int seat, size;

  template <typename T>
  __device__ __forceinline__ TeamScan<T> operator()(T value) const {
    return team_scan(value, seat, size);
  }
};

}  // namespace voxelfield
