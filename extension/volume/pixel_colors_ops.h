// Host side of pixel_colors, written once for both backends: check, allocate, and compute each pixel.
#pragma once

#include "common/checks.h"
#include "volume/pixel_colors.h"

namespace voxelfield {

template <typename Backend>
struct PixelColorsOps {
  static Tensor pixel_colors(const Tensor& rgb, const Tensor& opacity, const Tensor& background, int64_t rays_per_pixel,
                             bool srgb) {
    const Inputs in = checked(rgb, opacity, background, rays_per_pixel);
    const typename Backend::Guard guard(rgb);
    Tensor colors = new_empty(rgb, {in.pixels, 3}, rgb.scalar_type());
    in.dispatch(srgb, [&](auto encoded, auto rays) {
      using T = typename decltype(rays)::value_type;
      Backend::for_each(in.pixels, PixelColor<encoded.value, T>{rays, colors.mutable_data_ptr<T>()});
    });
    return colors;
  }

  static std::tuple<Tensor, Tensor> pixel_colors_backward(const Tensor& grad, const Tensor& rgb, const Tensor& opacity,
                                                          const Tensor& background, int64_t rays_per_pixel, bool srgb) {
    const Inputs in = checked(rgb, opacity, background, rays_per_pixel);
    check_tensor("grad", grad, {in.pixels, 3}, rgb.scalar_type(), rgb);
    const typename Backend::Guard guard(rgb);
    const Tensor g = as_contiguous(grad);
    Tensor grad_rgb = new_empty(rgb, {rgb.size(0), 3}, rgb.scalar_type());
    Tensor grad_opacity = new_empty(rgb, {rgb.size(0)}, rgb.scalar_type());
    in.dispatch(srgb, [&](auto encoded, auto rays) {
      using T = typename decltype(rays)::value_type;
      Backend::for_each(
          in.pixels, PixelColorGradient<encoded.value, T>{rays, g.const_data_ptr<T>(), grad_rgb.mutable_data_ptr<T>(),
                                                          grad_opacity.mutable_data_ptr<T>()});
    });
    return {grad_rgb, grad_opacity};
  }

  static void implement(Library& m) {
    m.impl("pixel_colors", TORCH_BOX(&PixelColorsOps::pixel_colors));
    m.impl("pixel_colors_backward", TORCH_BOX(&PixelColorsOps::pixel_colors_backward));
  }

 private:
  struct Inputs {
    Tensor rgb, opacity, background;
    int64_t pixels, rays_per_pixel;

    // Decoding and encoding again cancel out for a pixel of a single ray.
    template <typename F>
    void dispatch(bool srgb, const F& f) const {
      dispatch_opmath(rgb, [&](auto zero) {
        using T = decltype(zero);
        const RayColors<T> rays{rgb.const_data_ptr<T>(),
                                opacity.const_data_ptr<T>(),
                                background.const_data_ptr<T>(),
                                background.dim() == 1 ? 0 : 3,
                                pixels,
                                rays_per_pixel};
        srgb&& rays_per_pixel > 1 ? f(std::true_type{}, rays) : f(std::false_type{}, rays);
      });
    }
  };

  static Inputs checked(const Tensor& rgb, const Tensor& opacity, const Tensor& background, int64_t rays_per_pixel) {
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
    return {as_contiguous(rgb), as_contiguous(opacity), as_contiguous(background), pixels, rays_per_pixel};
  }
};

}  // namespace voxelfield
