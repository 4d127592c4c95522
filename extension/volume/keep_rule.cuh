// The scans with which teams of threads that share a ray follow the keep rule.
#pragma once

#include "common/sums.cuh"
#include "volume/keep_rule.h"

namespace voxelfield {

// A team of a size that is known at compile time.
template <int Size>
struct TeamScanner {
  static constexpr bool kSingle = Size == 1;
  int seat;

  template <typename T>
  __device__ __forceinline__ TeamScan<T> operator()(T value) const {
    return team_scan<Size>(value, seat);
  }
};

// A team of any power of two of threads.
struct SizedTeamScanner {
  static constexpr bool kSingle = false;
  int seat, size;

  template <typename T>
  __device__ __forceinline__ TeamScan<T> operator()(T value) const {
    return team_scan(value, seat, size);
  }
};

}  // namespace voxelfield
