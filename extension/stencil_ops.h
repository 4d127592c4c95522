// Host side of the six stencil ops, written once: allocate, pick types, and hand over to a backend's three kernels
//   Backend::gather<scalar_t, Weights>(source, points, directions, out, n, channels, locator)      out (n, C)
//   Backend::scatter<scalar_t, Weights>(values, points, directions, out, n, channels, locator)     out += weights *
//   values Backend::point_gradient<scalar_t, Weights>(values, source, points, directions, out, n, channels, locator)
//   out (n, 3)
#pragma once

#include "tensors.h"

namespace voxelfield {

template <typename Backend>
struct StencilOps {
  // The Python wrappers explain bad input; these keep direct calls of the raw ops from touching foreign memory.
  static void check_points(const Tensor& like, const Tensor& points, const std::optional<Tensor>& direction) {
    const ScalarType dtype = like.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    const auto fits = [&](const Tensor& x) {
      return x.dim() == 2 && x.size(1) == 3 && x.scalar_type() == dtype && x.is_cuda() == like.is_cuda() &&
             x.get_device_index() == like.get_device_index();
    };
    STD_TORCH_CHECK(fits(points), "points must be (N, 3), of the grid's device, float32 (float64 for float64 grids)");
    STD_TORCH_CHECK(!direction.has_value() || (fits(*direction) && direction->size(0) == points.size(0)),
                    "direction must match points");
  }

  static void check_values(const Tensor& values, const Tensor& points, const Tensor& like, int64_t channels) {
    STD_TORCH_CHECK(values.dim() == 2 && values.size(0) == points.size(0) && values.size(1) == channels &&
                        values.scalar_type() == like.scalar_type() && values.is_cuda() == like.is_cuda(),
                    "values must be (N, C), of the grid's dtype and device");
  }

  template <typename MakeLocator>
  static Tensor gather(const Tensor& source, const Tensor& points, const std::optional<Tensor>& direction,
                       int64_t channels, const MakeLocator& locator) {
    check_points(source, points, direction);
    const typename Backend::Guard guard(source);
    const Tensor s = as_contiguous(source), p = as_contiguous(points);
    const auto d = as_contiguous(direction);
    const int64_t n = p.size(0);
    Tensor out = new_empty(s, {n, channels}, s.scalar_type());
    if (n == 0 || channels == 0) return out;
    dispatch_floating(s.scalar_type(), "gather", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      dispatch_weights<T>(d.has_value(), [&](auto tag) {
        Backend::template gather<scalar_t, typename decltype(tag)::type>(
            s.const_data_ptr<scalar_t>(), p.const_data_ptr<T>(), data_or_null<T>(d), out.mutable_data_ptr<scalar_t>(),
            n, channels, locator(zero));
      });
    });
    return out;
  }

  template <typename MakeLocator>
  static Tensor scatter(const Tensor& values, const Tensor& points, const std::optional<Tensor>& direction,
                        std::vector<int64_t> shape, const MakeLocator& locator) {
    check_points(values, points, direction);
    check_values(values, points, values, shape.back());
    const typename Backend::Guard guard(values);
    const Tensor v = as_contiguous(values), p = as_contiguous(points);
    const auto d = as_contiguous(direction);
    const int64_t n = p.size(0), channels = v.size(1);
    return dispatch_floating(v.scalar_type(), "scatter", [&](auto zero) -> Tensor {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      using Locator = decltype(locator(zero));
      // Shared vertices sum many small terms: 16-bit grids accumulate in float32. Exclusive cells are written once.
      using accumulate_t = std::conditional_t<Locator::kExclusiveCells, scalar_t, T>;
      constexpr ScalarType wide = scalar_type_of<T>();
      const ScalarType dtype = Locator::kExclusiveCells ? v.scalar_type() : wide;
      Tensor out = Locator::kExclusiveCells ? new_empty(v, shape, dtype) : new_zeros(v, shape, dtype);
      if (n > 0 && channels > 0 && out.numel() > 0) {
        dispatch_weights<T>(d.has_value(), [&](auto tag) {
          Backend::template scatter<scalar_t, typename decltype(tag)::type>(
              v.const_data_ptr<scalar_t>(), p.const_data_ptr<T>(), data_or_null<T>(d),
              out.mutable_data_ptr<accumulate_t>(), n, channels, locator(zero));
        });
      }
      return dtype == v.scalar_type() ? out : torch::stable::to(out, v.scalar_type());
    });
  }

