// Compositing for both backends: the work of a thread, or of a team of threads, on its ray, and the host side, which
// checks, allocates, and walks the rays.
#pragma once

#include "volume/composite.h"

namespace voxelfield {

// Transmittances or weights.
template <typename Samples>
struct LightWalk {
  using T = typename Samples::value_t;

  Samples samples;
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

template <typename Samples>
struct LightGradientWalk {
  using T = typename Samples::value_t;

  Samples samples;
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
      suffix_grad -= passed.total();
    });
  }
};

// Pointers or tensors with one value per ray, or for `weights` one value per sample. Null stands for zeros.
template <typename X>
struct CompositeValues {
  X rgb, opacity, depth_sum, weights, distortion;

  // Converts tensors to pointers.
  template <typename Y>
  operator CompositeValues<Y>() const {
    return {data_of(rgb), data_of(opacity), data_of(depth_sum), data_of(weights), data_of(distortion)};
  }
};

template <typename Samples, typename Distortion>
struct CompositeWalk {
  using T = typename Samples::value_t;

  Samples samples;
  CompositeValues<T*> out;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const { out.weights[i] = 0; }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Team& team) const {
    const T origin = Distortion::value && span.begin < span.end ? samples.t[span.begin] : T(0);
    RayTotals<T> totals;
    WeightMoments<T> ahead;
    T spread = 0;
    const int64_t end = walk_samples(samples, span, team, [&](const TeamSample<T>& sample) {
      const int64_t i = sample.index;
      if (sample.exists) out.weights[i] = sample.weight;
      if (sample.reached) totals.add(sample.weight, samples.rgb + 3 * i, samples.t[i]);
      if constexpr (Distortion::value) {
        const T distance = sample.reached ? samples.t[i] - origin : T(0);
        const WeightMoments<T> before = ahead.pass(sample.weight, distance, team);
        if (sample.reached) spread += distortion_of(before, sample.weight, distance, samples.dt[i]);
      }
    });
    VOXELFIELD_UNROLL
    for (int channel = 0; channel < 3; ++channel) totals.rgb[channel] = team.sum(totals.rgb[channel]);
    totals.opacity = team.sum(totals.opacity);
    totals.depth_sum = team.sum(totals.depth_sum);
    if constexpr (Distortion::value) spread = team.sum(spread);
    if (team.leads) {
      for (int channel = 0; channel < 3; ++channel) out.rgb[3 * ray + channel] = totals.rgb[channel];
      out.opacity[ray] = totals.opacity;
      out.depth_sum[ray] = totals.depth_sum;
      if constexpr (Distortion::value) out.distortion[ray] = spread;
    }
    return end;
  }
};

template <typename T>
VOXELFIELD_HOST_DEVICE RayTotals<T> totals_of(const CompositeValues<const T*>& values, int64_t ray) {
  RayTotals<T> totals;
  if (values.rgb != nullptr) {
    for (int channel = 0; channel < 3; ++channel) totals.rgb[channel] = values.rgb[3 * ray + channel];
  }
  if (values.opacity != nullptr) totals.opacity = values.opacity[ray];
  if (values.depth_sum != nullptr) totals.depth_sum = values.depth_sum[ray];
  return totals;
}

template <typename Samples, typename Distortion>
struct CompositeGradientWalk {
  using T = typename Samples::value_t;

  Samples samples;
  CompositeValues<const T*> gradients, results;
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
      gradient = totals_of(gradients, ray);
      totals = totals_of(results, ray);
      suffix_grad = gradient.of_ray(totals);
      origin = samples.t[span.begin];
      if constexpr (Distortion::value) {
        at_distortion = gradients.distortion[ray];
        // Each term of distortion is a product of two weights, so it counts twice.
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
      if constexpr (Distortion::value) {
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
      suffix_grad -= passed.total();
    });
  }
};

template <typename Backend>
struct CompositeOps {
  static Tensor ray_light(const Tensor& density, const OptionalTensor& dt, const Tensor& ray_offsets,
                          double min_transmittance, bool transmittance) {
    const Inputs in = inputs(density, dt, ray_offsets, min_transmittance);
    const typename Backend::Guard guard(density);
    Tensor values = new_like(density, {density.size(0)});
    in.template walk<LightWalk>(transmittance, data_of(values));
    return values;
  }

  static Tensor ray_light_backward(const Tensor& grad, const Tensor& density, const OptionalTensor& dt,
                                   const Tensor& ray_offsets, double min_transmittance, bool transmittance) {
    const Inputs in = inputs(density, dt, ray_offsets, min_transmittance);
    const Tensor g = checked("grad", grad, {density.size(0)}, density.scalar_type(), density);
    const typename Backend::Guard guard(density);
    Tensor grad_density = new_like(density, {density.size(0)});
    in.template walk<LightGradientWalk>(transmittance, data_of(g), data_of(grad_density));
    return grad_density;
  }

