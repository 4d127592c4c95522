// Host side of compositing, written once: check, allocate, and hand over to a backend's kernels.
//   Backend::light(samples, value, values)                      weights or transmittances alone
//   Backend::light_backward(samples, value, grad, grad_density)
//   Backend::forward(samples, out)
//   Backend::backward(samples, gradients, results, out)
#pragma once

#include "common/checks.h"
#include "rays/packed_rays.h"
#include "volume/composite.h"

namespace voxelfield {

// What an op returns for each sample.
enum class LightValue { kWeight, kTransmittance };

// Where a ray's results go to; `distortion` is null where it is not wanted.
template <typename T>
struct CompositeOutputs {
  T *rgb, *opacity, *depth_sum, *weights, *distortion;

  VOXELFIELD_HOST_DEVICE void write(int64_t ray, const RayTotals<T>& totals, T distortion_of_ray) const {
    for (int channel = 0; channel < 3; ++channel) rgb[3 * ray + channel] = totals.rgb[channel];
    opacity[ray] = totals.opacity;
    depth_sum[ray] = totals.depth_sum;
    if (distortion != nullptr) distortion[ray] = distortion_of_ray;
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

  VOXELFIELD_HOST_DEVICE T distortion_of_ray(int64_t ray) const {
    return distortion != nullptr ? distortion[ray] : T(0);
  }

  VOXELFIELD_HOST_DEVICE T at_weight(int64_t sample) const { return weights != nullptr ? weights[sample] : T(0); }
};

template <typename T>
struct SampleGradients {
  T *density, *rgb;
};

template <typename Backend>
struct CompositeOps {
  static Tensor ray_light(const Tensor& density, const std::optional<Tensor>& dt, const Tensor& ray_offsets,
                          double min_transmittance, bool transmittance) {
    check_packed(density, dt, ray_offsets, min_transmittance);
    const typename Backend::Guard guard(density);
    const Inputs in{density, dt, ray_offsets};
    Tensor values = new_empty(density, {density.size(0)}, density.scalar_type());
    dispatch(density, [&](auto zero) {
      using T = decltype(zero);
      Backend::light(in.template samples<T>(min_transmittance), light_value(transmittance),
                     values.mutable_data_ptr<T>());
    });
    return values;
  }

