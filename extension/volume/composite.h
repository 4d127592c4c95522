// Emission and absorption along one ray (Max 1995; Mildenhall et al. 2020, eq. 3), in terms of optical depth:
//   transmittance_i = exp(-sum_{j<i} density_j dt_j),  weight_i = transmittance_i (1 - exp(-density_i dt_i)).
// A sample that less than min_transmittance of the light reaches, and all behind it, have weight and gradient zero.
//
// Distortion (Barron et al. 2022, "Mip-NeRF 360", eq. 15) is how far apart the matter on a ray lies:
//   sum_ij weight_i weight_j |t_i - t_j| + 1/3 sum_i weight_i^2 dt_i,
// here with sums over the samples before each (Sun et al. 2022, "Improved direct voxel grid optimization").
#pragma once

#include <cmath>
#include <cstdint>

#include "rays/packed_rays.h"

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
  PackedRays rays;
  T min_transmittance;
};

// Weight, and weight times distance, of some of a ray's samples. Distances are from the ray's first sample, since
// differences of them are what matters.
template <typename T>
struct Matter {
  T weight = 0;
  T moment = 0;

  VOXELFIELD_HOST_DEVICE void add(T more_weight, T distance) {
    weight += more_weight;
    moment += more_weight * distance;
  }
};

// What a sample adds to its ray's distortion, `before` being all matter before it.
template <typename T>
VOXELFIELD_HOST_DEVICE T distortion_of(const Matter<T>& before, T weight, T distance, T dt) {
  return weight * (2 * (distance * before.weight - before.moment) + weight * dt / 3);
}

// d distortion / d weight of a sample.
template <typename T>
VOXELFIELD_HOST_DEVICE T distortion_slope(const Matter<T>& before, const Matter<T>& all, T weight, T distance, T dt) {
  const T behind = all.weight - before.weight - weight;
  const T behind_moment = all.moment - before.moment - weight * distance;
  return 2 * (distance * (before.weight - behind) - (before.moment - behind_moment) + weight * dt / 3);
}

// What is summed along a ray.
template <typename T>
struct RayResult {
  T rgb[3] = {0, 0, 0};
  T opacity = 0;
  T depth = 0;
  T distortion = 0;

  VOXELFIELD_HOST_DEVICE void add(const PackedSamples<T>& samples, int64_t i, T weight) {
    for (int channel = 0; channel < 3; ++channel) rgb[channel] += weight * samples.rgb[3 * i + channel];
    opacity += weight;
    depth += weight * samples.t[i];
  }
};

// Gradients arriving at one ray's results, and at the weights of all samples (null if none does).
template <typename T>
struct RayGradient {
  RayResult<T> at;
  const T* weights;  // (M,)

  VOXELFIELD_HOST_DEVICE T at_weight(const PackedSamples<T>& samples, int64_t i) const {
    T sum = at.opacity + at.depth * samples.t[i];
    if (weights != nullptr) sum += weights[i];
    for (int channel = 0; channel < 3; ++channel) sum += at.rgb[channel] * samples.rgb[3 * i + channel];
    return sum;
  }

  // Sum of weight_i times the gradient at it over a ray, but for `weights`: results are sums of weights, and distortion
  // is one of products of two.
  VOXELFIELD_HOST_DEVICE T of_all(const RayResult<T>& result) const {
    T sum = at.opacity * result.opacity + at.depth * result.depth + 2 * at.distortion * result.distortion;
    for (int channel = 0; channel < 3; ++channel) sum += at.rgb[channel] * result.rgb[channel];
    return sum;
  }
};

// d loss / d density_i, from the light that passes sample i and the weighted gradients of everything behind it.
template <typename T>
VOXELFIELD_HOST_DEVICE T density_gradient(T dt, T transmittance, T weight, T at_weight, T behind) {
  return dt * ((transmittance - weight) * at_weight - behind);
}

}  // namespace voxelfield
