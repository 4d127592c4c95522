// Host side of the stencil ops, written once: checks, allocates, picks types and calls a backend's kernels. Rows of
// values and output hold the channels of all levels; with weights of several sets, the sets follow one another.
//   Backend::gather(weights, levels, points, out)
//   Backend::point_gradient(weights, levels, values, points, out)                                      out (n, 3)
//   Backend::splat(weights, levels, shapes, values, points, method)                                -> the levels' sums
//   Backend::accumulate<scalar_t>(levels, values, points)                                   adds to the levels' data
//   Backend::write_cells(weights, levels, values, points)                            each corner belongs to one point
// `weights` is a Tag of the corner weights.
//
// Without points or without channels every op returns zeros of the right shape (or adds nothing) and runs no kernel, so
// backends see at least one point and one channel. The Python wrappers explain bad input; the checks here keep direct
// calls of the raw ops from touching foreign memory.
#pragma once

#include "common/checks.h"
#include "common/constants.h"
#include "common/tensors.h"
#include "stencil/trilinear.h"

namespace voxelfield {

// Carries a type, that of the corner weights.
template <typename T>
struct Tag {};

template <typename Backend>
struct StencilOps {
  using Shapes = std::vector<std::vector<int64_t>>;
  using Direction = std::optional<Tensor>;

  static Tensor sample_trilinear(const std::vector<Tensor>& grids, const Tensor& points, const Direction& direction,
                                 int64_t padding, bool align_corners, bool nearest, bool sum, bool with_gradient) {
    const Grids source = checked_grids(grids, {padding, align_corners, nearest, sum});
    const Points at = checked_points(grids[0], points, direction, with_gradient, source.batch);
    return gather(source, at, with_gradient);
  }

  static std::vector<Tensor> splat_trilinear(const Tensor& values, const Tensor& points, const Direction& direction,
                                             std::vector<int64_t> sizes, int64_t padding, bool align_corners,
                                             bool nearest, bool sum, bool with_gradient, int64_t method) {
    STD_TORCH_CHECK(method >= 0 && method <= 4, "method must be 0 to 4, got ", method);
    STD_TORCH_CHECK(!sizes.empty() && sizes.size() % 4 == 0, "sizes must be X, Y, Z, C of each level, got ",
                    sizes.size(), " numbers");
    STD_TORCH_CHECK(points.dim() == 2 || points.dim() == 3, "points must be (N, 3) or (B, N, 3), got ", points.dim(),
                    " dimensions");
    const auto batch = points.dim() == 3 ? std::optional<int64_t>(points.size(0)) : std::nullopt;
    Shapes shapes;
    for (size_t i = 0; i < sizes.size(); i += 4) {
      shapes.push_back({batch.value_or(1), sizes[i], sizes[i + 1], sizes[i + 2], sizes[i + 3]});
    }
    const Grids target(shapes, {padding, align_corners, nearest, sum}, batch);
    const Points at = checked_points(values, points, direction, with_gradient, batch);
    const Tensor v = checked_values(values, at, values, with_gradient, target.columns);
    const typename Backend::Guard guard(values);
    std::vector<Tensor> sums;
    if (v.numel() == 0) {
      for (const auto& shape : shapes) sums.push_back(new_zeros(v, shape, v.scalar_type()));
    } else {
      dispatch(v, "splat", at, with_gradient, [&](auto zero, auto weights) {
        using scalar_t = decltype(zero);
        sums = Backend::splat(weights, target.template levels<scalar_t>(at), shapes, v, at.view(zero),
                              static_cast<SplatMethod>(method));
      });
    }
    for (Tensor& grid : sums) grid = batch.has_value() ? grid : without_leading(grid);
    return sums;
  }

