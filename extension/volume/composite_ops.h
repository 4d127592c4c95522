// Compositing for both backends: the work of a thread, or of a team of threads, on its ray, and the host side.
#pragma once

#include "volume/composite.h"

namespace voxelfield {

template <typename Samples>
struct LightWalk {
  using Job = LightWalk;
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
  using Job = LightGradientWalk;
  using T = typename Samples::value_t;

  Samples samples;
  bool transmittance;
  const T* grad;
  T* gradient;  // (M,) of densities, followed by (M,) of their lengths if wanted
  bool of_lengths;

  VOXELFIELD_HOST_DEVICE T* grad_dt() const { return of_lengths ? gradient + samples.rays.samples : nullptr; }

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    gradient[i] = 0;
    if (of_lengths) grad_dt()[i] = 0;
  }

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
        samples.store_gradient(sample.index, sample.transmittance, sample.weight, at_weight,
                               suffix_grad - passed.through, gradient, grad_dt());
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

  template <typename Y>
  operator CompositeValues<Y>() const {
    return {data_of(rgb), data_of(opacity), data_of(depth_sum), data_of(weights), data_of(distortion)};
  }
};

template <typename Samples>
struct CompositeJob {
  using Job = CompositeJob;
  using T = typename Samples::value_t;

  Samples samples;
  int64_t channels;
  CompositeValues<T*> out;  // distortion is null unless it is wanted

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const { out.weights[i] = 0; }
};

// Colours have three channels, or with AnyChannels any number, which are summed after the weights are known.
template <typename Samples, typename Distortion, typename AnyChannels>
struct CompositeWalk : CompositeJob<Samples> {
  using T = typename Samples::value_t;

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Team& team) const {
    const Samples& samples = this->samples;
    const CompositeValues<T*>& out = this->out;
    const T origin = Distortion::value && span.begin < span.end ? samples.t[span.begin] : T(0);
    RayTotals<T> totals;
    WeightMoments<T> ahead;
    T spread = 0;
    int reached = 0;
    const int64_t end = walk_samples(samples, span, team, [&](const TeamSample<T>& sample) {
      const int64_t i = sample.index;
      if (sample.exists) out.weights[i] = sample.weight;
      if (sample.reached) {
        if constexpr (AnyChannels::value) {
          totals.add_light(sample.weight, samples.t[i]);
          ++reached;
        } else {
          totals.add(sample.weight, samples.rgb + 3 * i, samples.t[i]);
        }
      }
      if constexpr (Distortion::value) {
        const T distance = sample.reached ? samples.t[i] - origin : T(0);
        const WeightMoments<T> before = ahead.pass(sample.weight, distance, team);
        if (sample.reached) spread += distortion_of(before, sample.weight, distance, samples.dt[i]);
      }
    });
    if constexpr (AnyChannels::value) {
      add_colors(ray, span.begin, span.begin + team.sum(static_cast<int64_t>(reached)), team);
    } else {
      VOXELFIELD_UNROLL
      for (int channel = 0; channel < 3; ++channel) totals.rgb[channel] = team.sum(totals.rgb[channel]);
    }
    totals.opacity = team.sum(totals.opacity);
    totals.depth_sum = team.sum(totals.depth_sum);
    if constexpr (Distortion::value) spread = team.sum(spread);
    if (team.leads) {
      for (int channel = 0; channel < 3 && !AnyChannels::value; ++channel) {
        out.rgb[3 * ray + channel] = totals.rgb[channel];
      }
      out.opacity[ray] = totals.opacity;
      out.depth_sum[ray] = totals.depth_sum;
      if constexpr (Distortion::value) out.distortion[ray] = spread;
    }
    return end;
  }

 private:
  // Each thread reads weights that it wrote itself.
  template <typename Team>
  VOXELFIELD_HOST_DEVICE void add_colors(int64_t ray, int64_t begin, int64_t end, const Team& team) const {
    constexpr int kColumns = 8;  // channels per pass
    const int64_t channels = this->channels;
    for (int64_t c = 0; c < channels; c += kColumns) {
      T sum[kColumns] = {};
      for (int64_t i = begin + team.seat; i < end; i += Team::kSize) {
        const T weight = this->out.weights[i];
        VOXELFIELD_UNROLL
        for (int k = 0; k < kColumns; ++k) {
          if (c + k < channels) sum[k] += weight * this->samples.rgb[i * channels + c + k];
        }
      }
      VOXELFIELD_UNROLL
      for (int k = 0; k < kColumns; ++k) {
        const T total = team.sum(sum[k]);
        if (team.leads && c + k < channels) this->out.rgb[ray * channels + c + k] = total;
      }
    }
  }
};

