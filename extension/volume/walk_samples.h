// Light along rays' samples, front to back: by one thread, or by a team of threads that takes as many samples at a
// time as it has threads, with a scan of the optical depth.
#pragma once

#include "volume/composite.h"

namespace voxelfield {

// A thread's sample of its team's ray.
template <typename T>
struct TeamSample {
  int64_t index;
  bool exists;   // false past the ray's last sample
  bool reached;  // false behind the ray's end, too: transmittance and weight are zero there
  T transmittance, weight;
};

// Calls visit(sample) on all threads of the warp, with as many samples of each team's ray as it has threads. Stops
// where all of the warp's rays have ended, and returns the first sample of the ray that was not visited.
template <typename T, typename Team, typename Visit>
VOXELFIELD_HOST_DEVICE int64_t walk_samples(const PackedSamples<T>& samples, const RaySpan& span, const Team& team,
                                            const Visit& visit) {
  T optical_depth = 0;
  for (int64_t first = span.begin;; first += Team::kSize) {
    const T reaching = first < span.end ? transmittance_at(optical_depth) : T(0);
    if (!team.any(first < span.end && !samples.stops(reaching))) return first;
    TeamSample<T> sample{first + team.seat, first + team.seat < span.end, false, T(0), T(0)};
    const Absorption<T> absorption = sample.exists ? samples.absorption(sample.index) : Absorption<T>{T(0), T(0)};
    const auto depth = team(absorption.thickness);
    const T transmittance = Team::kSingle ? reaching : transmittance_at(optical_depth + depth.before);
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
