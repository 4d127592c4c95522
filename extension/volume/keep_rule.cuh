// Teams of threads that share a ray. All threads of the warp must make a team's calls together.
#pragma once

#include "common/sums.cuh"
#include "volume/keep_rule.h"

namespace voxelfield {

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
