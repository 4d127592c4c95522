// Light along rays' samples on CUDA: a group of threads walks a ray, as many samples at a time as it has threads, with
// a scan of the optical depth. Groups are as small as the rays are short, so that few threads idle.
#pragma once

#include <type_traits>

#include "common/warp.cuh"
#include "volume/composite.h"

namespace voxelfield {

constexpr int kShortRayGroup = 8;
constexpr int64_t kShortRay = 24;  // samples, on average

// Calls f with the size of the groups as a constant.
template <typename T, typename F>
void dispatch_group(const PackedSamples<T>& samples, const F& f) {
  if (samples.rays.samples <= kShortRay * samples.rays.count) {
    f(std::integral_constant<int, kShortRayGroup>{});
  } else {
    f(std::integral_constant<int, kWarp>{});
  }
}

// Calls visit(i, valid, transmittance, weight) on all threads of the warp, for as many samples of each group's ray as
// it has threads; behind min_transmittance both are zero, as they are for threads past the ray's end. Stops where all
// of the warp's rays are dark, and returns the first sample of the ray that was not visited.
template <int Group, typename T, typename Visit>
__device__ __forceinline__ int64_t walk_samples(const PackedSamples<T>& samples, const RaySpan& span, int lane,
                                                const Visit& visit) {
  T optical_depth = 0;
  int64_t first = span.begin;
  while (__any_sync(kFullWarp, first < span.end && !(transmittance_at(optical_depth) < samples.min_transmittance))) {
    const int64_t i = first + lane;
    const bool valid = i < span.end;
    const T thickness = valid ? samples.density[i] * samples.dt[i] : T(0);
    const T through = group_inclusive_sum<Group>(thickness, lane);
    // Not `through - thickness`: beside a dense sample that difference has lost the depth before it, or is NaN.
    const T above = __shfl_up_sync(kFullWarp, through, 1, Group);
    T transmittance = transmittance_at(optical_depth + (lane > 0 ? above : T(0)));
    if (!valid || transmittance < samples.min_transmittance) transmittance = 0;
    visit(i, valid, transmittance, transmittance * opacity_of(thickness));
    optical_depth += __shfl_sync(kFullWarp, through, Group - 1, Group);
    first += Group;
  }
  return first;
}

}  // namespace voxelfield
