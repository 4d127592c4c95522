// The colours of pixels from the colours of their rays, and errors of colours, for both backends.
#pragma once

#include "color/color.h"
#include "common/checks.h"

namespace voxelfield {

// The colour of a pixel from its k rays, each of which emits rgb_i with opacity o_i. A sensor adds up light, so with
// straight colours c_i = rgb_i / o_i
//   L = sum_i o_i decode(c_i) / sum_i o_i,  O = mean_i o_i,  pixel = O encode(L) + (1 - O) background,
// and with d_i = decode(c_i), e = encode(L), and a prime for slopes
//   d pixel / d rgb_i = e' d_i' / k,  d pixel / d o_i = (e + e' (d_i - c_i d_i' - L) - background) / k.
// If image values are linear in light, pixel = mean_i rgb_i + (1 - O) background.
//
// RayColors holds the colours of the rays and the background. The rays of a pixel are adjacent.
template <typename T>
struct RayColors {
  const T* rgb;         // (pixels * per_pixel, 3)
  const T* opacity;     // (pixels * per_pixel,)
  const T* background;  // (pixels, 3), or (3,) with a stride of 0
  int64_t background_stride;
  int64_t pixels;
  int64_t per_pixel;

  // A ray with opacity 0 has no straight colour. Its weight in L is zero.
  VOXELFIELD_HOST_DEVICE T straight(int64_t ray, int channel) const {
    return opacity[ray] == T(0) ? T(0) : rgb[3 * ray + channel] / opacity[ray];
  }
};

// The mean opacity of a pixel, and L. If image values are linear in light, `light` is mean_i rgb_i instead of L.
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

template <typename T, typename Srgb>
struct PixelColor {
  RayColors<T> rays;
  T* colors;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t pixel) const {
    const PixelLight<T> sum = light_of<Srgb::value>(rays, pixel);
    const T* background = rays.background + rays.background_stride * pixel;
    VOXELFIELD_UNROLL
    for (int c = 0; c < 3; ++c) {
      const T emitted = Srgb::value ? sum.opacity * srgb_encode(sum.light[c]).value : sum.light[c];
      colors[3 * pixel + c] = emitted + (T(1) - sum.opacity) * background[c];
    }
  }
};