  static void accumulate_trilinear(std::vector<Tensor> sums, const Tensor& values, const Tensor& points,
                                   int64_t padding, bool align_corners, bool nearest) {
    const Grids target = checked_grids(sums, {padding, align_corners, nearest, false});
    const Points at = checked_points(values, points, std::nullopt, false, target.batch);
    const Tensor v = checked_values(values, at, values, false, target.columns);
    for (const Tensor& sum : sums) check_contiguous("sums", sum, shape_of(sum), opmath_type(values), values);
    const typename Backend::Guard guard(values);
    if (v.numel() == 0) return;
    dispatch_floating(v.scalar_type(), "accumulate", [&](auto zero) {
      using scalar_t = decltype(zero);
      Backend::template accumulate<scalar_t>(target.template levels<opmath_t<scalar_t>>(at), v, at.view(zero));
    });
  }

  static Tensor point_gradient_trilinear(const Tensor& values, const std::vector<Tensor>& grids, const Tensor& points,
                                         const Direction& direction, int64_t padding, bool align_corners, bool nearest,
                                         bool sum, bool with_gradient) {
    const Grids source = checked_grids(grids, {padding, align_corners, nearest, sum});
    const Points at = checked_points(grids[0], points, direction, with_gradient, source.batch);
    return point_gradient(values, source, at, with_gradient);
  }

  static Tensor interpolate_cells(const Tensor& feats, const Tensor& points, const Direction& direction) {
    const Cells source = checked_cells(feats, points);
    return gather(source, checked_points(feats, points, direction), std::false_type{});
  }

  static Tensor splat_cells(const Tensor& values, const Tensor& points, const Direction& direction) {
    const Points at = checked_points(values, points, direction);
    STD_TORCH_CHECK(values.dim() == 2, "values must be (N, C), got ", values.dim(), " dimensions");
    const int64_t channels = values.size(1);
    const Tensor v = checked_values(values, at, values, false, channels);
    const typename Backend::Guard guard(values);
    const Cells target{{new_empty(v, {v.size(0), kCorners, channels}, v.scalar_type())}, channels};
    if (v.numel() == 0) return target.data[0];
    dispatch(v, "splat_cells", at, std::false_type{}, [&](auto zero, auto weights) {
      using scalar_t = decltype(zero);
      Backend::write_cells(weights, target.template levels<scalar_t>(at), v.template const_data_ptr<scalar_t>(),
                           at.view(zero));
    });
    return target.data[0];
  }

  static Tensor point_gradient_cells(const Tensor& values, const Tensor& feats, const Tensor& points,
                                     const Direction& direction) {
    const Cells source = checked_cells(feats, points);
    return point_gradient(values, source, checked_points(feats, points, direction), std::false_type{});
  }

  static void implement_gather(Library& m) {
    m.impl("sample_trilinear", TORCH_BOX(&sample_trilinear));
    m.impl("interpolate_cells", TORCH_BOX(&interpolate_cells));
    m.impl("point_gradient_trilinear", TORCH_BOX(&point_gradient_trilinear));
    m.impl("point_gradient_cells", TORCH_BOX(&point_gradient_cells));
  }

  static void implement_splat(Library& m) {
    m.impl("splat_trilinear", TORCH_BOX(&splat_trilinear));
    m.impl("accumulate_trilinear", TORCH_BOX(&accumulate_trilinear));
    m.impl("splat_cells", TORCH_BOX(&splat_cells));
  }

 private:
  // How a grid is read between and beyond its vertices.
  struct Lookup {
    int64_t padding;
    bool align_corners;
    bool nearest;
    bool sum;
  };

  // Contiguous: (B, N, 3) for grids in a batch of B, (N, 3) for one grid and for cells.
  struct Points {
    Tensor points;
    Direction direction;

    template <typename scalar_t>
    auto view(scalar_t /*zero*/) const {
      using T = opmath_t<scalar_t>;
      return PointsView<T>{points.template const_data_ptr<T>(), voxelfield::data_of(direction), points.numel() / 3};
    }

    // The shape of values at the points: as many rows of `columns`, four times over with the derivatives.
    std::vector<int64_t> rows(bool with_gradient, int64_t columns) const {
      std::vector<int64_t> shape = shape_of(points);
      shape.back() = columns;
      if (with_gradient) shape.insert(shape.begin(), 4);
      return shape;
    }
  };

