// Host side of the stencil ops for both backends: checks, allocates, selects types, and calls the kernels of a backend.
// Rows of values and output hold the channels of all levels. If the weights have several sets, the rows of the sets
// follow one another.
//   Backend::gather(levels, points, out)
//   Backend::point_gradient(levels, values, points, out)                                               out (n, 3)
//   Backend::splat(levels, shapes, values, points, method)                                         -> the levels' sums
//   Backend::accumulate<scalar_t>(levels, values, points)                                   adds to the levels' data
//   Backend::write_cells(levels, values, points)                                     each corner belongs to one point
//
// Without points or without channels, every op returns zeros of the right shape, or adds nothing, and runs no kernel.
// Backends can therefore rely on at least one point and one channel.
#pragma once

#include <cmath>

#include "common/checks.h"
#include "stencil/trilinear.h"

namespace voxelfield {

// Maps positions (N, 3) to coordinates of the unit cube of a box, and to their distances to the box, if wanted.
template <typename T>
struct ToUnit {
  const T *points, *aabb;
  T *in_cube, *distance;  // the distance is 0 for a position that is not finite

  VOXELFIELD_HOST_DEVICE void operator()(int64_t i) const {
    T squared = 0;
    bool finite = true;
    for (int axis = 0; axis < 3; ++axis) {
      const T at = points[3 * i + axis], low = aabb[axis], high = aabb[3 + axis];
      in_cube[3 * i + axis] = (at - low) / (high - low);
      const T beyond = at < low ? at - low : (at > high ? at - high : T(0));
      squared += beyond * beyond;
      finite = finite && at - at == T(0);
    }
    if (distance != nullptr) distance[i] = finite ? std::sqrt(squared) : T(0);
  }
};

// Copies the channels of the vertex nearest to each point.
template <typename element_t>
struct CopyNearest {
  Level<GridLocator<float>, const element_t> level;
  const float* points;
  element_t* out;
  int64_t columns;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t i) const {
    const Stencil<float> s = level.locator(points, i);
    element_t* const row = out + i * columns + level.column;
    for (int64_t c = 0; c < level.locator.channels; ++c) row[c] = s.empty ? element_t(0) : level.data[s.origin + c];
  }
};

template <typename Backend>
struct StencilOps {
  using Shapes = std::vector<std::vector<int64_t>>;

  static Tensor sample_trilinear(const std::vector<Tensor>& grids, const Tensor& points, int64_t padding,
                                 bool align_corners, bool nearest, bool sum, bool with_gradient) {
    const Grids source = checked_grids(grids, {padding, align_corners, nearest, sum});
    const Points at = checked_points(grids[0], points, with_gradient, source.points_shape());
    return is_integral(grids[0].scalar_type()) ? copy_nearest(source, at) : gather(source, at);
  }

  static TensorTuple<2> sample_in_box(const Tensor& grid, const Tensor& points, const Tensor& aabb, int64_t padding) {
    const Grids source = checked_grids({grid}, {padding, true, false, false});
    const Tensor world = checked_points(grid, points, false, source.points_shape()).points;
    const Tensor box = checked("aabb", aabb, {2, 3}, world.scalar_type(), grid);
    const typename Backend::Guard guard(grid);
    const Points at{new_like(world, shape_of(world)), false};
    to_unit(world, box, at.points, std::nullopt);
    return {gather(source, at), at.points};
  }

  static TensorTuple<2> place_in_box(const Tensor& points, const Tensor& aabb) {
    const Tensor world = checked("points", points, {kAny, 3}, opmath_type(points), points);
    const Tensor box = checked("aabb", aabb, {2, 3}, world.scalar_type(), points);
    const typename Backend::Guard guard(points);
    const Tensor unit = new_like(world, shape_of(world)), distance = new_like(world, {world.size(0)});
    to_unit(world, box, unit, distance);
    return {unit, distance};
  }

