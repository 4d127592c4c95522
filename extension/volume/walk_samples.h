// Light along one ray's samples, front to back.
#pragma once

#include "volume/composite.h"

namespace voxelfield {

// Calls visit(i, transmittance, weight) for the samples of a ray up to its end, and returns the index of the first
// sample behind it.
template <typename T, typename Visit>
int64_t walk_samples(const PackedSamples<T>& samples, const RaySpan& span, const Visit& visit) {
  T optical_depth = 0;
  for (int64_t i = span.begin; i < span.end; ++i) {
    const T transmittance = transmittance_at(optical_depth);
    if (samples.stops(transmittance)) return i;
    const Absorption<T> absorption = samples.absorption(i);
    visit(i, transmittance, transmittance * absorption.opacity);
    optical_depth += absorption.thickness;
  }
  return span.end;
}

}  // namespace voxelfield