  template <typename element_t>
  static element_t* data_of(const Tensor& x) {
    if constexpr (std::is_const_v<element_t>) {
      return x.const_data_ptr<std::remove_const_t<element_t>>();
    } else {
      return x.mutable_data_ptr<element_t>();
    }
  }

  struct Grids {
    Shapes shapes;  // (B, X, Y, Z, C)
    Lookup lookup;
    std::optional<int64_t> batch;  // B, if the tensors have that dimension
    std::vector<Tensor> data;      // contiguous; none for sums that are not allocated yet
    int64_t columns = 0;

    Grids(Shapes all, const Lookup& lookup, std::optional<int64_t> batch)
        : shapes(std::move(all)), lookup(lookup), batch(batch) {
      STD_TORCH_CHECK(lookup.padding >= 0 && lookup.padding <= 2, "padding must be 0, 1 or 2, got ", lookup.padding);
      STD_TORCH_CHECK(shapes.size() <= kMaxLevels, "grids must be 1 to ", kMaxLevels, " tensors, got ", shapes.size());
      const int64_t grids = shapes[0][0], channels = shapes[0][4];
      for (const auto& shape : shapes) {
        for (int axis = 1; axis < 4; ++axis) {
          STD_TORCH_CHECK(shape[axis] > 0 && shape[axis] <= (int64_t{1} << 30),
                          "grids must have 1 to 2^30 vertices along each axis, got ", shape[axis]);
        }
        STD_TORCH_CHECK(shape[0] == grids, "grids must have one batch size, got ", grids, " and ", shape[0]);
        STD_TORCH_CHECK(shape[4] >= 0 && (!lookup.sum || shape[4] == channels),
                        "grids must have one number of channels to be added, got ", channels, " and ", shape[4]);
        columns = lookup.sum ? channels : columns + shape[4];
      }
    }

    // Levels without channels have no memory: where there is memory, they are left out.
    template <typename element_t>
    auto levels(const Points& at) const {
      using T = opmath_t<std::remove_const_t<element_t>>;
      Levels<GridLocator<T>, element_t> levels{};
      levels.sum = lookup.sum;
      levels.columns = columns;
      int64_t column = 0;
      for (size_t i = 0; i < shapes.size(); ++i) {
        const auto& shape = shapes[i];
        if (shape[4] == 0 && !data.empty()) continue;
        auto& level = levels.level[levels.count++];
        level = {{{},
                  static_cast<Padding>(lookup.padding),
                  shape[4],
                  shape[0] > 1 ? at.points.size(1) : 0,
                  lookup.align_corners,
                  lookup.nearest},
                 data.empty() ? nullptr : data_of<element_t>(data[i]),
                 column};
        for (int axis = 0; axis < 3; ++axis) level.locator.resolution[axis] = static_cast<int32_t>(shape[1 + axis]);
        if (!lookup.sum) column += shape[4];
      }
      return levels;
    }
  };

  struct Cells {
    std::vector<Tensor> data;  // one, (N, 8, C), contiguous
    int64_t columns;

    template <typename element_t>
    auto levels(const Points& /*at*/) const {
      using T = opmath_t<std::remove_const_t<element_t>>;
      return Levels<CellLocator<T>, element_t>{{{{columns}, data_of<element_t>(data[0]), 0}}, 1, false, columns};
    }
  };

  // Calls f(scalar_t{}, Tag<Weights>{}). `with_gradient` is a bool, or std::false_type where there is no such choice.
  template <typename WithGradient, typename F>
  static void dispatch(const Tensor& like, const char* name, const Points& at, WithGradient with_gradient, const F& f) {
    dispatch_floating(like.scalar_type(), name, [&](auto zero) {
      using T = opmath_t<decltype(zero)>;
      if constexpr (std::is_same_v<WithGradient, bool>) {
        if (with_gradient) return f(zero, Tag<JetWeights<T>>{});
      }
      at.direction.has_value() ? f(zero, Tag<DirectionalWeights<T>>{}) : f(zero, Tag<ValueWeights<T>>{});
    });
  }

