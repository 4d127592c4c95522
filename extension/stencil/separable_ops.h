// Host side of interpolation by separable kernels, for both backends: checks, allocates, selects types, and calls the
// kernels of a backend. Values are (N, C), or with `planar` grids (C, X, Y, Z) they are (C, N); batches have a leading
// dimension more, and results with derivatives one before that.
//   Backend::read<false, kSets>(job, values, data, points, out)                             samples; ignores `values`
//   Backend::read<true, kSets>(job, values, data, points, out)                  gradients of the points, out (n, D)
//   Backend::splat<kSets>(job, values, points, sums, scale)                       adds to zeros, or as whole numbers
//
// 16-bit numbers are converted first: kernels that read them would make the modules half as large again.
//
// Without points or without channels, every op returns zeros of the right shape and runs no kernel.
#pragma once

#include "common/checks.h"
#include "stencil/separable.h"

namespace voxelfield {

// The points of a call, in which grids they lie, and where their values and vertices are.
template <typename T, int D, int K>
struct SeparableJob {
  SeparableLocator<T, D, K> locator;
  ValueLayout layout;
  int64_t channels;
  int64_t channel_stride;  // of vertices
  int64_t count;           // points
  int64_t grids;           // that differ

  // The number in its batch of the grid that a point reads.
  VOXELFIELD_HOST_DEVICE int64_t grid_of(int64_t point) const {
    return layout.points_per_grid < count ? quotient(point, layout.points_per_grid) : 0;
  }
};

// Turns sums of whole numbers back into sums.
template <typename T>
struct FromWhole {
  const int64_t* whole;
  const double* scale;
  T* out;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t i) const {
    out[i] = static_cast<T>(static_cast<double>(whole[i]) / *scale);
  }
};

// Returns the sums to which add(zero, sums, per_one) adds, as numbers of the type of `zero` and of `like`, float32 or
// float64. Backends that add in any order are given a `scale`, if there is one, and then add whole numbers, of which
// that many make one, so that sums are exact.
template <typename Backend, typename F>
Tensor sum_exactly(const Tensor& like, const std::vector<int64_t>& shape, const OptionalTensor& scale, const F& add) {
  const bool whole = scale.has_value() && Backend::kAddsInAnyOrder;
  const double* const per_one = whole ? number_data("scale", *scale, ScalarType::Double, like) : TensorData{nullptr};
  Tensor sums = new_zeros(like, shape, whole ? ScalarType::Long : like.scalar_type());
  dispatch_opmath(like, [&](auto zero) {
    add(zero, sums.mutable_data_ptr(), per_one);
    if (!whole) return;
    Tensor real = new_like(like, shape);
    Backend::for_each(real.numel(), FromWhole<decltype(zero)>{data_of(sums), per_one, data_of(real)});
    sums = real;
  });
  return sums;
}

template <typename Backend>
struct SeparableOps {
  static Tensor sample_separable(const Tensor& grid, const Tensor& points, int64_t kernel, int64_t padding,
                                 bool align_corners, bool planar, bool normalized, bool with_gradient) {
    return read<false>(grid, grid, points, {points, kernel, padding, align_corners, planar, normalized, with_gradient});
  }

  static Tensor point_gradient_separable(const Tensor& values, const Tensor& grid, const Tensor& points, int64_t kernel,
                                         int64_t padding, bool align_corners, bool planar, bool normalized,
                                         bool with_gradient) {
    return read<true>(values, grid, points,
                      {points, kernel, padding, align_corners, planar, normalized, with_gradient});
  }

  static Tensor splat_separable(const Tensor& values, const Tensor& points, std::vector<int64_t> size, int64_t kernel,
                                int64_t padding, bool align_corners, bool planar, bool normalized, bool with_gradient,
                                const OptionalTensor& scale) {
    check_floating("values", values);
    const Lookup lookup(points, kernel, padding, align_corners, planar, normalized, with_gradient);
    STD_TORCH_CHECK(static_cast<int64_t>(size.size()) == lookup.dims, "size must be ", lookup.dims,
                    " numbers, one for each coordinate of points, got ", size.size());
    const int64_t channel_axis = values.dim() - (planar ? 2 : 1);
    STD_TORCH_CHECK(channel_axis >= 0, "values must be (N, C), got ", values.dim(), " dimensions");
    const Source target(lookup, std::move(size), values.size(channel_axis), points);
    const Tensor at = checked_points(lookup, points, target, values);
    const Tensor given =
        checked("values", values, lookup.values_shape(at, target.channels), values.scalar_type(), values);
    const typename Backend::Guard guard(values);
    if (given.numel() == 0) return new_zeros(values, target.shape, values.scalar_type());
    const Tensor wide = converted(given, opmath_type(given));
    const auto add = [&](auto zero, void* sums, const double* per_one) {
      using T = decltype(zero);
      dispatch_job<T>(lookup, target, at, [&](const auto& job, auto sets, const auto* positions) {
        Backend::template splat<sets.value>(job, wide.template const_data_ptr<T>(), positions, sums, per_one);
      });
    };
    return converted(sum_exactly<Backend>(wide, target.shape, scale, add), values.scalar_type());
  }

