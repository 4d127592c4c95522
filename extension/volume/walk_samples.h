// Light along rays' samples, front to back: by one thread, or by a group of threads that takes as many samples at a
// time as it has threads, with a scan of the optical depth.
#pragma once

#include "volume/composite.h"

namespace voxelfield {

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
template <typename T, typename Group, typename Visit>
VOXELFIELD_HOST_DEVICE int64_t walk_samples(const PackedSamples<T>& samples, const RaySpan& span, const Group& group,
                                            const Visit& visit) {
  T optical_depth = 0;
  for (int64_t first = span.begin;; first += Group::kSize) {
    const T reaching = first < span.end ? transmittance_at(optical_depth) : T(0);
    if (!group.any(first < span.end && !samples.stops(reaching))) return first;
    GroupSample<T> sample{first + group.seat, first + group.seat < span.end, false, T(0), T(0)};
    const Absorption<T> absorption = sample.exists ? samples.absorption(sample.index) : Absorption<T>{T(0), T(0)};
    const auto depth = group(absorption.thickness);
    const T transmittance = Group::kSingle ? reaching : transmittance_at(optical_depth + depth.before);
    sample.reached = sample.exists && !samples.stops(transmittance);
    if (sample.reached) {
      sample.transmittance = transmittance;
      sample.weight = transmittance * absorption.opacity;
    }
    visit(sample);
    optical_depth += depth.total;
  }
}

}  // namespace voxelfield