  static std::vector<Tensor> splat_trilinear(const Tensor& values, const Tensor& points, std::vector<int64_t> sizes,
                                             int64_t padding, bool align_corners, bool nearest, bool sum,
                                             bool with_gradient, int64_t method) {
    STD_TORCH_CHECK(method >= 0 && method <= 3, "method must be 0 to 3, got ", method);
    STD_TORCH_CHECK(!sizes.empty() && sizes.size() % 4 == 0, "sizes must be X, Y, Z, C of each level, got ",
                    sizes.size(), " numbers");
    STD_TORCH_CHECK(points.dim() == 2 || points.dim() == 3, "points must be (N, 3) or (B, N, 3), got ", points.dim(),
                    " dimensions");
    Shapes shapes;
    for (auto size = sizes.begin(); size != sizes.end(); size += 4) {
      shapes.emplace_back(size, size + 4);
      if (points.dim() == 3) shapes.back().insert(shapes.back().begin(), points.size(0));
    }
    const Grids target(std::move(shapes), {padding, align_corners, nearest, sum});
    check_consecutive(target);
    const Points at = checked_points(values, points, with_gradient, target.points_shape());
    const Tensor v = checked_values(values, at, values, target.columns);
    const typename Backend::Guard guard(values);
    std::vector<Tensor> sums;
    if (v.numel() == 0) {
      for (const auto& shape : target.shapes) sums.push_back(new_zeros(v, shape, v.scalar_type()));
      return sums;
    }
    dispatch(v, "splat", at, [&](auto zero, const auto& view) {
      sums = Backend::splat(target.template levels<decltype(zero)>(at), target.shapes, v, view,
                            static_cast<SplatMethod>(method));
    });
    return sums;
  }

  static void accumulate_trilinear_(std::vector<Tensor> sums, const Tensor& values, const Tensor& points,
                                    int64_t padding, bool align_corners, bool nearest, std::vector<int64_t> slabs,
                                    int64_t column) {
    Grids target = checked_grids(sums, {padding, align_corners, nearest, false}, std::move(slabs));
    check_consecutive(target);
    const Points at = checked_points(values, points, false, target.points_shape());
    const Tensor v = checked_values(values, at, values, values.dim() > 0 ? values.size(-1) : any('C'));
    STD_TORCH_CHECK(column >= 0 && column <= v.size(-1) - target.columns, "values must have ", target.columns,
                    " columns from ", column, " on, got ", v.size(-1), " columns");
    if (target.columns == 0) return;
    target.first_column = column;
    target.columns = v.size(-1);
    for (const Tensor& sum : sums) contiguous_data("sums", sum, shape_of(sum), opmath_type(values), values);
    const typename Backend::Guard guard(values);
    if (v.numel() == 0) return;
    dispatch_floating(v.scalar_type(), "accumulate", [&](auto zero) {
      using T = opmath_t<decltype(zero)>;
      dispatch_flag(!target.slabs.empty(), [&](auto of_slabs) {
        Backend::template accumulate<decltype(zero)>(target.template levels<T, of_slabs.value>(at), v,
                                                     at.template view<T, 1>());
      });
    });
  }

  static Tensor point_gradient_trilinear(const Tensor& values, const std::vector<Tensor>& grids, const Tensor& points,
                                         int64_t padding, bool align_corners, bool nearest, bool sum,
                                         bool with_gradient) {
    const Grids source = checked_grids(grids, {padding, align_corners, nearest, sum});
    return point_gradient(values, source, checked_points(grids[0], points, with_gradient, source.points_shape()));
  }

  static Tensor interpolate_cells(const Tensor& feats, const Tensor& points, bool with_gradient) {
    const Cells source = checked_cells(feats);
    return gather(source, checked_points(feats, points, with_gradient, {feats.size(0), 3}));
  }

  static Tensor splat_cells(const Tensor& values, const Tensor& points, bool with_gradient) {
    const Points at = checked_points(values, points, with_gradient, {any('N'), 3});
    const int64_t channels = values.dim() > 0 ? values.size(-1) : any('C');
    const Tensor v = checked_values(values, at, values, channels);
    const typename Backend::Guard guard(values);
    const Cells target{{new_like(v, {at.points.size(0), kCorners, channels})}, channels};
    if (v.numel() == 0) return target.data[0];
    dispatch(v, "splat_cells", at, [&](auto zero, const auto& view) {
      using scalar_t = decltype(zero);
      Backend::write_cells(target.template levels<scalar_t>(at), v.template const_data_ptr<scalar_t>(), view);
    });
    return target.data[0];
  }