  static void implement(Library& m) {
    m.impl("sample_separable", TORCH_BOX(&sample_separable));
    m.impl("splat_separable", TORCH_BOX(&splat_separable));
    m.impl("point_gradient_separable", TORCH_BOX(&point_gradient_separable));
  }

 private:
  struct Lookup {
    int64_t dims;
    Kernel kernel;
    Padding padding;
    bool align_corners, planar, normalized, with_gradient;
    bool batched;

    Lookup(const Tensor& points, int64_t kernel, int64_t padding, bool align_corners, bool planar, bool normalized,
           bool with_gradient)
        : dims(points.dim() > 0 ? points.size(-1) : 0),
          kernel(static_cast<Kernel>(kernel)),
          padding(static_cast<Padding>(padding)),
          align_corners(align_corners),
          planar(planar),
          normalized(normalized),
          with_gradient(with_gradient),
          batched(points.dim() == 3) {
      STD_TORCH_CHECK(points.dim() == 2 || points.dim() == 3, "points must be (N, D) or (B, N, D), got ", points.dim(),
                      " dimensions");
      STD_TORCH_CHECK(dims >= 1 && dims <= 3, "points must have 1 to 3 coordinates, got ", dims);
      STD_TORCH_CHECK(kernel >= 0 && kernel <= 3, "kernel must be 0 to 3, got ", kernel);
      STD_TORCH_CHECK(dims < 3 || kernel >= 2, "kernel must be 2 or 3 along three axes, got ", kernel);
      STD_TORCH_CHECK(padding >= 0 && padding <= 3, "padding must be 0 to 3, got ", padding);
    }

    std::vector<int64_t> values_shape(const Tensor& points, int64_t channels) const {
      std::vector<int64_t> shape = shape_of(points);
      shape.back() = channels;
      if (planar) std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
      if (with_gradient) shape.insert(shape.begin(), 1 + dims);
      return shape;
    }
  };

  // Vertices to read, or the shape of sums.
  struct Source {
    std::vector<int64_t> shape, size;
    int64_t channels, grids;
    bool shared = false;  // all elements of the batch read the same memory
    Tensor data;

    Source(const Lookup& lookup, const Tensor& grid) : shape(shape_of(grid)) {
      const int64_t batched = lookup.batched ? 1 : 0;
      STD_TORCH_CHECK(grid.dim() == batched + lookup.dims + 1, "grid must have ", batched + lookup.dims + 1,
                      " dimensions for points of ", lookup.dims, " coordinates", lookup.batched ? " in a batch" : "",
                      ", got shape ", describe(shape));
      const auto first = shape.begin() + batched + (lookup.planar ? 1 : 0);
      size.assign(first, first + lookup.dims);
      channels = lookup.planar ? shape[batched] : shape.back();
      check_vertices("grid", size.begin(), size.end(), shape);
      grids = lookup.batched ? shape[0] : 1;
      shared = lookup.batched && grid.size(0) > 1 && grid.stride(0) == 0;
      data = as_contiguous(shared ? torch::stable::select(grid, 0, 0) : grid);
    }

    Source(const Lookup& lookup, std::vector<int64_t> sizes, int64_t channels, const Tensor& points)
        : shape(sizes), size(std::move(sizes)), channels(channels), grids(lookup.batched ? points.size(0) : 1) {
      shape.insert(lookup.planar ? shape.begin() : shape.end(), channels);
      if (lookup.batched) shape.insert(shape.begin(), grids);
      check_vertices("grid", size.begin(), size.end(), shape);
    }
  };

  static Tensor checked_points(const Lookup& lookup, const Tensor& points, const Source& source, const Tensor& like) {
    std::vector<int64_t> shape{any('N'), lookup.dims};
    if (lookup.batched) shape.insert(shape.begin(), source.grids);
    return checked("points", points, shape, opmath_type(like), like);
  }

