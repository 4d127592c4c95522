// Light along one ray's samples, front to back.
#pragma once

#include "volume/composite.h"

namespace voxelfield {

// Calls visit(i, transmittance, weight) for the samples of a ray that at least min_transmittance of the light reaches,
// and returns the index of the first of the others.
template <typename T, typename Visit>
int64_t walk_samples(const PackedSamples<T>& samples, const RaySpan& span, const Visit& visit) {
  T optical_depth = 0;
  for (int64_t i = span.begin; i < span.end; ++i) {
    const T thickness = samples.density[i] * samples.dt[i];
    const T transmittance = transmittance_at(optical_depth);
    if (transmittance < samples.min_transmittance) return i;
    visit(i, transmittance, transmittance * opacity_of(thickness));
    optical_depth += thickness;
  }
  return span.end;
}

}  // namespace voxelfield