template <typename T, typename Srgb>
struct PixelColorGradient {
  RayColors<T> rays;
  const T* grad;
  T *grad_rgb, *grad_opacity;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t pixel) const {
    T share[3];  // factor of the gradient for each ray
    T seen[3];   // encode(L) - background
    Transferred<T> encoded[3];
    PixelLight<T> sum;
    if constexpr (Srgb::value) sum = light_of<true>(rays, pixel);
    VOXELFIELD_UNROLL
    for (int c = 0; c < 3; ++c) {
      share[c] = grad[3 * pixel + c] / static_cast<T>(rays.per_pixel);
      if constexpr (Srgb::value) encoded[c] = srgb_encode(sum.light[c]);
      seen[c] = (Srgb::value ? encoded[c].value : T(0)) - rays.background[rays.background_stride * pixel + c];
    }
    for (int64_t ray = pixel * rays.per_pixel; ray < (pixel + 1) * rays.per_pixel; ++ray) {
      T at_opacity = 0;
      VOXELFIELD_UNROLL
      for (int c = 0; c < 3; ++c) {
        if constexpr (Srgb::value) {
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

// Computed colours and true colours. The computed colours belong to pixels, or to samples along the rays of pixels.
// Samples have weights.
template <typename T>
struct ColorErrors {
  const T* colors;           // (rows, 3)
  const T* truth;            // (pixels, 3)
  const T* weights;          // (rows,) if rows are samples, else null
  const int64_t* ray_index;  // (rows,) if rows are samples, else null
  const int64_t* rays_kept;  // one number: how many of the rays count; null if all count
  int64_t rows;
  int64_t pixels;
  int64_t rays_per_pixel;
  bool of_samples;

  VOXELFIELD_HOST_DEVICE int64_t rays() const {
    const int64_t all = pixels * rays_per_pixel;
    if (rays_kept == nullptr) return all;
    return *rays_kept < 0 ? 0 : (*rays_kept < all ? *rays_kept : all);
  }

  // A pixel counts only if all of its rays do. Samples of rays that do not count have weight zero.
  VOXELFIELD_HOST_DEVICE int64_t counted_rows() const { return of_samples ? rows : rays() / rays_per_pixel; }

  // Returns the factor on a sum of weighted squared errors. Means are taken over pixels and channels, or over rays.
  VOXELFIELD_HOST_DEVICE T scale() const {
    const int64_t count = of_samples ? rays() : 3 * (rays() / rays_per_pixel);
    return T(1) / static_cast<T>(count > 0 ? count : 1);
  }

  // Returns the weight of a row and the error of its colour. A row without a valid ray index has weight zero.
  VOXELFIELD_HOST_DEVICE T error(int64_t row, T (&difference)[3]) const {
    T weight = 1;
    int64_t pixel = row;
    if (of_samples) {
      weight = weights[row];
      const int64_t ray = ray_index[row];
      if (ray < 0 || ray >= pixels * rays_per_pixel) weight = 0;
      // A 32-bit division takes half the time.
      pixel = pixels * rays_per_pixel <= UINT32_MAX && rays_per_pixel <= UINT32_MAX
                  ? static_cast<uint32_t>(ray) / static_cast<uint32_t>(rays_per_pixel)
                  : ray / rays_per_pixel;
    }
    VOXELFIELD_UNROLL
    for (int c = 0; c < 3; ++c) {
      difference[c] = weight == T(0) ? T(0) : colors[3 * row + c] - truth[3 * pixel + c];
    }
    return weight;
  }
};

template <typename T>
struct SquaredErrors {
  ColorErrors<T> errors;
  T* result;

  VOXELFIELD_HOST_DEVICE int64_t count() const { return errors.counted_rows(); }

  VOXELFIELD_HOST_DEVICE T operator()(int64_t row) const {
    T d[3];
    const T weight = errors.error(row, d);
    return weight * (d[0] * d[0] + d[1] * d[1] + d[2] * d[2]);
  }

  VOXELFIELD_HOST_DEVICE void finish(T sum) const { *result = sum * errors.scale(); }
};

template <typename T>
struct ColorErrorGradient {
  ColorErrors<T> errors;
  const T* grad;
  T* grad_colors;

  struct Shared {
    int64_t counted;
    T factor;
  };

  VOXELFIELD_HOST_DEVICE Shared shared() const { return {errors.counted_rows(), 2 * *grad * errors.scale()}; }

  VOXELFIELD_HOST_DEVICE void operator()(int64_t row, const Shared& of_all) const {
    T d[3] = {0, 0, 0};
    const T slope = row < of_all.counted ? of_all.factor * errors.error(row, d) : T(0);
    VOXELFIELD_UNROLL
    for (int c = 0; c < 3; ++c) grad_colors[3 * row + c] = slope * d[c];
  }
};

template <typename Backend>
struct PixelOps {
  static Tensor pixel_colors(const Tensor& rgb, const Tensor& opacity, const Tensor& background, int64_t rays_per_pixel,
                             bool srgb) {
    const ColorInputs in = color_inputs(rgb, opacity, background, rays_per_pixel);
    const typename Backend::Guard guard(rgb);
    Tensor colors = new_like(rgb, {in.pixels, 3});
    in.template for_each<PixelColor>(srgb, data_of(colors));
    return colors;
  }

  static TensorTuple<2> pixel_colors_backward(const Tensor& grad, const Tensor& rgb, const Tensor& opacity,
                                              const Tensor& background, int64_t rays_per_pixel, bool srgb) {
    const ColorInputs in = color_inputs(rgb, opacity, background, rays_per_pixel);
    const Tensor g = checked("grad", grad, {in.pixels, 3}, rgb.scalar_type(), rgb);
    const typename Backend::Guard guard(rgb);
    Tensor grad_rgb = new_like(rgb, {rgb.size(0), 3}), grad_opacity = new_like(rgb, {rgb.size(0)});
    in.template for_each<PixelColorGradient>(srgb, data_of(g), data_of(grad_rgb), data_of(grad_opacity));
    return {grad_rgb, grad_opacity};
  }

  static Tensor color_error(const Tensor& colors, const Tensor& truth, const OptionalTensor& weights,
                            const OptionalTensor& ray_index, int64_t rays_per_pixel, const OptionalTensor& rays_kept) {
    const ErrorInputs in = error_inputs(colors, truth, weights, ray_index, rays_per_pixel, rays_kept);
    const typename Backend::Guard guard(colors);
    const int64_t rows = colors.size(0);
    Tensor partial = new_like(colors, {Backend::sum_parts(rows)}), error = new_like(colors, {});
    dispatch_opmath(colors, [&](auto zero) {
      using T = decltype(zero);
      Backend::sum(rows, SquaredErrors<T>{in.template errors<T>(), data_of(error)}, partial.mutable_data_ptr<T>());
    });
    return error;
  }

  static Tensor color_error_backward(const Tensor& grad, const Tensor& colors, const Tensor& truth,
                                     const OptionalTensor& weights, const OptionalTensor& ray_index,
                                     int64_t rays_per_pixel, const OptionalTensor& rays_kept) {
    const ErrorInputs in = error_inputs(colors, truth, weights, ray_index, rays_per_pixel, rays_kept);
    check_tensor("grad", grad, {}, colors.scalar_type(), colors);
    const typename Backend::Guard guard(colors);
    Tensor grad_colors = new_like(colors, {colors.size(0), 3});
    dispatch_opmath(colors, [&](auto zero) {
      using T = decltype(zero);
      Backend::for_each_row(colors.size(0),
                            ColorErrorGradient<T>{in.template errors<T>(), data_of(grad), data_of(grad_colors)});
    });
    return grad_colors;
  }

  static void implement(Library& m) {
    m.impl("pixel_colors", TORCH_BOX(&PixelOps::pixel_colors));
    m.impl("pixel_colors_backward", TORCH_BOX(&PixelOps::pixel_colors_backward));
    m.impl("color_error", TORCH_BOX(&PixelOps::color_error));
    m.impl("color_error_backward", TORCH_BOX(&PixelOps::color_error_backward));
  }

 private:
  struct ColorInputs {
    Tensor rgb, opacity, background;
    int64_t pixels, rays_per_pixel;

    // If a pixel has a single ray, decoding and encoding cancel out.
    template <template <typename, typename> class Pixel, typename... More>
    void for_each(bool srgb, const More&... more) const {
      dispatch_opmath(rgb, [&](auto zero) {
        using T = decltype(zero);
        const RayColors<T> rays{data_of(rgb), data_of(opacity), data_of(background), background.dim() == 1 ? 0 : 3,
                                pixels,       rays_per_pixel};
        dispatch_flag(srgb && rays_per_pixel > 1,
                      [&](auto encoded) { Backend::for_each(pixels, Pixel<T, decltype(encoded)>{rays, more...}); });
      });
    }
  };

  static ColorInputs color_inputs(const Tensor& rgb, const Tensor& opacity, const Tensor& background,
                                  int64_t rays_per_pixel) {
    const ScalarType dtype = opmath_type(rgb);
    check_tensor("rgb", rgb, {kAny, 3}, dtype, rgb);
    STD_TORCH_CHECK(rays_per_pixel > 0 && rgb.size(0) % rays_per_pixel == 0,
                    "rays_per_pixel must be a divisor of the number of rays, ", rgb.size(0), ", got ", rays_per_pixel);
    const int64_t pixels = rgb.size(0) / rays_per_pixel;
    const std::vector<int64_t> each{pixels, 3}, all{3};
    return {as_contiguous(rgb), checked("opacity", opacity, {rgb.size(0)}, dtype, rgb),
            checked("background", background, background.dim() == 1 ? all : each, dtype, rgb), pixels, rays_per_pixel};
  }

  struct ErrorInputs {
    Tensor colors, truth;
    OptionalTensor weights, ray_index, rays_kept;
    int64_t rays_per_pixel;

    template <typename T>
    ColorErrors<T> errors() const {
      return {data_of(colors), data_of(truth), data_of(weights), data_of(ray_index), data_of(rays_kept),
              colors.size(0),  truth.size(0),  rays_per_pixel,   weights.has_value()};
    }
  };

  static ErrorInputs error_inputs(const Tensor& colors, const Tensor& truth, const OptionalTensor& weights,
                                  const OptionalTensor& ray_index, int64_t rays_per_pixel,
                                  const OptionalTensor& rays_kept) {
    const ScalarType dtype = opmath_type(colors);
    check_tensor("colors", colors, {kAny, 3}, dtype, colors);
    const int64_t rows = colors.size(0);
    ErrorInputs in{as_contiguous(colors),
                   checked("truth", truth, {weights.has_value() ? kAny : rows, 3}, dtype, colors),
                   checked("weights", weights, {rows}, dtype, colors),
                   checked("ray_index", ray_index, {rows}, ScalarType::Long, colors),
                   checked("rays_kept", rays_kept, {}, ScalarType::Long, colors),
                   rays_per_pixel};
    STD_TORCH_CHECK(weights.has_value() == ray_index.has_value(), "weights and ray_index must be given together");
    STD_TORCH_CHECK(rays_per_pixel > 0 && truth.size(0) <= INT64_MAX / rays_per_pixel,
                    "rays_per_pixel must be at least 1 and fit 64 bits times the pixels, got ", rays_per_pixel);
    return in;
  }
};

}  // namespace voxelfield
