// The colour of a pixel from its k rays, of which each emits rgb_i with opacity o_i. A sensor adds up light, so with
// straight colours c_i = rgb_i / o_i
//   L = sum_i o_i decode(c_i) / sum_i o_i,  O = mean_i o_i,  pixel = O encode(L) + (1 - O) background,
// and with d_i = decode(c_i), e = encode(L) and a prime for slopes
//   d pixel / d rgb_i = e' d_i' / k,  d pixel / d o_i = (e + e' (d_i - c_i d_i' - L) - background) / k.
// Where image values are light themselves, pixel = mean_i rgb_i + (1 - O) background.
#pragma once

#include "common/checks.h"
#include "volume/transfer.h"

namespace voxelfield {

// The colours of rays, those of a pixel together, and what lies behind them.
template <typename T>
struct RayColors {
  using value_type = T;

  const T* rgb;         // (pixels * per_pixel, 3)
  const T* opacity;     // (pixels * per_pixel,)
  const T* background;  // (pixels, 3), or (3,) with a stride of 0
  int64_t background_stride;
  int64_t pixels;
  int64_t per_pixel;

  // A ray that meets nothing has no colour; its weight in the light is zero.
  VOXELFIELD_HOST_DEVICE T straight(int64_t ray, int channel) const {
    return opacity[ray] == T(0) ? T(0) : rgb[3 * ray + channel] / opacity[ray];
  }
};

// A pixel's mean opacity, and L; or mean_i rgb_i instead of L where image values are light.
template <typename T>
struct PixelLight {
  T opacity = 0;
  T light[3] = {0, 0, 0};
};

template <bool Srgb, typename T>
VOXELFIELD_HOST_DEVICE PixelLight<T> light_of(const RayColors<T>& rays, int64_t pixel) {
  PixelLight<T> sum;
  for (int64_t ray = pixel * rays.per_pixel; ray < (pixel + 1) * rays.per_pixel; ++ray) {
    sum.opacity += rays.opacity[ray];
    VOXELFIELD_UNROLL
    for (int c = 0; c < 3; ++c) {
      sum.light[c] += Srgb ? rays.opacity[ray] * srgb_decode(rays.straight(ray, c)).value : rays.rgb[3 * ray + c];
    }
  }
  const T count = static_cast<T>(rays.per_pixel), weight = Srgb ? sum.opacity : count;
  VOXELFIELD_UNROLL
  for (int c = 0; c < 3; ++c) sum.light[c] = weight == T(0) ? T(0) : sum.light[c] / weight;
  sum.opacity /= count;
  return sum;
}

template <bool Srgb, typename T>
struct PixelColor {
  RayColors<T> rays;
  T* colors;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t pixel) const {
    const PixelLight<T> sum = light_of<Srgb>(rays, pixel);
    const T* background = rays.background + rays.background_stride * pixel;
    VOXELFIELD_UNROLL
    for (int c = 0; c < 3; ++c) {
      const T emitted = Srgb ? sum.opacity * srgb_encode(sum.light[c]).value : sum.light[c];
      colors[3 * pixel + c] = emitted + (T(1) - sum.opacity) * background[c];
    }
  }
};

template <bool Srgb, typename T>
struct PixelColorGradient {
  RayColors<T> rays;
  const T* grad;
  T *grad_rgb, *grad_opacity;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t pixel) const {
    T share[3];  // of each ray in the gradient
    T seen[3];   // encode(L) - background
    Transferred<T> encoded[3];
    PixelLight<T> sum;
    if constexpr (Srgb) sum = light_of<true>(rays, pixel);
    VOXELFIELD_UNROLL
    for (int c = 0; c < 3; ++c) {
      share[c] = grad[3 * pixel + c] / static_cast<T>(rays.per_pixel);
      if constexpr (Srgb) encoded[c] = srgb_encode(sum.light[c]);
      seen[c] = (Srgb ? encoded[c].value : T(0)) - rays.background[rays.background_stride * pixel + c];
    }
    for (int64_t ray = pixel * rays.per_pixel; ray < (pixel + 1) * rays.per_pixel; ++ray) {
      T at_opacity = 0;
      VOXELFIELD_UNROLL
      for (int c = 0; c < 3; ++c) {
        if constexpr (Srgb) {
          const T color = rays.straight(ray, c);
          const Transferred<T> decoded = srgb_decode(color);
          const T excess = decoded.value - color * decoded.slope - sum.light[c];
          grad_rgb[3 * ray + c] = share[c] * encoded[c].slope * decoded.slope;
          at_opacity += share[c] * (seen[c] + encoded[c].slope * excess);
        } else {
          grad_rgb[3 * ray + c] = share[c];
          at_opacity += share[c] * seen[c];
        }
      }
      grad_opacity[ray] = at_opacity;
    }
  }
};

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
        const auto call = [&](auto encoded) {
          f(encoded, RayColors<T>{rgb.const_data_ptr<T>(), opacity.const_data_ptr<T>(), background.const_data_ptr<T>(),
                                  background.dim() == 1 ? 0 : 3, pixels, rays_per_pixel});
        };
        srgb&& rays_per_pixel > 1 ? call(std::true_type{}) : call(std::false_type{});
      });
    }
  };

  static Inputs checked(const Tensor& rgb, const Tensor& opacity, const Tensor& background, int64_t rays_per_pixel) {
    check_tensor("rgb", rgb, {kAny, 3}, opmath_type(rgb), rgb);
    check_tensor("opacity", opacity, {rgb.size(0)}, rgb.scalar_type(), rgb);
    STD_TORCH_CHECK(rays_per_pixel > 0 && rgb.size(0) % rays_per_pixel == 0,
                    "rays_per_pixel must be a divisor of the number of rays, ", rgb.size(0), ", got ", rays_per_pixel);
    const int64_t pixels = rgb.size(0) / rays_per_pixel;
    const std::vector<int64_t> each{pixels, 3}, all{3};
    check_tensor("background", background, background.dim() == 1 ? all : each, rgb.scalar_type(), rgb);
    return {as_contiguous(rgb), as_contiguous(opacity), as_contiguous(background), pixels, rays_per_pixel};
  }
};

}  // namespace voxelfield
