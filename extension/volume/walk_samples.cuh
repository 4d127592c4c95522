// Light along rays' samples on CUDA: a group of threads walks a ray, as many samples at a time as it has threads, with
// a scan of the optical depth. Groups are as small as the rays are short, so that few threads idle.
#pragma once

#include <type_traits>

#include "common/sums.cuh"
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

// A thread's sample of its group's ray.
template <typename T>
struct GroupSample {
  int64_t index;
  bool exists;   // false past the ray's last sample
  bool reached;  // false behind the ray's end, too: transmittance and weight are zero there
  T transmittance, weight;
};

// Calls visit(sample) on all threads of the warp, with as many samples of each group's ray as it has threads. Stops
// where all of the warp's rays have ended, and returns the first sample of the ray that was not visited.
template <int Group, typename T, typename Visit>
__device__ __forceinline__ int64_t walk_samples(const PackedSamples<T>& samples, const RaySpan& span, int lane,
                                                const Visit& visit) {
  T optical_depth = 0;
  int64_t first = span.begin;
  while (__any_sync(kFullWarp, first < span.end && !samples.stops(transmittance_at(optical_depth)))) {
    GroupSample<T> sample{first + lane, first + lane < span.end, false, T(0), T(0)};
    const Absorption<T> absorption = sample.exists ? samples.absorption(sample.index) : Absorption<T>{T(0), T(0)};
    const TeamScan<T> depth = team_scan<Group>(absorption.thickness, lane);
    const T transmittance = transmittance_at(optical_depth + depth.before);
    sample.reached = sample.exists && !samples.stops(transmittance);
    if (sample.reached) {
      sample.transmittance = transmittance;
      sample.weight = transmittance * absorption.opacity;
    }
    visit(sample);
    optical_depth += depth.total;
    first += Group;
  }
  return first;
}

}  // namespace voxelfield
