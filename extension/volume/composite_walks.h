// What composite, ray_light and their backward ops do on a ray, for a thread or for a team of threads that share the
// ray: see walk_rays.h.
#pragma once

#include "volume/walk_samples.h"

namespace voxelfield {

// Transmittances or weights.
template <typename T>
struct LightWalk {
  PackedSamples<T> samples;
  bool transmittance;
  T* values;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const { values[i] = 0; }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t /*ray*/, const RaySpan& span, const Team& team) const {
    return walk_samples(samples, span, team, [&](const TeamSample<T>& sample) {
      if (sample.exists) values[sample.index] = transmittance ? sample.transmittance : sample.weight;
    });
  }
};

template <typename T>
struct LightGradientWalk {
  PackedSamples<T> samples;
  bool transmittance;
  const T* grad;
  T* grad_density;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const { grad_density[i] = 0; }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t /*ray*/, const RaySpan& span, const Team& team) const {
    const auto weighted = [&](const TeamSample<T>& sample) {
      if (!sample.reached) return T(0);
      return (transmittance ? sample.transmittance : sample.weight) * grad[sample.index];
    };
    T sum = 0;
    walk_samples(samples, span, team, [&](const TeamSample<T>& sample) { sum += weighted(sample); });
    T suffix_grad = team.sum(sum);
    return walk_samples(samples, span, team, [&](const TeamSample<T>& sample) {
      const auto passed = team(weighted(sample));
      if (sample.reached) {
        const T at_weight = transmittance ? T(0) : grad[sample.index];
        grad_density[sample.index] = samples.gradient(sample.index, sample.transmittance, sample.weight, at_weight,
                                                      suffix_grad - passed.through);
      } else if (sample.exists) {
        clear(sample.index);
      }
      suffix_grad -= passed.total;
    });
  }
};

template <bool Distortion, typename T>
struct CompositeWalk {
  PackedSamples<T> samples;
  T *rgb, *opacity, *depth_sum, *weights, *distortion;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const { weights[i] = 0; }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Team& team) const {
    const T origin = Distortion && span.begin < span.end ? samples.t[span.begin] : T(0);
    RayTotals<T> totals;
    WeightMoments<T> ahead;
    T spread = 0;
    const int64_t end = walk_samples(samples, span, team, [&](const TeamSample<T>& sample) {
      const int64_t i = sample.index;
      if (sample.exists) weights[i] = sample.weight;
      if (sample.reached) totals.add(sample.weight, samples.rgb + 3 * i, samples.t[i]);
      if constexpr (Distortion) {
        const T distance = sample.reached ? samples.t[i] - origin : T(0);
        const WeightMoments<T> before = ahead.pass(sample.weight, distance, team);
        if (sample.reached) spread += distortion_of(before, sample.weight, distance, samples.dt[i]);
      }
    });
    VOXELFIELD_UNROLL
    for (int channel = 0; channel < 3; ++channel) totals.rgb[channel] = team.sum(totals.rgb[channel]);
    totals.opacity = team.sum(totals.opacity);
    totals.depth_sum = team.sum(totals.depth_sum);
    if constexpr (Distortion) spread = team.sum(spread);
    if (team.leads) {
      for (int channel = 0; channel < 3; ++channel) rgb[3 * ray + channel] = totals.rgb[channel];
      opacity[ray] = totals.opacity;
      depth_sum[ray] = totals.depth_sum;
      if constexpr (Distortion) distortion[ray] = spread;
    }
    return end;
  }
};

// One number of each for every ray, or for `weights` for every sample; null stands for zeros.
template <typename T>
struct CompositeValues {
  const T *rgb, *opacity, *depth_sum, *weights, *distortion;

  VOXELFIELD_HOST_DEVICE RayTotals<T> totals(int64_t ray) const {
    RayTotals<T> totals;
    if (rgb != nullptr) {
      for (int channel = 0; channel < 3; ++channel) totals.rgb[channel] = rgb[3 * ray + channel];
    }
    if (opacity != nullptr) totals.opacity = opacity[ray];
    if (depth_sum != nullptr) totals.depth_sum = depth_sum[ray];
    return totals;
  }
};

template <bool Distortion, typename T>
struct CompositeGradientWalk {
  PackedSamples<T> samples;
  CompositeValues<T> gradients, results;
  T *grad_density, *grad_rgb;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    grad_density[i] = 0;
    for (int channel = 0; channel < 3; ++channel) grad_rgb[3 * i + channel] = 0;
  }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Team& team) const {
    RayTotals<T> gradient, totals;
    T at_distortion = 0, origin = 0, suffix_grad = 0;
    if (span.begin < span.end) {
      gradient = gradients.totals(ray);
      totals = results.totals(ray);
      suffix_grad = gradient.of_ray(totals);
      origin = samples.t[span.begin];
      if constexpr (Distortion) {
        at_distortion = gradients.distortion[ray];
        // Distortion is a sum of products of two weights, so that each of its terms counts twice.
        suffix_grad += 2 * at_distortion * results.distortion[ray];
      }
    }
    if (gradients.weights != nullptr) {
      T sum = 0;
      walk_samples(samples, span, team, [&](const TeamSample<T>& sample) {
        if (sample.reached) sum += sample.weight * gradients.weights[sample.index];
      });
      suffix_grad += team.sum(sum);
    }
    const WeightMoments<T> all{totals.opacity, totals.depth_sum - totals.opacity * origin};
    WeightMoments<T> ahead;
    return walk_samples(samples, span, team, [&](const TeamSample<T>& sample) {
      const int64_t i = sample.index;
      T at_weight = 0;
      if (sample.reached) {
        at_weight = gradient.at_weight(samples.rgb + 3 * i, samples.t[i]);
        if (gradients.weights != nullptr) at_weight += gradients.weights[i];
      }
      if constexpr (Distortion) {
        const T distance = sample.reached ? samples.t[i] - origin : T(0);
        const WeightMoments<T> before = ahead.pass(sample.weight, distance, team);
        if (sample.reached) {
          at_weight += at_distortion * distortion_slope(before, all, sample.weight, distance, samples.dt[i]);
        }
      }
      const auto passed = team(sample.weight * at_weight);
      if (sample.reached) {
        grad_density[i] =
            samples.gradient(i, sample.transmittance, sample.weight, at_weight, suffix_grad - passed.through);
        for (int channel = 0; channel < 3; ++channel) grad_rgb[3 * i + channel] = sample.weight * gradient.rgb[channel];
      } else if (sample.exists) {
        clear(i);
      }
      suffix_grad -= passed.total;
    });
  }
};

}  // namespace voxelfield