  static Tensor converted(const Tensor& x, ScalarType dtype) {
    return x.scalar_type() == dtype ? x : torch::stable::to(x, dtype);
  }

  template <bool kGradient>
  static Tensor read(const Tensor& values, const Tensor& grid, const Tensor& points, const Lookup& lookup) {
    check_floating("grid", grid);
    const Source source(lookup, grid);
    const Tensor at = checked_points(lookup, points, source, grid);
    const std::vector<int64_t> rows = lookup.values_shape(at, source.channels), shape = kGradient ? shape_of(at) : rows;
    const Tensor given = kGradient ? checked("values", values, rows, grid.scalar_type(), grid) : grid;
    const ScalarType dtype = kGradient ? at.scalar_type() : grid.scalar_type();
    const typename Backend::Guard guard(grid);
    Tensor out = new_empty(grid, shape, opmath_type(grid));
    const bool constant = kGradient && (given.numel() == 0 || lookup.kernel == Kernel::kNearest);
    if (constant || out.numel() == 0) return new_zeros(grid, shape, dtype);
    const Tensor data = converted(source.data, opmath_type(grid));
    const Tensor wide = kGradient ? converted(given, opmath_type(grid)) : data;
    dispatch_opmath(out, [&](auto zero) {
      using T = decltype(zero);
      dispatch_job<T>(lookup, source, at, [&](const auto& job, auto sets, const auto* positions) {
        Backend::template read<kGradient, sets.value>(job, wide.template const_data_ptr<T>(),
                                                      data.template const_data_ptr<T>(), positions,
                                                      out.mutable_data_ptr<T>());
      });
    });
    return converted(out, dtype);
  }

  // Calls f(job, sets, points) with a job for the number of axes and of vertices along each, and the number of sets of
  // weights.
  template <typename T, typename F>
  static void dispatch_job(const Lookup& lookup, const Source& source, const Tensor& at, const F& f) {
    dispatch_value<1, 2, 3>(lookup.dims, [&](auto dims) {
      constexpr int kDims = decltype(dims)::value;
      const auto with_taps = [&](auto taps) {
        const auto job = make_job<T, kDims, decltype(taps)::value>(lookup, source, at);
        if (lookup.with_gradient) {
          f(job, std::integral_constant<int, 1 + kDims>{}, at.template const_data_ptr<T>());
        } else {
          f(job, std::integral_constant<int, 1>{}, at.template const_data_ptr<T>());
        }
      };
      if constexpr (kDims < 3) {
        if (lookup.kernel == Kernel::kNearest) return with_taps(std::integral_constant<int, 1>{});
        if (lookup.kernel == Kernel::kLinear) return with_taps(std::integral_constant<int, 2>{});
      }
      with_taps(std::integral_constant<int, 4>{});
    });
  }

  template <typename T, int D, int K>
  static SeparableJob<T, D, K> make_job(const Lookup& lookup, const Source& source, const Tensor& at) {
    SeparableJob<T, D, K> job;
    SeparableLocator<T, D, K>& locator = job.locator;
    int64_t vertices = 1;
    for (int axis = D - 1; axis >= 0; --axis) {
      const int64_t size = source.size[axis];
      locator.resolution[axis] = static_cast<int32_t>(size);
      locator.stride[axis] = vertices * (lookup.planar ? 1 : source.channels);
      vertices *= size;
      locator.rise[axis] = T(lookup.align_corners ? size - 1 : size) / (lookup.normalized ? 2 : 1);
      locator.shift[axis] = lookup.align_corners ? T(0) : T(-0.5);
    }
    locator.lead = lookup.normalized ? T(1) : T(0);
    job.count = at.numel() / D;
    job.grids = source.shared ? 1 : source.grids;
    locator.grid_stride = job.grids > 1 ? vertices * source.channels : 0;
    locator.kernel = cubic_kernel<T>(lookup.kernel);
    locator.padding = lookup.padding;
    locator.align_corners = lookup.align_corners;
    locator.reversed = lookup.normalized;
    job.channels = source.channels;
    job.channel_stride = lookup.planar ? vertices : 1;
    const int64_t rows = job.count / source.grids;
    job.layout = {rows, rows * job.channels, lookup.planar ? 1 : job.channels, lookup.planar ? rows : 1,
                  job.count * job.channels};
    return job;
  }
};

}  // namespace voxelfield
