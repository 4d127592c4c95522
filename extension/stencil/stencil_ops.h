// Host side of the stencil ops, written once: checks, allocates, picks types and calls a backend's kernels. Rows of
// values and output hold the channels of all levels; with weights of several sets, the sets follow one another.
//   Backend::gather<scalar_t, Weights>(levels, points, directions, out, n)
//   Backend::point_gradient<scalar_t, Weights>(levels, values, points, directions, out, n)             out (n, 3)
//   Backend::splat<scalar_t, Weights>(levels, shapes, values, points, directions, n, method)       -> the levels' sums
//   Backend::accumulate<scalar_t>(levels, shapes, values, points, n)                        adds to the levels' data
//   Backend::write_cells<scalar_t, Weights>(levels, values, points, directions, n)     each corner belongs to one point
//
// Without points or without channels every op returns zeros of the right shape (or adds nothing) and runs no kernel, so
// backends see at least one point and one channel. The Python wrappers explain bad input; the checks here keep direct
// calls of the raw ops from touching foreign memory.
#pragma once

#include "common/checks.h"
#include "common/tensors.h"
#include "stencil/trilinear.h"

namespace voxelfield {

// Calls f with a tag that carries the type of the corner weights.
template <typename T>
struct Tag {
  using type = T;
};

template <typename T, typename F>
void dispatch_weights(bool directional, std::false_type /*with_gradient*/, const F& f) {
  if (directional) {
    f(Tag<DirectionalWeights<T>>{});
  } else {
    f(Tag<ValueWeights<T>>{});
  }
}

template <typename T, typename F>
void dispatch_weights(bool directional, bool with_gradient, const F& f) {
  if (with_gradient) return f(Tag<JetWeights<T>>{});
  dispatch_weights<T>(directional, std::false_type{}, f);
}

template <typename Backend>
struct StencilOps {
  using Shapes = std::vector<std::vector<int64_t>>;

  // How a grid is read between and beyond its vertices.
  struct Lookup {
    int64_t padding;
    bool align_corners;
    bool nearest;
    bool sum;
  };

  static Tensor sample_trilinear(const std::vector<Tensor>& grids, const Tensor& points,
                                 const std::optional<Tensor>& direction, int64_t padding, bool align_corners,
                                 bool nearest, bool sum, bool with_gradient) {
    const Lookup lookup{padding, align_corners, nearest, sum};
    const Shapes shapes = shapes_of(grids, sum);
    check_points(grids[0], points, direction, with_gradient, batch_of(grids[0]));
    const typename Backend::Guard guard(points);
    const std::vector<Tensor> sources = all_contiguous(grids);
    return gather(sources, points, direction, with_gradient, columns_of(shapes, sum), [&](auto zero) {
      return grid_levels<const decltype(zero)>(shapes, lookup, points_per_grid(points));
    });
  }

  static std::vector<Tensor> splat_trilinear(const Tensor& values, const Tensor& points,
                                             const std::optional<Tensor>& direction, std::vector<int64_t> sizes,
                                             int64_t padding, bool align_corners, bool nearest, bool sum,
                                             bool with_gradient, int64_t method) {
    const Lookup lookup{padding, align_corners, nearest, sum};
    STD_TORCH_CHECK(method >= 0 && method <= 4, "method must be 0 to 4, got ", method);
    STD_TORCH_CHECK(!sizes.empty() && sizes.size() % 4 == 0, "sizes must be X, Y, Z, C of each level, got ",
                    sizes.size(), " numbers");
    STD_TORCH_CHECK(points.dim() == 2 || points.dim() == 3, "points must be (N, 3) or (B, N, 3), got ", points.dim(),
                    " dimensions");
    const bool batched = points.dim() == 3;
    const int64_t batch = batched ? points.size(0) : 1;
    Shapes shapes;
    for (size_t i = 0; i < sizes.size(); i += 4) {
      shapes.push_back({batch, sizes[i], sizes[i + 1], sizes[i + 2], sizes[i + 3]});
    }
    check_shapes(shapes, sum);
    check_points(values, points, direction, with_gradient, batched ? std::optional<int64_t>(batch) : std::nullopt);
    check_values(values, points, values, with_gradient, columns_of(shapes, sum));
    const typename Backend::Guard guard(values);
    const Tensor v = as_contiguous(values), p = as_contiguous(points);
    const auto d = as_contiguous(direction);
    const int64_t n = p.numel() / 3;
    if (v.numel() == 0) {
      std::vector<Tensor> zeros;
      for (const auto& shape : shapes) zeros.push_back(new_zeros(v, shape, v.scalar_type()));
      return batched ? zeros : without_batch(zeros);
    }
    std::vector<Tensor> sums;
    dispatch_floating(v.scalar_type(), "splat", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      dispatch_weights<T>(d.has_value(), with_gradient, [&](auto tag) {
        sums = Backend::template splat<scalar_t, typename decltype(tag)::type>(
            grid_levels<scalar_t>(shapes, lookup, points_per_grid(p)), shapes, v, p.const_data_ptr<T>(),
            data_or_null<T>(d), n, static_cast<SplatMethod>(method));
      });
    });
    return batched ? sums : without_batch(sums);
  }

