// Emission and absorption along the packed samples of rays, and the derivatives. keep_rule.h defines the weights. The
// results of a ray are weighted sums. Samples after the end of the ray have weight and gradient zero.
//
// Distortion (Barron et al. 2022, "Mip-NeRF 360", eq. 15) measures how widely the weights of a ray are spread:
//   sum_ij weight_i weight_j |t_i - t_j| + 1/3 sum_i weight_i^2 dt_i,
// computed here with sums over the samples before each one (Sun et al. 2022, "Improved direct voxel grid
// optimization").
#pragma once

#include "rays/packed_rays.h"
#include "volume/keep_rule.h"

namespace voxelfield {

// d loss / d density of a sample of length dt, from its transmittance and weight, the gradient with respect to its
// weight, and `suffix_grad`, the sum of weight times gradient over all later samples of the ray.
template <typename T>
VOXELFIELD_HOST_DEVICE T density_gradient(T dt, T transmittance, T weight, T at_weight, T suffix_grad) {
  return dt * ((transmittance - weight) * at_weight - suffix_grad);
}

// With `Alphas`, the densities are alphas, that is, the fractions of the arriving light that the samples absorb, and
// `dt` is not used.
template <typename T, bool Alphas = false>
struct CompositeRows {
  using value_t = T;
  static constexpr bool kAlphas = Alphas;

  const T* density;  // (M,)
  const T* dt;       // (M,)
  PackedRays rays;
  T min_transmittance;
  const T* rgb = nullptr;  // (M, C); null if only weights are needed
  const T* t = nullptr;    // (M,); null if only weights are needed

  VOXELFIELD_HOST_DEVICE Absorption<T> absorption(int64_t i) const {
    return Alphas ? absorption_of_alpha(density[i]) : absorption_of_density(density[i], dt[i]);
  }

  VOXELFIELD_HOST_DEVICE bool stops(T transmittance) const { return transmittance < min_transmittance; }

  // d loss / d density_i, or d loss / d alpha_i, from the gradient `at_weight` with respect to the weight of the sample
  // and the sum `suffix_grad` of weight times gradient over all later samples of the ray. After an alpha that ends the
  // ray, that sum is zero, and it must not be divided: for an alpha of 1, the division would only amplify its rounding
  // error.
  VOXELFIELD_HOST_DEVICE T gradient(int64_t i, T transmittance, T weight, T at_weight, T suffix_grad) const {
    if (!Alphas) return density_gradient(dt[i], transmittance, weight, at_weight, suffix_grad);
    const T open = T(1) - density[i];
    const bool ends = open == T(0) || stops(transmittance * open);
    return transmittance * at_weight - (ends ? T(0) : suffix_grad / open);
  }

  // Stores that gradient, and that of the length of the sample unless `grad_dt` is null.
  VOXELFIELD_HOST_DEVICE void store_gradient(int64_t i, T transmittance, T weight, T at_weight, T suffix_grad,
                                             T* grad_density, T* grad_dt) const {
    grad_density[i] = gradient(i, transmittance, weight, at_weight, suffix_grad);
    // Density and length only occur as their product.
    if (grad_dt != nullptr) grad_dt[i] = density_gradient(density[i], transmittance, weight, at_weight, suffix_grad);
  }
};

// The sample that one thread of a team processes.
template <typename T>
struct TeamSample {
  int64_t index;
  bool exists;   // false past the ray's last sample
  bool reached;  // also false after the end of the ray, where transmittance and weight are zero
  T transmittance, weight;
};

// Calls visit(sample) on all threads of the warp. Each call processes one sample per thread of the team of a ray. Stops
// when all rays of the warp have ended, and returns the first sample of the ray that was not visited.
template <typename Samples, typename Team, typename Visit>
VOXELFIELD_HOST_DEVICE int64_t walk_samples(const Samples& samples, const RaySpan& span, const Team& team,
                                            const Visit& visit) {
  using T = typename Samples::value_t;
  T optical_depth = 0;
  for (int64_t first = span.begin;; first += Team::kSize) {
    const T reaching = first < span.end ? transmittance_at(optical_depth) : T(0);
    if (!team.any(first < span.end && !samples.stops(reaching))) return first;
    TeamSample<T> sample{first + team.seat, first + team.seat < span.end, false, T(0), T(0)};
    const Absorption<T> absorption = sample.exists ? samples.absorption(sample.index) : Absorption<T>{T(0), T(0)};
    const auto depth = team(absorption.thickness);
    const T transmittance = Team::kSize == 1 ? reaching : transmittance_at(optical_depth + depth.before());
    sample.reached = sample.exists && !samples.stops(transmittance);
    if (sample.reached) {
      sample.transmittance = transmittance;
      sample.weight = transmittance * absorption.opacity;
    }
    visit(sample);
    optical_depth += depth.total();
  }
}

// Sums of weights, and of weights times distance, over some samples of a ray. Distances are relative to the first
// sample of the ray, because only their differences matter.
template <typename T>
struct WeightMoments {
  T weight = 0;
  T moment = 0;