  static Tensor ray_light_backward(const Tensor& grad, const Tensor& density, const std::optional<Tensor>& dt,
                                   const Tensor& ray_offsets, double min_transmittance, bool transmittance) {
    check_packed(density, dt, ray_offsets, min_transmittance);
    check_tensor("grad", grad, {density.size(0)}, density.scalar_type(), density);
    const typename Backend::Guard guard(density);
    const Inputs in{density, dt, ray_offsets};
    const Tensor g = as_contiguous(grad);
    Tensor grad_density = new_empty(density, {density.size(0)}, density.scalar_type());
    dispatch(density, [&](auto zero) {
      using T = decltype(zero);
      Backend::light_backward(in.template samples<T>(min_transmittance), light_value(transmittance),
                              g.const_data_ptr<T>(), grad_density.mutable_data_ptr<T>());
    });
    return grad_density;
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> composite(const Tensor& density, const Tensor& rgb,
                                                                      const Tensor& t, const std::optional<Tensor>& dt,
                                                                      const Tensor& ray_offsets,
                                                                      double min_transmittance, bool distortion) {
    check_inputs(density, rgb, t, dt, ray_offsets, min_transmittance);
    STD_TORCH_CHECK(dt.has_value() || !distortion, "dt must be given for distortion");
    const typename Backend::Guard guard(density);
    const Inputs in{density, dt, ray_offsets, rgb, t};
    const int64_t rays = in.ray_offsets.size(0) - 1;
    const ScalarType dtype = in.density.scalar_type();
    Tensor ray_rgb = new_empty(in.density, {rays, 3}, dtype);
    Tensor opacity = new_empty(in.density, {rays}, dtype);
    Tensor depth_sum = new_empty(in.density, {rays}, dtype);
    Tensor weights = new_empty(in.density, {in.density.size(0)}, dtype);
    Tensor spread = new_empty(in.density, {distortion ? rays : 0}, dtype);
    dispatch(in.density, [&](auto zero) {
      using T = decltype(zero);
      Backend::forward(in.template samples<T>(min_transmittance),
                       CompositeOutputs<T>{ray_rgb.mutable_data_ptr<T>(), opacity.mutable_data_ptr<T>(),
                                           depth_sum.mutable_data_ptr<T>(), weights.mutable_data_ptr<T>(),
                                           distortion ? spread.mutable_data_ptr<T>() : nullptr});
    });
    return {ray_rgb, opacity, depth_sum, weights, spread};
  }

  static std::tuple<Tensor, Tensor> composite_backward(
      const std::optional<Tensor>& grad_rgb, const std::optional<Tensor>& grad_opacity,
      const std::optional<Tensor>& grad_depth_sum, const std::optional<Tensor>& grad_weights,
      const std::optional<Tensor>& grad_distortion, const Tensor& density, const Tensor& rgb, const Tensor& t,
      const std::optional<Tensor>& dt, const Tensor& ray_offsets, const Tensor& ray_rgb, const Tensor& opacity,
      const Tensor& depth_sum, const Tensor& distortion, double min_transmittance) {
    check_inputs(density, rgb, t, dt, ray_offsets, min_transmittance);
    STD_TORCH_CHECK(dt.has_value() || !grad_distortion.has_value(), "dt must be given for distortion");
    const int64_t samples = density.size(0), rays = ray_offsets.size(0) - 1;
    const auto check = [&](const char* name, const std::optional<Tensor>& x, std::initializer_list<int64_t> shape) {
      if (x.has_value()) check_tensor(name, *x, shape, density.scalar_type(), density);
    };
    check("grad_rgb", grad_rgb, {rays, 3});
    check("grad_opacity", grad_opacity, {rays});
    check("grad_depth_sum", grad_depth_sum, {rays});
    check("grad_weights", grad_weights, {samples});
    check("grad_distortion", grad_distortion, {rays});
    check("ray_rgb", ray_rgb, {rays, 3});
    check("opacity", opacity, {rays});
    check("depth_sum", depth_sum, {rays});
    if (grad_distortion.has_value()) check("distortion", distortion, {rays});
    const typename Backend::Guard guard(density);
    const Inputs in{density, dt, ray_offsets, rgb, t};
    const auto g_rgb = as_contiguous(grad_rgb), g_opacity = as_contiguous(grad_opacity),
               g_depth_sum = as_contiguous(grad_depth_sum), g_weights = as_contiguous(grad_weights),
               g_distortion = as_contiguous(grad_distortion);
    const Tensor result_rgb = as_contiguous(ray_rgb), result_opacity = as_contiguous(opacity),
                 result_depth_sum = as_contiguous(depth_sum), result_distortion = as_contiguous(distortion);
    Tensor d_density = new_empty(in.density, {samples}, in.density.scalar_type());
    Tensor d_rgb = new_empty(in.density, {samples, 3}, in.density.scalar_type());
    dispatch(in.density, [&](auto zero) {
      using T = decltype(zero);
      const bool spreads = g_distortion.has_value();
      Backend::backward(
          in.template samples<T>(min_transmittance),
          CompositeValues<T>{data_or_null<T>(g_rgb), data_or_null<T>(g_opacity), data_or_null<T>(g_depth_sum),
                             data_or_null<T>(g_weights), data_or_null<T>(g_distortion)},
          CompositeValues<T>{result_rgb.const_data_ptr<T>(), result_opacity.const_data_ptr<T>(),
                             result_depth_sum.const_data_ptr<T>(), nullptr,
                             spreads ? result_distortion.const_data_ptr<T>() : nullptr},
          SampleGradients<T>{d_density.mutable_data_ptr<T>(), d_rgb.mutable_data_ptr<T>()});
    });
    return {d_density, d_rgb};
  }

 private:
  static LightValue light_value(bool transmittance) {
    return transmittance ? LightValue::kTransmittance : LightValue::kWeight;
  }

  static void check_packed(const Tensor& density, const std::optional<Tensor>& dt, const Tensor& ray_offsets,
                           double min_transmittance) {
    check_tensor("density", density, {kAny}, opmath_type(density), density);
    if (dt.has_value()) check_tensor("dt", *dt, {density.size(0)}, density.scalar_type(), density);
    check_ray_offsets(ray_offsets, density);
    check_fraction("min_transmittance", min_transmittance);
  }

  static void check_inputs(const Tensor& density, const Tensor& rgb, const Tensor& t, const std::optional<Tensor>& dt,
                           const Tensor& ray_offsets, double min_transmittance) {
    check_packed(density, dt, ray_offsets, min_transmittance);
    check_tensor("rgb", rgb, {density.size(0), 3}, density.scalar_type(), density);
    check_tensor("t", t, {density.size(0)}, density.scalar_type(), density);
  }

  // Keeps contiguous copies alive for as long as raw pointers to them are in use.
  struct Inputs {
    Tensor density, ray_offsets;
    std::optional<Tensor> dt, rgb, t;

    Inputs(const Tensor& density, const std::optional<Tensor>& dt, const Tensor& ray_offsets,
           const std::optional<Tensor>& rgb = std::nullopt, const std::optional<Tensor>& t = std::nullopt)
        : density(as_contiguous(density)),
          ray_offsets(as_contiguous(ray_offsets)),
          dt(as_contiguous(dt)),
          rgb(as_contiguous(rgb)),
          t(as_contiguous(t)) {}

    template <typename T>
    PackedSamples<T> samples(double min_transmittance) const {
      return {density.const_data_ptr<T>(),
              data_or_null<T>(rgb),
              data_or_null<T>(t),
              data_or_null<T>(dt),
              packed_rays(ray_offsets, density.size(0)),
              static_cast<T>(min_transmittance)};
    }
  };

  template <typename F>
  static void dispatch(const Tensor& like, const F& f) {
    if (like.scalar_type() == ScalarType::Double) {
      f(double{});
    } else {
      f(float{});
    }
  }
};

}  // namespace voxelfield
