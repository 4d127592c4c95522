// Emission and absorption along one ray (Max 1995; Mildenhall et al. 2020, eq. 3), in terms of optical depth:
//   transmittance_i = exp(-sum_{j<i} density_j dt_j),  weight_i = transmittance_i (1 - exp(-density_i dt_i)).
// A sample that less than min_transmittance of the light reaches, and all behind it, have weight and gradient zero.
#pragma once

#include <cmath>
#include <cstdint>

#include "trilinear.h"

namespace voxelfield {

template <typename T>
VOXELFIELD_HOST_DEVICE T transmittance_at(T optical_depth) {
  return std::exp(-optical_depth);
}

template <typename T>
VOXELFIELD_HOST_DEVICE T opacity_of(T optical_thickness) {
  return -std::expm1(-optical_thickness);
}

template <typename T>
struct PackedSamples {
  const T* density;  // (M,)
  const T* rgb;      // (M, 3); null where only weights are wanted
  const T* t;        // (M,)
  const T* dt;       // (M,)
  const int64_t* ray_offsets;
  int64_t rays;
  T min_transmittance;
};

// What is summed along a ray.
template <typename T>
struct RayColor {
  T rgb[3] = {0, 0, 0};
  T opacity = 0;
  T depth = 0;

  VOXELFIELD_HOST_DEVICE void add(const PackedSamples<T>& samples, int64_t i, T weight) {
    for (int channel = 0; channel < 3; ++channel) rgb[channel] += weight * samples.rgb[3 * i + channel];
    opacity += weight;
    depth += weight * samples.t[i];
  }
};

// Gradients arriving at one ray's results, and at the weights of all samples.
template <typename T>
struct RayGradient {
  T rgb[3];
  T opacity;
  T depth;
  const T* weights;  // (M,)

  VOXELFIELD_HOST_DEVICE T at_weight(const PackedSamples<T>& samples, int64_t i) const {
    T sum = opacity + depth * samples.t[i] + weights[i];
    for (int channel = 0; channel < 3; ++channel) sum += rgb[channel] * samples.rgb[3 * i + channel];
    return sum;
  }
};

// d loss / d density_i, from the light that passes sample i and the weighted gradients of everything behind it.
template <typename T>
VOXELFIELD_HOST_DEVICE T density_gradient(T dt, T transmittance, T weight, T at_weight, T behind) {
  return dt * ((transmittance - weight) * at_weight - behind);
}

}  // namespace voxelfield