  template <typename MakeLocator>
  static Tensor point_gradient(const Tensor& values, const Tensor& source, const Tensor& points,
                               const std::optional<Tensor>& direction, const MakeLocator& locator) {
    check_points(source, points, direction);
    check_values(values, points, source, source.size(source.dim() - 1));
    const typename Backend::Guard guard(source);
    const Tensor v = as_contiguous(values), s = as_contiguous(source), p = as_contiguous(points);
    const auto d = as_contiguous(direction);
    const int64_t n = p.size(0), channels = v.size(1);
    Tensor out = new_empty(p, {n, 3}, p.scalar_type());
    if (n == 0) return out;
    dispatch_floating(s.scalar_type(), "point_gradient", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      dispatch_weights<T>(d.has_value(), [&](auto tag) {
        Backend::template point_gradient<scalar_t, typename decltype(tag)::type>(
            v.const_data_ptr<scalar_t>(), s.const_data_ptr<scalar_t>(), p.const_data_ptr<T>(), data_or_null<T>(d),
            out.mutable_data_ptr<T>(), n, channels, locator(zero));
      });
    });
    return out;
  }

  static Tensor sample_trilinear(const Tensor& grid, const Tensor& points, const std::optional<Tensor>& direction,
                                 int64_t padding) {
    check_grid(grid);
    return gather(grid, points, direction, grid.size(3), grid_locator_of(grid.sizes().data(), grid.size(3), padding));
  }

  static Tensor splat_trilinear(const Tensor& values, const Tensor& points, const std::optional<Tensor>& direction,
                                std::vector<int64_t> resolution, int64_t padding) {
    STD_TORCH_CHECK(values.dim() == 2 && resolution.size() == 3, "values must be (N, C), resolution three numbers");
    const int64_t channels = values.size(1);
    return scatter(values, points, direction, {resolution[0], resolution[1], resolution[2], channels},
                   grid_locator_of(resolution.data(), channels, padding));
  }

  static Tensor point_gradient_trilinear(const Tensor& values, const Tensor& grid, const Tensor& points,
                                         const std::optional<Tensor>& direction, int64_t padding) {
    check_grid(grid);
    return point_gradient(values, grid, points, direction, grid_locator_of(grid.sizes().data(), grid.size(3), padding));
  }

  static Tensor interpolate_cells(const Tensor& feats, const Tensor& points, const std::optional<Tensor>& direction) {
    check_cells(feats, points);
    return gather(feats, points, direction, feats.size(2), cell_locator_of(feats.size(2)));
  }

  static Tensor splat_cells(const Tensor& values, const Tensor& points, const std::optional<Tensor>& direction) {
    return scatter(values, points, direction, {values.size(0), kCorners, values.size(1)},
                   cell_locator_of(values.size(1)));
  }

  static Tensor point_gradient_cells(const Tensor& values, const Tensor& feats, const Tensor& points,
                                     const std::optional<Tensor>& direction) {
    check_cells(feats, points);
    return point_gradient(values, feats, points, direction, cell_locator_of(feats.size(2)));
  }

 private:
  static void check_grid(const Tensor& grid) {
    STD_TORCH_CHECK(grid.dim() == 4 && grid.size(0) > 0 && grid.size(1) > 0 && grid.size(2) > 0,
                    "grid must be (X, Y, Z, C) with at least one vertex along each axis");
  }

  static void check_cells(const Tensor& feats, const Tensor& points) {
    STD_TORCH_CHECK(feats.dim() == 3 && feats.size(1) == kCorners && feats.size(0) == points.size(0),
                    "feats must be (N, 8, C) with the N of points");
  }

  static auto grid_locator_of(const int64_t* resolution, int64_t channels, int64_t padding) {
    return [=](auto zero) { return grid_locator<opmath_t<decltype(zero)>>(resolution, channels, padding); };
  }

  static auto cell_locator_of(int64_t channels) {
    return [=](auto zero) { return CellLocator<opmath_t<decltype(zero)>>{channels}; };
  }
};

}  // namespace voxelfield