  // Returns the sums over all samples before this one, and adds this sample or the samples of all threads of the team.
  template <typename Scan>
  VOXELFIELD_HOST_DEVICE WeightMoments pass(T more_weight, T distance, const Scan& scan) {
    const T more_moment = more_weight * distance;
    const auto weights = scan(more_weight), moments = scan(more_moment);
    // The weights of a ray sum to at most 1, so these differences are as accurate as before(), which needs an exchange.
    const WeightMoments before{weight + (weights.through - more_weight), moment + (moments.through - more_moment)};
    weight += weights.total();
    moment += moments.total();
    return before;
  }
};

// The contribution of a sample to the distortion of its ray. `before` holds the sums over all samples before it.
template <typename T>
VOXELFIELD_HOST_DEVICE T distortion_of(const WeightMoments<T>& before, T weight, T distance, T dt) {
  return weight * (2 * (distance * before.weight - before.moment) + weight * dt / 3);
}

// d distortion / d weight of a sample. `all` holds the sums over the whole ray.
template <typename T>
VOXELFIELD_HOST_DEVICE T distortion_slope(const WeightMoments<T>& before, const WeightMoments<T>& all, T weight,
                                          T distance, T dt) {
  const T weight_behind = all.weight - before.weight - weight;
  const T moment_behind = all.moment - before.moment - weight * distance;
  return 2 * (distance * (before.weight - weight_behind) - (before.moment - moment_behind) + weight * dt / 3);
}

// d distortion / d distance of a sample.
template <typename T>
VOXELFIELD_HOST_DEVICE T distortion_slope_in_distance(const WeightMoments<T>& before, const WeightMoments<T>& all,
                                                      T weight) {
  const T weight_behind = all.weight - before.weight - weight;
  return 2 * weight * (before.weight - weight_behind);
}

// d distortion / d dt of a sample.
template <typename T>
VOXELFIELD_HOST_DEVICE T distortion_slope_in_length(T weight) {
  return weight * weight / 3;
}

// The sums over the samples of a ray, or the gradients of a loss with respect to them.
template <typename T>
struct RayTotals {
  T rgb[3] = {0, 0, 0};
  T opacity = 0;
  T depth_sum = 0;  // sum of weights times distances

  VOXELFIELD_HOST_DEVICE void add(T weight, const T* sample_rgb, T t) {
    VOXELFIELD_UNROLL
    for (int channel = 0; channel < 3; ++channel) rgb[channel] += weight * sample_rgb[channel];
    add_light(weight, t);
  }

  VOXELFIELD_HOST_DEVICE void add_light(T weight, T t) {
    opacity += weight;
    depth_sum += weight * t;
  }

  // For gradients: returns the gradient with respect to the weight of a sample.
  VOXELFIELD_HOST_DEVICE T at_weight(const T* sample_rgb, T t) const {
    T sum = at_light(t);
    VOXELFIELD_UNROLL
    for (int channel = 0; channel < 3; ++channel) sum += rgb[channel] * sample_rgb[channel];
    return sum;
  }

  // The same without colours.
  VOXELFIELD_HOST_DEVICE T at_light(T t) const { return opacity + depth_sum * t; }

  // For gradients: returns the sum of weight times gradient with respect to the weight over the ray, computed from the
  // totals of the ray. By subtracting the samples that it has passed, a walk obtains the sum over the later samples
  // without walking the ray twice.
  VOXELFIELD_HOST_DEVICE T of_ray(const RayTotals& totals) const {
    T sum = opacity * totals.opacity + depth_sum * totals.depth_sum;
    VOXELFIELD_UNROLL
    for (int channel = 0; channel < 3; ++channel) sum += rgb[channel] * totals.rgb[channel];
    return sum;
  }
};

}  // namespace voxelfield
