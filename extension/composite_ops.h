// Host side of compositing, written once: allocate and hand over to a backend's three kernels.
#pragma once

#include "composite.h"
#include "tensors.h"

namespace voxelfield {

template <typename T>
struct CompositeOutputs {
  T *rgb, *opacity, *depth, *weights;
};

template <typename T>
struct CompositeGradients {
  const T *rgb, *opacity, *depth, *weights;

  VOXELFIELD_HOST_DEVICE RayGradient<T> of_ray(int64_t ray) const {
    return {{rgb[3 * ray], rgb[3 * ray + 1], rgb[3 * ray + 2]}, opacity[ray], depth[ray], weights};
  }
};

template <typename Backend>
struct CompositeOps {
  static Tensor ray_weights(const Tensor& density, const Tensor& dt, const Tensor& ray_offsets,
                            double min_transmittance) {
    const typename Backend::Guard guard(density);
    const Tensor d = as_contiguous(density), width = as_contiguous(dt), offsets = as_contiguous(ray_offsets);
    Tensor weights = new_empty(d, {d.size(0)}, d.scalar_type());
    dispatch(d, [&](auto zero) {
      using T = decltype(zero);
      const PackedSamples<T> samples{d.const_data_ptr<T>(),
                                     nullptr,
                                     nullptr,
                                     width.const_data_ptr<T>(),
                                     offsets.const_data_ptr<int64_t>(),
                                     offsets.size(0) - 1,
                                     static_cast<T>(min_transmittance)};
      if (samples.rays > 0) Backend::weights(samples, weights.mutable_data_ptr<T>());
    });
    return weights;
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> composite(const Tensor& density, const Tensor& rgb, const Tensor& t,
                                                              const Tensor& dt, const Tensor& ray_offsets,
                                                              double min_transmittance) {
    const typename Backend::Guard guard(density);
    const Inputs in{density, rgb, t, dt, ray_offsets};
    const int64_t rays = in.ray_offsets.size(0) - 1;
    const ScalarType dtype = in.density.scalar_type();
    Tensor ray_rgb = new_empty(in.density, {rays, 3}, dtype);
    Tensor opacity = new_empty(in.density, {rays}, dtype);
    Tensor depth = new_empty(in.density, {rays}, dtype);
    Tensor weights = new_empty(in.density, {in.density.size(0)}, dtype);
    dispatch(in.density, [&](auto zero) {
      using T = decltype(zero);
      if (rays == 0) return;
      Backend::forward(in.template samples<T>(min_transmittance),
                       CompositeOutputs<T>{ray_rgb.mutable_data_ptr<T>(), opacity.mutable_data_ptr<T>(),
                                           depth.mutable_data_ptr<T>(), weights.mutable_data_ptr<T>()});
    });
    return {ray_rgb, opacity, depth, weights};
  }

  static std::tuple<Tensor, Tensor> composite_backward(const Tensor& grad_rgb, const Tensor& grad_opacity,
                                                       const Tensor& grad_depth, const Tensor& grad_weights,
                                                       const Tensor& density, const Tensor& rgb, const Tensor& t,
                                                       const Tensor& dt, const Tensor& ray_offsets,
                                                       double min_transmittance) {
    const typename Backend::Guard guard(density);
    const Inputs in{density, rgb, t, dt, ray_offsets};
    const Tensor g_rgb = as_contiguous(grad_rgb), g_opacity = as_contiguous(grad_opacity),
                 g_depth = as_contiguous(grad_depth), g_weights = as_contiguous(grad_weights);
    Tensor d_density = new_empty(in.density, {in.density.size(0)}, in.density.scalar_type());
    Tensor d_rgb = new_empty(in.density, {in.density.size(0), 3}, in.density.scalar_type());
    dispatch(in.density, [&](auto zero) {
      using T = decltype(zero);
      if (in.ray_offsets.size(0) < 2) return;
      Backend::backward(in.template samples<T>(min_transmittance),
                        CompositeGradients<T>{g_rgb.const_data_ptr<T>(), g_opacity.const_data_ptr<T>(),
                                              g_depth.const_data_ptr<T>(), g_weights.const_data_ptr<T>()},
                        d_density.mutable_data_ptr<T>(), d_rgb.mutable_data_ptr<T>());
    });
    return {d_density, d_rgb};
  }

 private:
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
              ray_offsets.const_data_ptr<int64_t>(),
              ray_offsets.size(0) - 1,
              static_cast<T>(min_transmittance)};
    }
  };

  template <typename F>
  static void dispatch(const Tensor& like, const F& f) {
    if (like.scalar_type() == ScalarType::Double) {
      f(double{});
    } else {
      STD_TORCH_CHECK(like.scalar_type() == ScalarType::Float, "composite: expected a float32 or float64 tensor, got ",
                      torch::headeronly::toString(like.scalar_type()));
      f(float{});
    }
  }
};

}  // namespace voxelfield
