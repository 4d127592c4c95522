// Host side of compositing, written once: allocate and hand over to a backend's three kernels.
#pragma once

#include "common/check_tensor.h"
#include "volume/composite.h"

namespace voxelfield {

// Where a ray's results go to; `distortion` is null where it is not wanted.
template <typename T>
struct CompositeOutputs {
  T *rgb, *opacity, *depth, *weights, *distortion;

  VOXELFIELD_HOST_DEVICE void write(int64_t ray, const RayResult<T>& result) const {
    for (int channel = 0; channel < 3; ++channel) rgb[3 * ray + channel] = result.rgb[channel];
    opacity[ray] = result.opacity;
    depth[ray] = result.depth;
    if (distortion != nullptr) distortion[ray] = result.distortion;
  }
};

// One number of each for every ray, or for `weights` for every sample; null stands for zeros.
template <typename T>
struct CompositeValues {
  const T *rgb, *opacity, *depth, *weights, *distortion;

  VOXELFIELD_HOST_DEVICE RayResult<T> of_ray(int64_t ray) const {
    RayResult<T> result;
    if (rgb != nullptr) {
      for (int channel = 0; channel < 3; ++channel) result.rgb[channel] = rgb[3 * ray + channel];
    }
    if (opacity != nullptr) result.opacity = opacity[ray];
    if (depth != nullptr) result.depth = depth[ray];
    if (distortion != nullptr) result.distortion = distortion[ray];
    return result;
  }
};

template <typename T>
struct SampleGradients {
  T *density, *rgb;
};

template <typename Backend>
struct CompositeOps {
  static Tensor ray_weights(const Tensor& density, const Tensor& dt, const Tensor& ray_offsets,
                            double min_transmittance) {
    check_packed(density, dt, ray_offsets);
    const typename Backend::Guard guard(density);
    const Tensor d = as_contiguous(density), width = as_contiguous(dt), offsets = as_contiguous(ray_offsets);
    Tensor weights = new_empty(d, {d.size(0)}, d.scalar_type());
    dispatch(d, [&](auto zero) {
      using T = decltype(zero);
      Backend::weights(PackedSamples<T>{d.const_data_ptr<T>(), nullptr, nullptr, width.const_data_ptr<T>(),
                                        packed_rays(offsets, d.size(0)), static_cast<T>(min_transmittance)},
                       weights.mutable_data_ptr<T>());
    });
    return weights;
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> composite(const Tensor& density, const Tensor& rgb,
                                                                      const Tensor& t, const Tensor& dt,
                                                                      const Tensor& ray_offsets,
                                                                      double min_transmittance, bool distortion) {
    check_inputs(density, rgb, t, dt, ray_offsets);
    const typename Backend::Guard guard(density);
    const Inputs in{density, rgb, t, dt, ray_offsets};
    const int64_t rays = in.ray_offsets.size(0) - 1;
    const ScalarType dtype = in.density.scalar_type();
    Tensor ray_rgb = new_empty(in.density, {rays, 3}, dtype);
    Tensor opacity = new_empty(in.density, {rays}, dtype);
    Tensor depth = new_empty(in.density, {rays}, dtype);
    Tensor weights = new_empty(in.density, {in.density.size(0)}, dtype);
    Tensor spread = new_empty(in.density, {distortion ? rays : 0}, dtype);
    dispatch(in.density, [&](auto zero) {
      using T = decltype(zero);
      Backend::forward(
          in.template samples<T>(min_transmittance),
          CompositeOutputs<T>{ray_rgb.mutable_data_ptr<T>(), opacity.mutable_data_ptr<T>(), depth.mutable_data_ptr<T>(),
                              weights.mutable_data_ptr<T>(), distortion ? spread.mutable_data_ptr<T>() : nullptr});
    });
    return {ray_rgb, opacity, depth, weights, spread};
  }

  static std::tuple<Tensor, Tensor> composite_backward(
      const std::optional<Tensor>& grad_rgb, const std::optional<Tensor>& grad_opacity,
      const std::optional<Tensor>& grad_depth, const std::optional<Tensor>& grad_weights,
      const std::optional<Tensor>& grad_distortion, const Tensor& density, const Tensor& rgb, const Tensor& t,
      const Tensor& dt, const Tensor& ray_offsets, const Tensor& ray_rgb, const Tensor& opacity, const Tensor& depth,
      const Tensor& distortion, double min_transmittance) {
    check_inputs(density, rgb, t, dt, ray_offsets);
    const int64_t samples = density.size(0), rays = ray_offsets.size(0) - 1;
    const auto check = [&](const char* name, const std::optional<Tensor>& x, std::initializer_list<int64_t> shape) {
      if (x.has_value()) check_tensor(name, *x, shape, density.scalar_type(), density);
    };
    check("grad_rgb", grad_rgb, {rays, 3});
    check("grad_opacity", grad_opacity, {rays});
    check("grad_depth", grad_depth, {rays});
    check("grad_weights", grad_weights, {samples});
    check("grad_distortion", grad_distortion, {rays});
    check("ray_rgb", ray_rgb, {rays, 3});
    check("opacity", opacity, {rays});
    check("depth", depth, {rays});
    if (grad_distortion.has_value()) check("distortion", distortion, {rays});
    const typename Backend::Guard guard(density);
    const Inputs in{density, rgb, t, dt, ray_offsets};
    const auto g_rgb = as_contiguous(grad_rgb), g_opacity = as_contiguous(grad_opacity),
               g_depth = as_contiguous(grad_depth), g_weights = as_contiguous(grad_weights),
               g_distortion = as_contiguous(grad_distortion);
    const Tensor result_rgb = as_contiguous(ray_rgb), result_opacity = as_contiguous(opacity),
                 result_depth = as_contiguous(depth), result_distortion = as_contiguous(distortion);
    Tensor d_density = new_empty(in.density, {samples}, in.density.scalar_type());
    Tensor d_rgb = new_empty(in.density, {samples, 3}, in.density.scalar_type());
    dispatch(in.density, [&](auto zero) {
      using T = decltype(zero);
      const bool spreads = g_distortion.has_value();
      Backend::backward(in.template samples<T>(min_transmittance),
                        CompositeValues<T>{data_or_null<T>(g_rgb), data_or_null<T>(g_opacity), data_or_null<T>(g_depth),
                                           data_or_null<T>(g_weights), data_or_null<T>(g_distortion)},
                        CompositeValues<T>{result_rgb.const_data_ptr<T>(), result_opacity.const_data_ptr<T>(),
                                           result_depth.const_data_ptr<T>(), nullptr,
                                           spreads ? result_distortion.const_data_ptr<T>() : nullptr},
                        SampleGradients<T>{d_density.mutable_data_ptr<T>(), d_rgb.mutable_data_ptr<T>()});
    });
    return {d_density, d_rgb};
  }

 private:
  static void check_packed(const Tensor& density, const Tensor& dt, const Tensor& ray_offsets) {
    check_tensor("density", density, {kAny}, opmath_type(density), density);
    check_tensor("dt", dt, {density.size(0)}, density.scalar_type(), density);
    check_ray_offsets(ray_offsets, density);
  }

  static void check_inputs(const Tensor& density, const Tensor& rgb, const Tensor& t, const Tensor& dt,
                           const Tensor& ray_offsets) {
    check_packed(density, dt, ray_offsets);
    check_tensor("rgb", rgb, {density.size(0), 3}, density.scalar_type(), density);
    check_tensor("t", t, {density.size(0)}, density.scalar_type(), density);
  }

  struct Inputs {
    Tensor density, rgb, t, dt, ray_offsets;

    Inputs(const Tensor& density, const Tensor& rgb, const Tensor& t, const Tensor& dt, const Tensor& ray_offsets)
        : density(as_contiguous(density)),
          rgb(as_contiguous(rgb)),
          t(as_contiguous(t)),
          dt(as_contiguous(dt)),
          ray_offsets(as_contiguous(ray_offsets)) {}

    template <typename T>
    PackedSamples<T> samples(double min_transmittance) const {
      return {density.const_data_ptr<T>(),
              rgb.const_data_ptr<T>(),
              t.const_data_ptr<T>(),
              dt.const_data_ptr<T>(),
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
