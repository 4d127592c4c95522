// Host side of pixel_colors, written once: check, allocate, and hand over to a backend's two kernels.
//   Backend::pixel_colors<Srgb>(rays, colors)
//   Backend::pixel_colors_backward<Srgb>(rays, grad, grad_rgb, grad_opacity)
#pragma once

#include "common/check_tensor.h"
#include "volume/pixel_colors.h"

namespace voxelfield {

template <typename Backend>
struct PixelColorsOps {
  static Tensor pixel_colors(const Tensor& rgb, const Tensor& opacity, const Tensor& background, int64_t rays_per_pixel,
                             bool srgb) {
    const int64_t pixels = check(rgb, opacity, background, rays_per_pixel);
    const typename Backend::Guard guard(rgb);
    const Inputs in{rgb, opacity, background, rays_per_pixel};
    Tensor colors = new_empty(rgb, {pixels, 3}, rgb.scalar_type());
    if (pixels > 0) {
      dispatch(rgb, srgb && rays_per_pixel > 1, [&](auto zero, auto encoded) {
        using T = decltype(zero);
        Backend::template pixel_colors<encoded.value>(in.template rays<T>(), colors.mutable_data_ptr<T>());
      });
    }
    return colors;
  }

  static std::tuple<Tensor, Tensor> pixel_colors_backward(const Tensor& grad, const Tensor& rgb, const Tensor& opacity,
                                                          const Tensor& background, int64_t rays_per_pixel, bool srgb) {
    const int64_t pixels = check(rgb, opacity, background, rays_per_pixel);
    check_tensor("grad", grad, {pixels, 3}, rgb.scalar_type(), rgb);
    const typename Backend::Guard guard(rgb);
    const Inputs in{rgb, opacity, background, rays_per_pixel};
    const Tensor g = as_contiguous(grad);
    Tensor grad_rgb = new_empty(rgb, {rgb.size(0), 3}, rgb.scalar_type());
    Tensor grad_opacity = new_empty(rgb, {rgb.size(0)}, rgb.scalar_type());
    if (pixels > 0) {
      dispatch(rgb, srgb && rays_per_pixel > 1, [&](auto zero, auto encoded) {
        using T = decltype(zero);
        Backend::template pixel_colors_backward<encoded.value>(in.template rays<T>(), g.const_data_ptr<T>(),
                                                               grad_rgb.mutable_data_ptr<T>(),
                                                               grad_opacity.mutable_data_ptr<T>());
      });
    }
    return {grad_rgb, grad_opacity};
  }

 private:
  // Returns the number of pixels.
  static int64_t check(const Tensor& rgb, const Tensor& opacity, const Tensor& background, int64_t rays_per_pixel) {
    check_tensor("rgb", rgb, {kAny, 3}, opmath_type(rgb), rgb);
    check_tensor("opacity", opacity, {rgb.size(0)}, rgb.scalar_type(), rgb);
    STD_TORCH_CHECK(rays_per_pixel > 0 && rgb.size(0) % rays_per_pixel == 0,
                    "rays_per_pixel must be a divisor of the number of rays, ", rgb.size(0), ", got ", rays_per_pixel);
    const int64_t pixels = rgb.size(0) / rays_per_pixel;
    if (background.dim() == 1) {
      check_tensor("background", background, {3}, rgb.scalar_type(), rgb);
    } else {
      check_tensor("background", background, {pixels, 3}, rgb.scalar_type(), rgb);
    }
    return pixels;
  }

  struct Inputs {
    Tensor rgb, opacity, background;
    int64_t rays_per_pixel;

    Inputs(const Tensor& rgb, const Tensor& opacity, const Tensor& background, int64_t rays_per_pixel)
        : rgb(as_contiguous(rgb)),
          opacity(as_contiguous(opacity)),
          background(as_contiguous(background)),
          rays_per_pixel(rays_per_pixel) {}

    template <typename T>
    RayColors<T> rays() const {
      return {rgb.const_data_ptr<T>(),       opacity.const_data_ptr<T>(),  background.const_data_ptr<T>(),
              background.dim() == 1 ? 0 : 3, rgb.size(0) / rays_per_pixel, rays_per_pixel};
    }
  };

  // Decoding and encoding again cancel out for a pixel of a single ray.
  template <typename F>
  static void dispatch(const Tensor& like, bool encoded, const F& f) {
    const auto with_type = [&](auto zero) { encoded ? f(zero, std::true_type{}) : f(zero, std::false_type{}); };
    like.scalar_type() == ScalarType::Double ? with_type(double{}) : with_type(float{});
  }
};

}  // namespace voxelfield