  template <typename Source, typename WithGradient>
  static Tensor gather(const Source& source, const Points& at, WithGradient with_gradient) {
    const Tensor& like = source.data[0];
    const typename Backend::Guard guard(like);
    Tensor out = new_empty(like, at.rows(with_gradient, source.columns), like.scalar_type());
    if (out.numel() == 0) return out;
    dispatch(like, "gather", at, with_gradient, [&](auto zero, auto weights) {
      using scalar_t = decltype(zero);
      Backend::gather(weights, source.template levels<const scalar_t>(at), at.view(zero),
                      out.mutable_data_ptr<scalar_t>());
    });
    return out;
  }

  template <typename Source, typename WithGradient>
  static Tensor point_gradient(const Tensor& values, const Source& source, const Points& at,
                               WithGradient with_gradient) {
    const Tensor& like = source.data[0];
    const Tensor v = checked_values(values, at, like, with_gradient, source.columns);
    const typename Backend::Guard guard(like);
    const ScalarType dtype = at.points.scalar_type();
    if (v.numel() == 0) return new_zeros(at.points, shape_of(at.points), dtype);
    Tensor out = new_empty(at.points, shape_of(at.points), dtype);
    dispatch(like, "point_gradient", at, with_gradient, [&](auto zero, auto weights) {
      using scalar_t = decltype(zero);
      Backend::point_gradient(weights, source.template levels<const scalar_t>(at),
                              v.template const_data_ptr<scalar_t>(), at.view(zero),
                              out.mutable_data_ptr<opmath_t<scalar_t>>());
    });
    return out;
  }

  static Points checked_points(const Tensor& like, const Tensor& points, const Direction& direction,
                               bool with_gradient = false, std::optional<int64_t> batch = std::nullopt) {
    std::vector<int64_t> shape{kAny, 3};
    if (batch.has_value()) shape.insert(shape.begin(), *batch);
    check_tensor("points", points, shape, opmath_type(like), like);
    if (direction.has_value()) {
      check_tensor("direction", *direction, shape_of(points), opmath_type(like), like);
      STD_TORCH_CHECK(!with_gradient, "direction must be None with with_gradient, got a tensor");
    }
    return {as_contiguous(points), as_contiguous(direction)};
  }

  static Tensor checked_values(const Tensor& values, const Points& at, const Tensor& like, bool with_gradient,
                               int64_t columns) {
    check_tensor("values", values, at.rows(with_gradient, columns), like.scalar_type(), like);
    return as_contiguous(values);
  }

  // Grids in a batch have five dimensions, and other grids have four.
  static Grids checked_grids(const std::vector<Tensor>& grids, const Lookup& lookup) {
    STD_TORCH_CHECK(!grids.empty(), "grids must be 1 to ", kMaxLevels, " tensors, got 0");
    const bool batched = grids[0].dim() == 5;
    Shapes shapes;
    for (const Tensor& grid : grids) {
      check_tensor("grids", grid, std::vector<int64_t>(batched ? 5 : 4, kAny), grids[0].scalar_type(), grids[0]);
      shapes.push_back(shape_of(grid));
      if (!batched) shapes.back().insert(shapes.back().begin(), 1);
    }
    const auto batch = batched ? std::optional<int64_t>(grids[0].size(0)) : std::nullopt;
    Grids checked(std::move(shapes), lookup, batch);
    for (const Tensor& grid : grids) checked.data.push_back(as_contiguous(grid));
    return checked;
  }

  static Cells checked_cells(const Tensor& feats, const Tensor& points) {
    check_tensor("feats", feats, {points.dim() > 0 ? points.size(0) : kAny, kCorners, kAny}, feats.scalar_type(),
                 feats);
    return {{as_contiguous(feats)}, feats.size(2)};
  }
};

}  // namespace voxelfield