  static TensorTuple<5> composite(const Tensor& density, const Tensor& rgb, const Tensor& t, const OptionalTensor& dt,
                                  const Tensor& ray_offsets, double min_transmittance, bool distortion) {
    const Inputs in = inputs(density, dt, ray_offsets, min_transmittance, rgb, t);
    STD_TORCH_CHECK(dt.has_value() || !distortion, "dt must be given for distortion");
    const typename Backend::Guard guard(density);
    const int64_t rays = ray_offsets.size(0) - 1;
    const CompositeValues<Tensor> out{new_like(density, {rays, 3}), new_like(density, {rays}),
                                      new_like(density, {rays}), new_like(density, {density.size(0)}),
                                      new_like(density, {distortion ? rays : 0})};
    dispatch_flag(distortion, [&](auto flag) { in.template walk<CompositeWalk, decltype(flag)>(out); });
    return {out.rgb, out.opacity, out.depth_sum, out.weights, out.distortion};
  }

  static TensorTuple<2> composite_backward(const OptionalTensor& grad_rgb, const OptionalTensor& grad_opacity,
                                           const OptionalTensor& grad_depth_sum, const OptionalTensor& grad_weights,
                                           const OptionalTensor& grad_distortion, const Tensor& density,
                                           const Tensor& rgb, const Tensor& t, const OptionalTensor& dt,
                                           const Tensor& ray_offsets, const Tensor& ray_rgb, const Tensor& opacity,
                                           const Tensor& depth_sum, const Tensor& distortion,
                                           double min_transmittance) {
    const Inputs in = inputs(density, dt, ray_offsets, min_transmittance, rgb, t);
    const bool spreads = grad_distortion.has_value();
    STD_TORCH_CHECK(dt.has_value() || !spreads, "dt must be given for distortion");
    const int64_t samples = density.size(0), rays = ray_offsets.size(0) - 1;
    const auto value = [&](const char* name, const OptionalTensor& x, ShapeList shape) {
      return checked(name, x, shape, density.scalar_type(), density);
    };
    using Values = CompositeValues<OptionalTensor>;
    const Values gradients{value("grad_rgb", grad_rgb, {rays, 3}), value("grad_opacity", grad_opacity, {rays}),
                           value("grad_depth_sum", grad_depth_sum, {rays}),
                           value("grad_weights", grad_weights, {samples}),
                           value("grad_distortion", grad_distortion, {rays})};
    const Values results{value("ray_rgb", ray_rgb, {rays, 3}), value("opacity", opacity, {rays}),
                         value("depth_sum", depth_sum, {rays}), std::nullopt,
                         spreads ? value("distortion", distortion, {rays}) : std::nullopt};
    const typename Backend::Guard guard(density);
    Tensor grad_density = new_like(density, {samples}), grad_sample_rgb = new_like(density, {samples, 3});
    dispatch_flag(spreads, [&](auto flag) {
      in.template walk<CompositeGradientWalk, decltype(flag)>(gradients, results, data_of(grad_density),
                                                              data_of(grad_sample_rgb));
    });
    return {grad_density, grad_sample_rgb};
  }

  static void implement(Library& m) {
    m.impl("ray_light", TORCH_BOX(&CompositeOps::ray_light));
    m.impl("ray_light_backward", TORCH_BOX(&CompositeOps::ray_light_backward));
    m.impl("composite", TORCH_BOX(&CompositeOps::composite));
    m.impl("composite_backward", TORCH_BOX(&CompositeOps::composite_backward));
  }

 private:
  // Keeps contiguous copies alive for as long as raw pointers to them are in use.
  struct Inputs {
    Tensor density, ray_offsets;
    OptionalTensor dt, rgb, t;
    double min_transmittance;

    // Walks all rays with a Walk that is constructed from the samples and `more`.
    template <template <typename...> class Walk, typename... Flag, typename... More>
    void walk(const More&... more) const {
      dispatch_opmath(density, [&](auto zero) {
        using T = std::decay_t<decltype(zero)>;
        dispatch_flag(!dt.has_value(), [&](auto alphas) {
          using Samples = PackedSamples<T, decltype(alphas)::value>;
          // Only distortion has a flag, and it needs dt.
          if constexpr (!(Samples::kAlphas && (Flag::value || ...))) {
            const Samples samples{data_of(density),
                                  data_of(dt),
                                  packed_rays(ray_offsets, density.size(0)),
                                  static_cast<T>(min_transmittance),
                                  data_of(rgb),
                                  data_of(t)};
            Backend::for_each_ray(samples.rays, Walk<Samples, Flag...>{samples, more...});
          }
        });
      });
    }
  };

  static Inputs inputs(const Tensor& density, const OptionalTensor& dt, const Tensor& ray_offsets,
                       double min_transmittance, const OptionalTensor& rgb = std::nullopt,
                       const OptionalTensor& t = std::nullopt) {
    const ScalarType dtype = opmath_type(density);
    check_fraction("min_transmittance", min_transmittance);
    return {
        checked("density", density, {kAny}, dtype, density),  checked_ray_offsets(ray_offsets, density),
        checked("dt", dt, {density.size(0)}, dtype, density), checked("rgb", rgb, {density.size(0), 3}, dtype, density),
        checked("t", t, {density.size(0)}, dtype, density),   min_transmittance};
  }
};

}  // namespace voxelfield