  static Tensor point_gradient_cells(const Tensor& values, const Tensor& feats, const Tensor& points,
                                     bool with_gradient) {
    const Cells source = checked_cells(feats);
    return point_gradient(values, source, checked_points(feats, points, with_gradient, {feats.size(0), 3}));
  }

  static void implement_gather(Library& m) {
    m.impl("sample_trilinear", TORCH_BOX(&sample_trilinear));
    m.impl("sample_in_box", TORCH_BOX(&sample_in_box));
    m.impl("place_in_box", TORCH_BOX(&place_in_box));
    m.impl("interpolate_cells", TORCH_BOX(&interpolate_cells));
    m.impl("point_gradient_trilinear", TORCH_BOX(&point_gradient_trilinear));
    m.impl("point_gradient_cells", TORCH_BOX(&point_gradient_cells));
  }

  static void implement_splat(Library& m) {
    m.impl("splat_trilinear", TORCH_BOX(&splat_trilinear));
    m.impl("accumulate_trilinear_", TORCH_BOX(&accumulate_trilinear_));
    m.impl("splat_cells", TORCH_BOX(&splat_cells));
  }

 private:
  static void to_unit(const Tensor& world, const Tensor& box, const Tensor& unit, const OptionalTensor& distance) {
    dispatch_opmath(world, [&](auto zero) {
      using T = decltype(zero);
      Backend::for_each(world.numel() / 3, ToUnit<T>{data_of(world), data_of(box), data_of(unit), data_of(distance)});
    });
  }

  // How a grid is interpolated between its vertices and extended beyond them.
  struct Lookup {
    int64_t padding;
    bool align_corners;
    bool nearest;
    bool sum;
  };

  // Contiguous. (B, N, 3) for a batch of B grids, and (N, 3) for one grid and for cells.
  struct Points {
    Tensor points;
    bool with_gradient;

    template <typename T, int Sets>
    auto view() const {
      return PointsView<T, Sets>{data_of(points), points.numel() / 3};
    }

    // The shape of values at the points: one row of `columns` per point, four times if derivatives are included.
    std::vector<int64_t> rows(int64_t columns) const {
      std::vector<int64_t> shape = shape_of(points);
      shape.back() = columns;
      if (with_gradient) shape.insert(shape.begin(), 4);
      return shape;
    }
  };

  // Grids in a batch have five dimensions, and other grids have four.
  struct Grids {
    Shapes shapes;
    Lookup lookup;
    std::optional<int64_t> batch;
    std::vector<Tensor> data;    // contiguous; empty for sums that are not allocated yet
    std::vector<bool> shared;    // whether all elements of the batch read the same memory, as for an expanded grid
    std::vector<int64_t> slabs;  // two numbers for each tensor that has only some planes; empty for whole grids
    int64_t columns = 0;         // length of a row of values
    int64_t first_column = 0;    // of the grids' values in a row

    Grids(Shapes all, const Lookup& lookup) : shapes(std::move(all)), lookup(lookup) {
      STD_TORCH_CHECK(lookup.padding >= 0 && lookup.padding <= 4, "padding must be 0 to 4, got ", lookup.padding);
      const int64_t smallest = lookup.padding == static_cast<int64_t>(Padding::kPeriodicClosed) ? 2 : 1;
      STD_TORCH_CHECK(shapes.size() <= kMaxLevels, "grids must be 1 to ", kMaxLevels, " tensors, got ", shapes.size());
      if (shapes[0].size() == 5) batch = shapes[0][0];
      const int64_t channels = shapes[0].back();
      for (size_t i = 0; i < shapes.size(); ++i) {
        const auto& shape = shapes[i];
        check_vertices(name_of(i, shapes.size()), shape.end() - 4, shape.end() - 1, shape, smallest);
        STD_TORCH_CHECK(shape.back() >= 0 && (!lookup.sum || shape.back() == channels), name_of(i, shapes.size()),
                        " must have ", channels, " channels to be added to the first grid, got ", shape.back());
        columns = lookup.sum ? channels : columns + shape.back();
      }
    }

    // A single grid may be the argument `grid` of a public function.
    static std::string name_of(size_t i, size_t count) {
      return count == 1 ? "grid" : "grids[" + std::to_string(i) + "]";
    }

