// Errors of colours, written once for both backends: the formulas, and the host side, which checks, allocates, and sums
// over the rows.
#pragma once

#include "common/checks.h"

namespace voxelfield {

// Colours and the true ones: of pixels, or of the samples along pixels' rays, which have weights.
template <typename T>
struct ColorErrors {
  const T* colors;           // (rows, 3)
  const T* truth;            // (pixels, 3)
  const T* weights;          // (rows,) if rows are samples, else null
  const int64_t* ray_index;  // (rows,) likewise
  const int64_t* rays_kept;  // one number, the rays that count; null for all
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

  // The factor on a sum of weighted squared errors: means are over pixels and channels, or over rays.
  VOXELFIELD_HOST_DEVICE T scale() const {
    const int64_t count = of_samples ? rays() : 3 * (rays() / rays_per_pixel);
    return T(1) / static_cast<T>(count > 0 ? count : 1);
  }

  // Returns the weight of a row, and the error of its colour. A row whose index is that of no ray has weight zero.
  VOXELFIELD_HOST_DEVICE T error(int64_t row, T (&difference)[3]) const {
    T weight = 1;
    int64_t pixel = row;
    if (of_samples) {
      weight = weights[row];
      const int64_t ray = ray_index[row];
      if (ray < 0 || ray >= pixels * rays_per_pixel) weight = 0;
      // A 32-bit division takes half as long.
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

// For Backend::sum: squared errors of rows.
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

// For Backend::for_each_row.
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
struct ColorErrorOps {
  static Tensor color_error(const Tensor& colors, const Tensor& truth, const OptionalTensor& weights,
                            const OptionalTensor& ray_index, int64_t rays_per_pixel, const OptionalTensor& rays_kept) {
    const Inputs in = inputs(colors, truth, weights, ray_index, rays_per_pixel, rays_kept);
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
    const Inputs in = inputs(colors, truth, weights, ray_index, rays_per_pixel, rays_kept);
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
    m.impl("color_error", TORCH_BOX(&ColorErrorOps::color_error));
    m.impl("color_error_backward", TORCH_BOX(&ColorErrorOps::color_error_backward));
  }

 private:
  struct Inputs {
    Tensor colors, truth;
    OptionalTensor weights, ray_index, rays_kept;
    int64_t rays_per_pixel;

    template <typename T>
    ColorErrors<T> errors() const {
      return {data_of(colors), data_of(truth), data_of(weights), data_of(ray_index), data_of(rays_kept),
              colors.size(0),  truth.size(0),  rays_per_pixel,   weights.has_value()};
    }
  };

  static Inputs inputs(const Tensor& colors, const Tensor& truth, const OptionalTensor& weights,
                       const OptionalTensor& ray_index, int64_t rays_per_pixel, const OptionalTensor& rays_kept) {
    const ScalarType dtype = opmath_type(colors);
    check_tensor("colors", colors, {kAny, 3}, dtype, colors);
    const int64_t rows = colors.size(0);
    Inputs in{as_contiguous(colors),
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