// Leaves out the colours unless they have three channels.
template <bool AnyChannels, typename T>
VOXELFIELD_HOST_DEVICE RayTotals<T> totals_of(const CompositeValues<const T*>& values, int64_t ray) {
  RayTotals<T> totals;
  if (!AnyChannels && values.rgb != nullptr) {
    for (int channel = 0; channel < 3; ++channel) totals.rgb[channel] = values.rgb[3 * ray + channel];
  }
  if (values.opacity != nullptr) totals.opacity = values.opacity[ray];
  if (values.depth_sum != nullptr) totals.depth_sum = values.depth_sum[ray];
  return totals;
}

template <typename Samples>
struct CompositeGradientJob {
  using Job = CompositeGradientJob;
  using T = typename Samples::value_t;

  Samples samples;
  int64_t channels;
  CompositeValues<const T*> gradients, results;
  T* gradient;  // (M,) of densities, followed by those of t, and of dt if there is one, if they are wanted
  T* grad_rgb;
  bool of_distances;

  VOXELFIELD_HOST_DEVICE T* grad_t() const { return of_distances ? gradient + samples.rays.samples : nullptr; }
  VOXELFIELD_HOST_DEVICE T* grad_dt() const {
    return of_distances && !Samples::kAlphas ? gradient + 2 * samples.rays.samples : nullptr;
  }

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    gradient[i] = 0;
    if (of_distances) {
      grad_t()[i] = 0;
      if (!Samples::kAlphas) grad_dt()[i] = 0;
    }
    for (int64_t channel = 0; channel < channels; ++channel) grad_rgb[channels * i + channel] = 0;
  }
};