    std::vector<int64_t> points_shape() const {
      std::vector<int64_t> shape{any('N'), 3};
      if (batch.has_value()) shape.insert(shape.begin(), *batch);
      return shape;
    }

    // Levels without channels or planes have no memory, so they are omitted if memory has been allocated.
    template <typename element_t, bool kSlabs = false>
    auto levels(const Points& at) const {
      using T = opmath_t<std::remove_const_t<element_t>>;
      Levels<std::conditional_t<kSlabs, SlabLocator<T>, GridLocator<T>>, element_t> levels(columns, lookup.sum);
      int64_t column = first_column;
      for (size_t i = 0; i < shapes.size(); ++i) {
        const int64_t channels = shapes[i].back(), level_column = column;
        if (!lookup.sum) column += channels;
        if (!data.empty() && data[i].numel() == 0) continue;
        const bool one_grid = batch.value_or(1) <= 1 || (!shared.empty() && shared[i]);
        GridLocator<T> locator{{},
                               static_cast<Padding>(lookup.padding),
                               channels,
                               one_grid ? 0 : at.points.size(1),
                               lookup.align_corners,
                               lookup.nearest};
        std::copy_n(shapes[i].end() - 4, 3, locator.resolution);
        const TensorData values{data.empty() ? nullptr : &data[i]};
        if constexpr (kSlabs) {
          const Planes slab{static_cast<int32_t>(slabs[2 * i]), static_cast<int32_t>(data[i].size(0))};
          levels.add({{locator, slab}, values, level_column});
        } else {
          levels.add({locator, values, level_column});
        }
      }
      return levels;
    }
  };

  struct Cells {
    std::vector<Tensor> data;  // a single tensor (N, 8, C), contiguous
    int64_t columns;

    template <typename element_t>
    auto levels(const Points& /*at*/) const {
      Levels<CellLocator<opmath_t<std::remove_const_t<element_t>>>, element_t> levels(columns);
      levels.add({{columns}, data_of(data[0]), 0});
      return levels;
    }
  };

  // Calls f with a scalar_t{} and the points with the number of their sets of weights.
  template <typename F>
  static void dispatch(const Tensor& like, const char* name, const Points& at, const F& f) {
    dispatch_floating(like.scalar_type(), name, [&](auto zero) {
      using T = opmath_t<decltype(zero)>;
      at.with_gradient ? f(zero, at.template view<T, 4>()) : f(zero, at.template view<T, 1>());
    });
  }

  template <typename Source>
  static Tensor gather(const Source& source, const Points& at) {
    const Tensor& like = source.data[0];
    const typename Backend::Guard guard(like);
    Tensor out = new_like(like, at.rows(source.columns));
    dispatch(like, "gather", at, [&](auto zero, const auto& view) {
      using scalar_t = decltype(zero);
      if (out.numel() == 0) return;
      Backend::gather(source.template levels<const scalar_t>(at), view, out.mutable_data_ptr<scalar_t>());
    });
    return out;
  }

  // Integers can be copied only: from the nearest vertex, or zero where there is none.
  static Tensor copy_nearest(const Grids& source, const Points& at) {
    STD_TORCH_CHECK(!at.with_gradient, "with_gradient must be False for grids of integers, got True");
    const Tensor& like = source.data[0];
    const typename Backend::Guard guard(like);
    Tensor out = new_like(like, at.rows(source.columns));
    if (out.numel() == 0) return out;
    dispatch_integral(like.scalar_type(), [&](auto zero) {
      using element_t = decltype(zero);
      for (const auto& level : source.template levels<const element_t>(at)) {
        Backend::for_each(at.points.numel() / 3,
                          CopyNearest<element_t>{level, data_of(at.points), data_of(out), source.columns});
      }
    });
    return out;
  }

  template <typename Source>
  static Tensor point_gradient(const Tensor& values, const Source& source, const Points& at) {
    const Tensor& like = source.data[0];
    const Tensor v = checked_values(values, at, like, source.columns);
    const typename Backend::Guard guard(like);
    if (v.numel() == 0) return new_zeros(at.points, shape_of(at.points), at.points.scalar_type());
    Tensor out = new_like(at.points, shape_of(at.points));
    dispatch(like, "point_gradient", at, [&](auto zero, const auto& view) {
      using scalar_t = decltype(zero);
      Backend::point_gradient(source.template levels<const scalar_t>(at), v.template const_data_ptr<scalar_t>(), view,
                              out.mutable_data_ptr<opmath_t<scalar_t>>());
    });
    return out;
  }

