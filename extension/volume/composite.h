// Emission and absorption along the packed samples of rays, and the derivatives; keep_rule.h defines the weights. A
// ray's results are weighted sums; the samples behind its end have weight and gradient zero.
//
// Distortion (Barron et al. 2022, "Mip-NeRF 360", eq. 15) measures how widely the weights of a ray are spread:
//   sum_ij weight_i weight_j |t_i - t_j| + 1/3 sum_i weight_i^2 dt_i,
// here with sums over the samples before each (Sun et al. 2022, "Improved direct voxel grid optimization").
#pragma once

#include "rays/packing.h"
#include "volume/keep_rule.h"

namespace voxelfield {

// d loss / d density of a sample of length dt, from its transmittance and weight, the gradient at its weight, and
// `suffix_grad`, the sum of weight times gradient over all samples behind it.
template <typename T>
VOXELFIELD_HOST_DEVICE T density_gradient(T dt, T transmittance, T weight, T at_weight, T suffix_grad) {
  return dt * ((transmittance - weight) * at_weight - suffix_grad);
}

// With `Alphas` the densities are alphas, the shares of the arriving light that samples stop, and there is no `dt`.
template <typename T, bool Alphas = false>
struct PackedSamples {
  using value_t = T;
  static constexpr bool kAlphas = Alphas;

  const T* density;  // (M,)
  const T* dt;       // (M,)
  PackedRays rays;
  T min_transmittance;
  const T* rgb = nullptr;  // (M, 3); null where only weights are wanted
  const T* t = nullptr;    // (M,); likewise

  VOXELFIELD_HOST_DEVICE Absorption<T> absorption(int64_t i) const {
    return Alphas ? absorption_of_alpha(density[i]) : absorption_of_density(density[i], dt[i]);
  }

  VOXELFIELD_HOST_DEVICE bool stops(T transmittance) const { return transmittance < min_transmittance; }

  // d loss / d density_i, or alpha_i, from the gradient `at_weight` of the sample's own weight and the sum
  // `suffix_grad` of weight times gradient over all samples behind it. For an alpha that ends the ray that sum is zero,
  // and must not be divided: beside an alpha of 1 its rounding error would be all that is left.
  VOXELFIELD_HOST_DEVICE T gradient(int64_t i, T transmittance, T weight, T at_weight, T suffix_grad) const {
    if (!Alphas) return density_gradient(dt[i], transmittance, weight, at_weight, suffix_grad);
    const T open = T(1) - density[i];
    const bool ends = open == T(0) || stops(transmittance * open);
    return transmittance * at_weight - (ends ? T(0) : suffix_grad / open);
  }
};

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

// The sums of weights, and of weights times distance, of some of a ray's samples. Distances count from the ray's first
// sample, because differences of them are what matters.
template <typename T>
struct WeightMoments {
  T weight = 0;
  T moment = 0;

  // Returns the sums ahead of a sample, or of the samples of a team's threads, and moves on behind them.
  template <typename Scan>
  VOXELFIELD_HOST_DEVICE WeightMoments pass(T more_weight, T distance, const Scan& scan) {
    const T more_moment = more_weight * distance;
    const auto weights = scan(more_weight), moments = scan(more_moment);
    // Weights of a ray sum to at most 1, so that these differences are as good as before(), which costs an exchange.
    const WeightMoments before{weight + (weights.through - more_weight), moment + (moments.through - more_moment)};
    weight += weights.total();
    moment += moments.total();
    return before;
  }
};

// A sample's share of its ray's distortion; `before` is over all samples ahead of it.
template <typename T>
VOXELFIELD_HOST_DEVICE T distortion_of(const WeightMoments<T>& before, T weight, T distance, T dt) {
  return weight * (2 * (distance * before.weight - before.moment) + weight * dt / 3);
}

// d distortion / d weight of a sample; `all` is over the whole ray.
template <typename T>
VOXELFIELD_HOST_DEVICE T distortion_slope(const WeightMoments<T>& before, const WeightMoments<T>& all, T weight,
                                          T distance, T dt) {
  const T weight_behind = all.weight - before.weight - weight;
  const T moment_behind = all.moment - before.moment - weight * distance;
  return 2 * (distance * (before.weight - weight_behind) - (before.moment - moment_behind) + weight * dt / 3);
}

// The sums that a ray's samples add up to; or a loss's gradients at them.
template <typename T>
struct RayTotals {
  T rgb[3] = {0, 0, 0};
  T opacity = 0;
  T depth_sum = 0;  // of weights times distances

  VOXELFIELD_HOST_DEVICE void add(T weight, const T* sample_rgb, T t) {
    VOXELFIELD_UNROLL
    for (int channel = 0; channel < 3; ++channel) rgb[channel] += weight * sample_rgb[channel];
    opacity += weight;
    depth_sum += weight * t;
  }

  // Of gradients: the one that arrives at the weight of a sample.
  VOXELFIELD_HOST_DEVICE T at_weight(const T* sample_rgb, T t) const {
    T sum = opacity + depth_sum * t;
    VOXELFIELD_UNROLL
    for (int channel = 0; channel < 3; ++channel) sum += rgb[channel] * sample_rgb[channel];
    return sum;
  }

  // Of gradients: the sum of weight times gradient at the weight over the ray, from what the ray added up to. A walk
  // that subtracts the samples it has passed so has what lies behind each, and the ray need not be walked twice.
  VOXELFIELD_HOST_DEVICE T of_ray(const RayTotals& totals) const {
    T sum = opacity * totals.opacity + depth_sum * totals.depth_sum;
    VOXELFIELD_UNROLL
    for (int channel = 0; channel < 3; ++channel) sum += rgb[channel] * totals.rgb[channel];
    return sum;
  }
};

// The opacity-weighted mean distance; zero where there is nothing.
VOXELFIELD_HOST_DEVICE float mean_depth(const RayTotals<float>& totals) {
  return totals.depth_sum / (totals.opacity < 1e-6f ? 1e-6f : totals.opacity);
}

}  // namespace voxelfield