// The common case is colours of three channels and no gradient of distances. `General` covers all cases.
template <typename Samples, typename Distortion, typename General>
struct CompositeGradientWalk : CompositeGradientJob<Samples> {
  using T = typename Samples::value_t;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    if constexpr (General::value) {
      CompositeGradientJob<Samples>::clear(i);
    } else {
      this->gradient[i] = 0;
      for (int channel = 0; channel < 3; ++channel) this->grad_rgb[3 * i + channel] = 0;
    }
  }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Team& team) const {
    const Samples& samples = this->samples;
    const CompositeValues<const T*>&gradients = this->gradients, &results = this->results;
    const int64_t channels = General::value ? this->channels : 3;
    const T* ray_grad = General::value && gradients.rgb != nullptr ? gradients.rgb + ray * channels : nullptr;
    RayTotals<T> gradient, totals;
    T at_distortion = 0, origin = 0, suffix_grad = 0;
    if (span.begin < span.end) {
      gradient = totals_of<General::value>(gradients, ray);
      totals = totals_of<General::value>(results, ray);
      suffix_grad = gradient.of_ray(totals);
      if constexpr (General::value) {
        for (int64_t c = 0; c < channels && ray_grad != nullptr; ++c) {
          suffix_grad += ray_grad[c] * results.rgb[ray * channels + c];
        }
      }
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
      [[maybe_unused]] T at_distance = 0, at_length = 0;
      if (sample.reached) {
        if constexpr (General::value) {
          at_weight = gradient.at_light(samples.t[i]);
          for (int64_t c = 0; c < channels && ray_grad != nullptr; ++c) {
            at_weight += ray_grad[c] * samples.rgb[i * channels + c];
          }
          at_distance = sample.weight * gradient.depth_sum;
        } else {
          at_weight = gradient.at_weight(samples.rgb + 3 * i, samples.t[i]);
        }
        if (gradients.weights != nullptr) at_weight += gradients.weights[i];
      }
      if constexpr (Distortion::value) {
        const T distance = sample.reached ? samples.t[i] - origin : T(0);
        const WeightMoments<T> before = ahead.pass(sample.weight, distance, team);
        if (sample.reached) {
          at_weight += at_distortion * distortion_slope(before, all, sample.weight, distance, samples.dt[i]);
          if constexpr (General::value) {
            at_distance += at_distortion * distortion_slope_in_distance(before, all, sample.weight);
            at_length = at_distortion * distortion_slope_in_length(sample.weight);
          }
        }
      }
      const auto passed = team(sample.weight * at_weight);
      if (sample.reached) {
        const T suffix = suffix_grad - passed.through;
        if constexpr (General::value) {
          samples.store_gradient(i, sample.transmittance, sample.weight, at_weight, suffix, this->gradient,
                                 this->grad_dt());
          if (this->of_distances) {
            this->grad_t()[i] = at_distance;
            if (!Samples::kAlphas) this->grad_dt()[i] += at_length;
          }
          for (int64_t c = 0; c < channels; ++c) {
            this->grad_rgb[i * channels + c] = ray_grad == nullptr ? T(0) : sample.weight * ray_grad[c];
          }
        } else {
          this->gradient[i] = samples.gradient(i, sample.transmittance, sample.weight, at_weight, suffix);
          for (int channel = 0; channel < 3; ++channel) {
            this->grad_rgb[3 * i + channel] = sample.weight * gradient.rgb[channel];
          }
        }
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
                                   const Tensor& ray_offsets, double min_transmittance, bool transmittance,
                                   bool of_lengths) {
    STD_TORCH_CHECK(dt.has_value() || !of_lengths, "dt must be given for its gradient");
    const Inputs in = inputs(density, dt, ray_offsets, min_transmittance);
    const Tensor g = checked("grad", grad, {density.size(0)}, density.scalar_type(), density);
    const typename Backend::Guard guard(density);
    const int64_t samples = density.size(0);
    Tensor gradient = of_lengths ? new_like(density, {2, samples}) : new_like(density, {samples});
    in.template walk<LightGradientWalk>(transmittance, data_of(g), data_of(gradient), of_lengths);
    return gradient;
  }

  static TensorTuple<5> composite(const Tensor& density, const Tensor& rgb, const Tensor& t, const OptionalTensor& dt,
                                  const Tensor& ray_offsets, double min_transmittance, bool distortion) {
    const Inputs in = inputs(density, dt, ray_offsets, min_transmittance, rgb, t);
    STD_TORCH_CHECK(dt.has_value() || !distortion, "dt must be given for distortion");
    const typename Backend::Guard guard(density);
    const int64_t rays = ray_offsets.size(0) - 1, channels = rgb.size(1);
    STD_TORCH_CHECK(channels > 0, "rgb must have at least one channel, got none");
    const CompositeValues<Tensor> out{new_like(density, {rays, channels}), new_like(density, {rays}),
                                      new_like(density, {rays}), new_like(density, {density.size(0)}),
                                      new_like(density, {distortion ? rays : 0})};
    dispatch_flag(distortion, [&](auto spreads) {
      dispatch_flag(channels != 3, [&](auto any_channels) {
        in.template walk<CompositeWalk, decltype(spreads), decltype(any_channels)>(channels, out);
      });
    });
    return {out.rgb, out.opacity, out.depth_sum, out.weights, out.distortion};
  }

  static TensorTuple<2> composite_backward(const OptionalTensor& grad_rgb, const OptionalTensor& grad_opacity,
                                           const OptionalTensor& grad_depth_sum, const OptionalTensor& grad_weights,
                                           const OptionalTensor& grad_distortion, const Tensor& density,
                                           const Tensor& rgb, const Tensor& t, const OptionalTensor& dt,
                                           const Tensor& ray_offsets, const Tensor& ray_rgb, const Tensor& opacity,
                                           const Tensor& depth_sum, const Tensor& distortion, double min_transmittance,
                                           bool of_distances) {
    const Inputs in = inputs(density, dt, ray_offsets, min_transmittance, rgb, t);
    const bool spreads = grad_distortion.has_value();
    STD_TORCH_CHECK(dt.has_value() || !spreads, "dt must be given for distortion");
    const int64_t samples = density.size(0), rays = ray_offsets.size(0) - 1, channels = rgb.size(1);
    const auto value = [&](const char* name, const OptionalTensor& x, ShapeList shape) {
      return checked(name, x, shape, density.scalar_type(), density);
    };
    using Values = CompositeValues<OptionalTensor>;
    const Values gradients{value("grad_rgb", grad_rgb, {rays, channels}), value("grad_opacity", grad_opacity, {rays}),
                           value("grad_depth_sum", grad_depth_sum, {rays}),
                           value("grad_weights", grad_weights, {samples}),
                           value("grad_distortion", grad_distortion, {rays})};
    const Values results{value("ray_rgb", ray_rgb, {rays, channels}), value("opacity", opacity, {rays}),
                         value("depth_sum", depth_sum, {rays}), std::nullopt,
                         spreads ? value("distortion", distortion, {rays}) : std::nullopt};
    const typename Backend::Guard guard(density);
    Tensor gradient =
        of_distances ? new_like(density, {dt.has_value() ? 3 : 2, samples}) : new_like(density, {samples});
    Tensor grad_sample_rgb = new_like(density, {samples, channels});
    dispatch_flag(spreads, [&](auto flag) {
      dispatch_flag(channels != 3 || of_distances, [&](auto general) {
        in.template walk<CompositeGradientWalk, decltype(flag), decltype(general)>(
            channels, gradients, results, data_of(gradient), data_of(grad_sample_rgb), of_distances);
      });
    });
    return {gradient, grad_sample_rgb};
  }

  static void implement(Library& m) {
    m.impl("ray_light", TORCH_BOX(&CompositeOps::ray_light));
    m.impl("ray_light_backward", TORCH_BOX(&CompositeOps::ray_light_backward));
    m.impl("composite", TORCH_BOX(&CompositeOps::composite));
    m.impl("composite_backward", TORCH_BOX(&CompositeOps::composite_backward));
  }

 private:
  // The first flag of a walk is whether it computes distortion, which needs dt.
  template <typename First = std::false_type, typename...>
  struct Spreads : First {};

  // Keeps contiguous copies alive for as long as raw pointers to them are in use.
  struct Inputs {
    Tensor density, ray_offsets;
    OptionalTensor dt, rgb, t;
    double min_transmittance;

    // Walks all rays with a Walk that is constructed from the samples and `more`.
    template <template <typename...> class Walk, typename... Flag, typename... More>
    void walk(const More&... more) const {
      const PackedRays rays = packed_rays(ray_offsets, density.size(0));
      dispatch_opmath(density, [&](auto zero) {
        using T = std::decay_t<decltype(zero)>;
        const T limit = static_cast<T>(min_transmittance);
        dispatch_flag(!dt.has_value(), [&](auto alphas) {
          using Samples = CompositeRows<T, decltype(alphas)::value>;
          if constexpr (!(Samples::kAlphas && Spreads<Flag...>::value)) {
            const Samples samples{data_of(density), data_of(dt), rays, limit, data_of(rgb), data_of(t)};
            Backend::composite_rays(rays, Walk<Samples, Flag...>{samples, more...});
          }
        });
      });
    }
  };

  static Inputs inputs(const Tensor& density, const OptionalTensor& dt, const Tensor& ray_offsets,
                       double min_transmittance, const OptionalTensor& rgb = std::nullopt,
                       const OptionalTensor& t = std::nullopt) {
    const ScalarType dtype = density.scalar_type();
    const bool wide = dtype == ScalarType::Double;
    const bool alphas = !dt.has_value();
    const char* name = alphas ? "alpha" : "density";
    const char* why = alphas ? (wide ? " as alpha is" : " for alpha that is not float64")
                             : (wide ? " as density is" : " for density that is not float64");
    VOXELFIELD_CHECK_TYPE(wide || dtype == ScalarType::Float, name,
                          " must be float32, float64, float16 or bfloat16, got ", dtype_name(dtype));
    check_tensor(name, density, {kAny}, dtype, density);
    check_fraction("min_transmittance", min_transmittance);
    return {as_contiguous(density),
            checked_ray_offsets(ray_offsets, density),
            checked("dt", dt, {density.size(0)}, dtype, density, why),
            checked("rgb", rgb, {density.size(0), kAny}, dtype, density, why),
            checked("t", t, {density.size(0)}, dtype, density, why),
            min_transmittance};
  }
};

}  // namespace voxelfield