  static Points checked_points(const Tensor& like, const Tensor& points, bool with_gradient,
                               const std::vector<int64_t>& shape) {
    return {checked("points", points, shape, opmath_type(like), like), with_gradient};
  }

  static Tensor checked_values(const Tensor& values, const Points& at, const Tensor& like, int64_t columns) {
    return checked("values", values, at.rows(columns), like.scalar_type(), like);
  }

  // With `slabs`, each tensor holds consecutive planes along x of a larger grid; two numbers for each tensor are its
  // first plane and the number of planes of the grid.
  static Grids checked_grids(const std::vector<Tensor>& grids, const Lookup& lookup, std::vector<int64_t> slabs = {}) {
    STD_TORCH_CHECK(!grids.empty(), "grids must be 1 to ", kMaxLevels, " tensors, got 0");
    const Tensor& first = grids[0];
    std::vector<int64_t> shape{any('X'), any('Y'), any('Z'), any('C')};
    if (first.dim() == 5) shape.insert(shape.begin(), any('B'));
    Shapes shapes;
    for (size_t i = 0; i < grids.size(); ++i) {
      const std::string name = Grids::name_of(i, grids.size());
      check_tensor(name.c_str(), grids[i], shape, first.scalar_type(), first, " as grids[0] is");
      if (i == 0) check_interpolable(name.c_str(), first, lookup);
      if (i == 0 && shape.size() == 5) shape[0] = first.size(0);
      shapes.push_back(shape_of(grids[i]));
    }
    if (!slabs.empty()) replace_planes(slabs, shapes);
    Grids checked(std::move(shapes), lookup);
    checked.slabs = std::move(slabs);
    for (const Tensor& grid : grids) {
      const bool shared = grid.dim() == 5 && grid.size(0) > 1 && grid.stride(0) == 0;
      checked.shared.push_back(shared);
      checked.data.push_back(as_contiguous(shared ? torch::stable::select(grid, 0, 0) : grid));
    }
    return checked;
  }

  static void check_interpolable(const char* name, const Tensor& grid, const Lookup& lookup) {
    if (!is_integral(grid.scalar_type())) return check_floating(name, grid);
    VOXELFIELD_CHECK_TYPE(
        lookup.nearest && !lookup.sum, name, " must be float32, float64, float16 or bfloat16 to be interpolated, got ",
        dtype_name(grid.scalar_type()), ": convert it with .float(), or keep integers with mode='nearest'");
  }

  // The sums of cells that lie across the end of a period are not supported.
  static void check_consecutive(const Grids& target) {
    STD_TORCH_CHECK(target.lookup.padding != static_cast<int64_t>(Padding::kPeriodic),
                    "padding must be 4 for sums of periodic grids, which need a further vertex along each axis, got 3");
  }

  static void replace_planes(const std::vector<int64_t>& slabs, Shapes& shapes) {
    STD_TORCH_CHECK(shapes[0].size() == 4, "slabs must be empty for a batch of grids, got ", slabs.size(), " numbers");
    STD_TORCH_CHECK(slabs.size() == 2 * shapes.size(), "slabs must be two numbers for each of ", shapes.size(),
                    " grids, got ", slabs.size());
    for (size_t i = 0; i < shapes.size(); ++i) {
      const int64_t first = slabs[2 * i], planes = slabs[2 * i + 1], count = shapes[i][0];
      STD_TORCH_CHECK(first >= 0 && planes >= count && first <= planes - count,
                      "slabs must lie within their grids, got ", count, " planes from ", first, " of ", planes);
      shapes[i][0] = planes;
    }
  }

  static Cells checked_cells(const Tensor& feats) {
    check_floating("feats", feats);
    return {{checked("feats", feats, {any('N'), kCorners, any('C')}, feats.scalar_type(), feats)}, feats.size(2)};
  }
};

}  // namespace voxelfield