  static void accumulate_trilinear(std::vector<Tensor> sums, const Tensor& values, const Tensor& points,
                                   int64_t padding, bool align_corners, bool nearest) {
    const Shapes shapes = shapes_of(sums, false);
    check_points(values, points, std::nullopt, false, batch_of(sums[0]));
    check_values(values, points, values, false, columns_of(shapes, false));
    for (const Tensor& sum : sums) {
      STD_TORCH_CHECK(same_device(sum, values), "sums must be on the device of values, got another device");
      STD_TORCH_CHECK(sum.is_contiguous(), "sums must be contiguous, got a strided tensor");
      STD_TORCH_CHECK(sum.scalar_type() == opmath_type(values),
                      "sums must be float32 (float64 for float64 values), got ",
                      torch::headeronly::toString(sum.scalar_type()));
    }
    const typename Backend::Guard guard(values);
    const Tensor v = as_contiguous(values), p = as_contiguous(points);
    const int64_t n = p.numel() / 3;
    if (v.numel() == 0) return;
    dispatch_floating(v.scalar_type(), "accumulate", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      auto levels = grid_levels<T>(shapes, {padding, align_corners, nearest, false}, points_per_grid(p));
      for (int i = 0; i < levels.count; ++i) levels.level[i].data = sums[i].template mutable_data_ptr<T>();
      Backend::template accumulate<scalar_t>(levels, shapes, v, p.const_data_ptr<T>(), n);
    });
  }

  static Tensor point_gradient_trilinear(const Tensor& values, const std::vector<Tensor>& grids, const Tensor& points,
                                         const std::optional<Tensor>& direction, int64_t padding, bool align_corners,
                                         bool nearest, bool sum, bool with_gradient) {
    const Lookup lookup{padding, align_corners, nearest, sum};
    const Shapes shapes = shapes_of(grids, sum);
    check_points(grids[0], points, direction, with_gradient, batch_of(grids[0]));
    check_values(values, points, grids[0], with_gradient, columns_of(shapes, sum));
    const typename Backend::Guard guard(points);
    const std::vector<Tensor> sources = all_contiguous(grids);
    return point_gradient(values, sources, points, direction, with_gradient, [&](auto zero) {
      return grid_levels<const decltype(zero)>(shapes, lookup, points_per_grid(points));
    });
  }

  static Tensor interpolate_cells(const Tensor& feats, const Tensor& points, const std::optional<Tensor>& direction) {
    check_cells(feats, points);
    check_points(feats, points, direction, false, std::nullopt);
    const typename Backend::Guard guard(feats);
    return gather({as_contiguous(feats)}, points, direction, std::false_type{}, feats.size(2),
                  [&](auto zero) { return cell_levels<const decltype(zero)>(feats.size(2)); });
  }

  static Tensor splat_cells(const Tensor& values, const Tensor& points, const std::optional<Tensor>& direction) {
    check_points(values, points, direction, false, std::nullopt);
    STD_TORCH_CHECK(values.dim() == 2, "values must be (N, C), got ", values.dim(), " dimensions");
    check_values(values, points, values, false, values.size(1));
    const typename Backend::Guard guard(values);
    const Tensor v = as_contiguous(values), p = as_contiguous(points);
    const auto d = as_contiguous(direction);
    const int64_t n = v.size(0), channels = v.size(1);
    Tensor out = new_empty(v, {n, kCorners, channels}, v.scalar_type());
    if (v.numel() == 0) return out;
    dispatch_floating(v.scalar_type(), "splat_cells", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      auto levels = cell_levels<scalar_t>(channels);
      levels.level[0].data = out.mutable_data_ptr<scalar_t>();
      dispatch_weights<T>(d.has_value(), std::false_type{}, [&](auto tag) {
        Backend::template write_cells<scalar_t, typename decltype(tag)::type>(
            levels, v.const_data_ptr<scalar_t>(), p.const_data_ptr<T>(), data_or_null<T>(d), n);
      });
    });
    return out;
  }

  static Tensor point_gradient_cells(const Tensor& values, const Tensor& feats, const Tensor& points,
                                     const std::optional<Tensor>& direction) {
    check_cells(feats, points);
    check_points(feats, points, direction, false, std::nullopt);
    check_values(values, points, feats, false, feats.size(2));
    const typename Backend::Guard guard(feats);
    return point_gradient(values, {as_contiguous(feats)}, points, direction, std::false_type{},
                          [&](auto zero) { return cell_levels<const decltype(zero)>(feats.size(2)); });
  }

 private:
  // `with_gradient` is a bool, or std::false_type where there is no such choice.
  template <typename WithGradient, typename MakeLevels>
  static Tensor gather(const std::vector<Tensor>& sources, const Tensor& points, const std::optional<Tensor>& direction,
                       WithGradient with_gradient, int64_t columns, const MakeLevels& make_levels) {
    const Tensor p = as_contiguous(points);
    const auto d = as_contiguous(direction);
    Tensor out = new_empty(sources[0], rows_of(points, with_gradient, columns), sources[0].scalar_type());
    if (out.numel() == 0) return out;
    dispatch_floating(sources[0].scalar_type(), "gather", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      auto levels = make_levels(zero);
      attach(levels, sources);
      dispatch_weights<T>(d.has_value(), with_gradient, [&](auto tag) {
        Backend::template gather<scalar_t, typename decltype(tag)::type>(
            levels, p.const_data_ptr<T>(), data_or_null<T>(d), out.mutable_data_ptr<scalar_t>(), p.numel() / 3);
      });
    });
    return out;
  }

  template <typename WithGradient, typename MakeLevels>
  static Tensor point_gradient(const Tensor& values, const std::vector<Tensor>& sources, const Tensor& points,
                               const std::optional<Tensor>& direction, WithGradient with_gradient,
                               const MakeLevels& make_levels) {
    const Tensor v = as_contiguous(values), p = as_contiguous(points);
    const auto d = as_contiguous(direction);
    const auto sizes = p.sizes();
    const std::vector<int64_t> shape(sizes.begin(), sizes.end());
    if (v.numel() == 0) return new_zeros(p, shape, p.scalar_type());
    Tensor out = new_empty(p, shape, p.scalar_type());
    dispatch_floating(sources[0].scalar_type(), "point_gradient", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      auto levels = make_levels(zero);
      attach(levels, sources);
      dispatch_weights<T>(d.has_value(), with_gradient, [&](auto tag) {
        Backend::template point_gradient<scalar_t, typename decltype(tag)::type>(
            levels, v.const_data_ptr<scalar_t>(), p.const_data_ptr<T>(), data_or_null<T>(d), out.mutable_data_ptr<T>(),
            p.numel() / 3);
      });
    });
    return out;
  }

  // Points are (B, N, 3) for grids in a batch of B, and (N, 3) for one grid and for cells.
  static void check_points(const Tensor& like, const Tensor& points, const std::optional<Tensor>& direction,
                           bool with_gradient, std::optional<int64_t> batch) {
    const auto check = [&](const char* name, const Tensor& x, int64_t count) {
      if (batch.has_value()) {
        check_tensor(name, x, {*batch, count, 3}, opmath_type(like), like);
      } else {
        check_tensor(name, x, {count, 3}, opmath_type(like), like);
      }
    };
    check("points", points, kAny);
    if (!direction.has_value()) return;
    check("direction", *direction, points_per_grid(points));
    STD_TORCH_CHECK(!with_gradient, "direction must be None with with_gradient, got a tensor");
  }

  // Values have a row of all channels for each point, or four of them with_gradient.
  static void check_values(const Tensor& values, const Tensor& points, const Tensor& like, bool with_gradient,
                           int64_t columns) {
    const std::vector<int64_t> shape = rows_of(points, with_gradient, columns);
    const auto sizes = values.sizes();
    STD_TORCH_CHECK(std::vector<int64_t>(sizes.begin(), sizes.end()) == shape &&
                        values.scalar_type() == like.scalar_type() && same_device(values, points),
                    "values must be ", describe(shape, like.scalar_type(), points), ", got ",
                    describe(sizes, values.scalar_type(), values));
  }

  static void check_shapes(const Shapes& shapes, bool sum) {
    STD_TORCH_CHECK(!shapes.empty() && shapes.size() <= kMaxLevels, "grids must be 1 to ", kMaxLevels, " tensors, got ",
                    shapes.size());
    for (const auto& shape : shapes) {
      for (int axis = 1; axis < 4; ++axis) {
        STD_TORCH_CHECK(shape[axis] > 0 && shape[axis] <= (int64_t{1} << 30),
                        "grids must have 1 to 2^30 vertices along each axis, got ", shape[axis]);
      }
      STD_TORCH_CHECK(shape[0] == shapes[0][0], "grids must have one batch size, got ", shapes[0][0], " and ",
                      shape[0]);
      STD_TORCH_CHECK(shape[4] >= 0 && (!sum || shape[4] == shapes[0][4]),
                      "grids must have one number of channels to be added, got ", shapes[0][4], " and ", shape[4]);
    }
  }

  static Shapes shapes_of(const std::vector<Tensor>& grids, bool sum) {
    Shapes shapes;
    for (const Tensor& grid : grids) {
      if (grids[0].dim() == 4) {
        check_tensor("grids", grid, {kAny, kAny, kAny, kAny}, grids[0].scalar_type(), grids[0]);
      } else {
        check_tensor("grids", grid, {kAny, kAny, kAny, kAny, kAny}, grids[0].scalar_type(), grids[0]);
      }
      const auto sizes = grid.sizes();
      shapes.emplace_back(sizes.begin(), sizes.end());
      if (sizes.size() == 4) shapes.back().insert(shapes.back().begin(), 1);
    }
    check_shapes(shapes, sum);
    return shapes;
  }

  // The batch size that points of a grid must have, if the grid has a batch dimension.
  static std::optional<int64_t> batch_of(const Tensor& grid) {
    return grid.dim() == 5 ? std::optional<int64_t>(grid.size(0)) : std::nullopt;
  }

  static int64_t points_per_grid(const Tensor& points) { return points.size(points.dim() - 2); }

  // The shape of values at points: as many rows of `columns`, four times over with the derivatives.
  static std::vector<int64_t> rows_of(const Tensor& points, bool with_gradient, int64_t columns) {
    const auto sizes = points.sizes();
    std::vector<int64_t> shape;
    shape.reserve(4);
    if (with_gradient) shape.push_back(4);
    shape.insert(shape.end(), sizes.begin(), sizes.end() - 1);
    shape.push_back(columns);
    return shape;
  }

  // Drops the batch dimension of sums (1, X, Y, Z, C).
  static std::vector<Tensor> without_batch(std::vector<Tensor>& sums) {
    std::vector<Tensor> result;
    result.reserve(sums.size());
    for (Tensor& sum : sums) result.push_back(without_leading(sum));
    return result;
  }

  static void check_cells(const Tensor& feats, const Tensor& points) {
    check_tensor("feats", feats, {points.dim() > 0 ? points.size(0) : kAny, kCorners, kAny}, feats.scalar_type(),
                 feats);
  }

  static std::vector<Tensor> all_contiguous(const std::vector<Tensor>& tensors) {
    std::vector<Tensor> result;
    for (const Tensor& tensor : tensors) result.push_back(as_contiguous(tensor));
    return result;
  }

  static int64_t columns_of(const Shapes& shapes, bool sum) {
    if (sum) return shapes[0][4];
    int64_t columns = 0;
    for (const auto& shape : shapes) columns += shape[4];
    return columns;
  }

  template <typename element_t, typename T = opmath_t<std::remove_const_t<element_t>>>
  static Levels<GridLocator<T>, element_t> grid_levels(const Shapes& shapes, const Lookup& lookup,
                                                       int64_t points_per_grid) {
    STD_TORCH_CHECK(lookup.padding >= 0 && lookup.padding <= 2, "padding must be 0, 1 or 2, got ", lookup.padding);
    Levels<GridLocator<T>, element_t> levels{};
    levels.count = static_cast<int>(shapes.size());
    levels.sum = lookup.sum;
    levels.columns = columns_of(shapes, lookup.sum);
    int64_t column = 0;
    for (int i = 0; i < levels.count; ++i) {
      const auto& shape = shapes[i];
      auto& locator = levels.level[i].locator;
      for (int axis = 0; axis < 3; ++axis) locator.resolution[axis] = static_cast<int32_t>(shape[1 + axis]);
      locator.padding = static_cast<Padding>(lookup.padding);
      locator.channels = shape[4];
      locator.points_per_grid = shape[0] > 1 ? points_per_grid : 0;
      locator.align_corners = lookup.align_corners;
      locator.nearest = lookup.nearest;
      levels.level[i].column = column;
      if (!lookup.sum) column += shape[4];
    }
    return levels;
  }

  template <typename element_t, typename T = opmath_t<std::remove_const_t<element_t>>>
  static Levels<CellLocator<T>, element_t> cell_levels(int64_t channels) {
    Levels<CellLocator<T>, element_t> levels{};
    levels.count = 1;
    levels.columns = channels;
    levels.level[0].locator = {channels};
    return levels;
  }

  // Levels without channels have no memory and are left out.
  template <typename Locator, typename scalar_t>
  static void attach(Levels<Locator, const scalar_t>& levels, const std::vector<Tensor>& sources) {
    int kept = 0;
    for (int i = 0; i < levels.count; ++i) {
      if (levels.level[i].locator.channels == 0) continue;
      levels.level[kept] = levels.level[i];
      levels.level[kept++].data = sources[i].template const_data_ptr<scalar_t>();
    }
    levels.count = kept;
  }
};

}  // namespace voxelfield
