// Integrals of grids along rays, their adjoint and derivatives, and first crossings of a level: formulas, and the host
// side for both backends. Rays are (N, 3) for one grid, or (B, N, 3) for a batch. All numbers are float32 or float64.
//   Backend::for_each(n, formula)
//   Backend::backproject(rays, values, sums, scale, like)                   adds to zeros, or as whole numbers
#pragma once

#include "common/checks.h"
#include "lines/line.h"
#include "stencil/separable_ops.h"

namespace voxelfield {

template <typename T, int Width>
struct alignas(sizeof(T) * Width) Channels {
  T lane[Width];
};

// Some channels of a ray's integrals.
template <typename T, int Width, bool kLabelled>
struct IntegrateRays {
  RayBundle<T> rays;
  const T* grid;
  T* out;  // (count, labels, channels); zeros, if there are labels

  struct Vertex {
    Channels<T, Width> value;
    int64_t label;
  };

  VOXELFIELD_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t blocks = rays.channels / Width, ray = rays.ray_in(i / blocks), channel = i % blocks * Width;
    if (ray < 0) return;
    const T* const data = grid + rays.grid_of(ray) * rays.vertices() * rays.channels + channel;
    T* const row = out + rays.row(ray, 0) + channel;
    Channels<T, Width> sum{};
    int64_t current = -1;
    const auto finish = [&](int64_t label) {
      VOXELFIELD_UNROLL
      for (int c = 0; c < Width; ++c) {
        if (current >= 0) row[current * rays.channels + c] += sum.lane[c];
        sum.lane[c] = T(0);
      }
      current = label;
    };
    // Labels are found by the number of a vertex. Without them, offsets need no multiplication.
    const auto load = [&](int64_t at) {
      return Vertex{*reinterpret_cast<const Channels<T, Width>*>(data + (kLabelled ? at * rays.channels : at)),
                    kLabelled ? rays.label_of(at) : 0};
    };
    Line<T> line(rays, ray, kLabelled ? 1 : rays.channels);
    CornerValues<Vertex> corners;
    line.walk([&] { corners.load_all(line, load); },
              [&](T from, T to) {
                T weight[kCorners] = {};
                line.add_weights(from, to, weight);
                VOXELFIELD_UNROLL
                for (int corner = 0; corner < kCorners; ++corner) {
                  const Vertex& vertex = corners.at[corner];
                  if (kLabelled && vertex.label != current) finish(vertex.label);
                  VOXELFIELD_UNROLL
                  for (int c = 0; c < Width; ++c) sum.lane[c] += weight[corner] * vertex.value.lane[c];
                }
                return true;
              },
              [&](int axis) { corners.follow(line, axis, load); });
    if (kLabelled) {
      finish(-1);
    } else {
      *reinterpret_cast<Channels<T, Width>*>(row) = sum;
    }
  }
};

// The derivatives of a ray's integrals, times values and summed over channels and labels; kSingle: there is one
// channel, and no labels.
template <typename T, bool kSingle>
struct LineGradient {
  RayBundle<T> rays;
  const T *values, *grid;
  T* out;  // (count, 8): of origin, direction, near and far

  VOXELFIELD_HOST_DEVICE void operator()(int64_t slot) const {
    const int64_t ray = rays.ray_in(slot);
    if (ray < 0) return;
    T* const row = out + 8 * ray;
    VOXELFIELD_UNROLL
    for (int i = 0; i < 8; ++i) row[i] = T(0);
    const T* const data = grid + rays.grid_of(ray) * rays.vertices() * rays.channels;
    const auto load = [&](int64_t vertex) {
      if (kSingle) return values[ray] * data[vertex];
      T sum = T(0);
      const int64_t label = rays.label_of(vertex);
      if (label < 0) return sum;
      const T *const factors = values + rays.row(ray, label), *const features = data + vertex * rays.channels;
      for (int64_t c = 0; c < rays.channels; ++c) sum += factors[c] * features[c];
      return sum;
    };
    Line<T> line(rays, ray);
    CornerValues<T> corners;
    // The integrals of the value, of its slopes, and of these times the distance; the values at both ends.
    T total = T(0), slopes[3] = {}, moments[3] = {}, slope[3], first = T(0), last = T(0);
    line.walk(
        [&] {
          corners.load_all(line, load);
          first = value_and_slopes(line.at(T(0)), corners.at, slope);
        },
        [&](T from, T to) {
          Line<T>::at_nodes(from, to, [&](T distance, T weight) {
            total += weight * value_and_slopes(line.at(distance), corners.at, slope);
            VOXELFIELD_UNROLL
            for (int axis = 0; axis < 3; ++axis) {
              slopes[axis] += weight * slope[axis];
              moments[axis] += weight * distance * slope[axis];
            }
          });
          if (!(to < line.length)) last = value_and_slopes(line.at(to), corners.at, slope);
          return true;
        },
        [&](int axis) { corners.follow(line, axis, load); });
    if (line.misses()) return;
    const T begin = line.begin / line.speed, end = (line.begin + line.length) / line.speed;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      // Where a face ends the line, its end moves along the ray with the ray.
      const T at_entry = line.entry == 1 << axis ? first / line.unit[axis] : T(0);
      const T at_exit = line.exit == 1 << axis ? last / line.unit[axis] : T(0);
      const T rise = line.rise[axis], inner = rise * slopes[axis];
      row[axis] = inner + at_entry - at_exit;
      row[3 + axis] = (rise * moments[axis] + line.unit[axis] * total) / line.speed + begin * (inner + at_entry);
      row[3 + axis] -= end * at_exit;
    }
    if (line.entry == 0) row[6] = -line.speed * first;
    if (line.exit == 0) row[7] = line.speed * last;
  }
};

// The first root in [0, 1] of a polynomial of degree 3 that is not zero at 0, or -1.
template <typename T>
VOXELFIELD_HOST_DEVICE T first_root(const T (&c)[4]) {
  const auto value = [&](T s) { return c[0] + s * (c[1] + s * (c[2] + s * c[3])); };
  // It is monotonic between the roots of its derivative.
  const T squares = c[2] * c[2] - T(3) * c[3] * c[1];
  const T q = -(c[2] + std::copysign(std::sqrt(squares > T(0) ? squares : T(0)), c[2]));
  const T one = q / (T(3) * c[3]), other = c[1] / q;
  const T first = squares > T(0) && one > T(0) && one < T(1) ? one : T(1);
  const T second = squares > T(0) && other > T(0) && other < T(1) ? other : T(1);
  const T ends[3] = {std::fmin(first, second), std::fmax(first, second), T(1)};
  T low = T(0), below = c[0];
  VOXELFIELD_UNROLL
  for (int i = 0; i < 3; ++i) {
    T high = ends[i];
    const T above = value(high);
    if ((below > T(0) && above <= T(0)) || (below < T(0) && above >= T(0))) {
      // Newton's steps, or halves where these leave the interval.
      T root = high;
      for (int step = 0; step < 60; ++step) {
        const T error = value(root);
        ((error > T(0)) == (below > T(0)) ? low : high) = root;
        T next = root - error / (c[1] + root * (T(2) * c[2] + root * T(3) * c[3]));
        if (!(next > low && next < high)) next = low + (high - low) * T(0.5);
        if (error == T(0) || next == root || next == low || next == high) break;
        root = next;
      }
      return root;
    }
    low = high;
    below = above;
  }
  return T(-1);
}

// Where a ray first meets a level of a grid of one channel.
template <typename T>
struct FirstCrossing {
  RayBundle<T> rays;
  const T* grid;
  T level;
  T* t;  // infinity if it does not
  bool* hit;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t slot) const {
    const int64_t ray = rays.ray_in(slot);
    if (ray < 0) return;
    const T* const data = grid + rays.grid_of(ray) * rays.vertices();
    const auto load = [&](int64_t vertex) { return data[vertex] - level; };
    Line<T> line(rays, ray);
    CornerValues<T> corners;
    T before = T(0), found = T(-1);  // the value so far, of which the sign matters
    line.walk([&] { corners.load_all(line, load); },
              [&](T from, T to) {
                bool above = true, below = true;
                VOXELFIELD_UNROLL
                for (int corner = 0; corner < kCorners; ++corner) {
                  above = above && corners.at[corner] > T(0);
                  below = below && corners.at[corner] < T(0);
                }
                // Most cells are on one side. In others, four values determine the polynomial.
                T f[4] = {above ? T(1) : T(-1), T(0), T(0), T(0)};
                f[3] = f[0];
                T root = T(-1), slope[3];
                if (!above && !below) {
                  VOXELFIELD_UNROLL
                  for (int i = 0; i < 4; ++i) {
                    f[i] = value_and_slopes(line.at(from + (to - from) * (T(i) / T(3))), corners.at, slope);
                  }
                  const T c1 = T(-5.5) * f[0] + T(9) * f[1] - T(4.5) * f[2] + f[3];
                  const T c2 = T(9) * f[0] - T(22.5) * f[1] + T(18) * f[2] - T(4.5) * f[3];
                  root = first_root({f[0], c1, c2, T(4.5) * (f[3] - f[0] + T(3) * (f[1] - f[2]))});
                }
                // Rounding may see a root at a face in neither of the cells beside it.
                if (f[0] == T(0) || f[0] * before < T(0)) root = T(0);
                if (root >= T(0)) found = from + root * (to - from);
                before = f[3];
                return !(root >= T(0));
              },
              [&](int axis) { corners.follow(line, axis, load); });
    hit[ray] = found >= T(0);
    t[ray] = hit[ray] ? (line.begin + found) / line.speed : T(INFINITY);
  }
};

template <typename Backend>
struct LineOps {
  static Tensor integrate_rays(const Tensor& grid, const Tensor& origins, const Tensor& directions,
                               const OptionalTensor& near, const OptionalTensor& far, int64_t columns,
                               const OptionalTensor& labels, int64_t label_count) {
    const Call call(shape_of(grid), grid, origins, directions, near, far, columns, labels, label_count);
    const Tensor data = as_contiguous(grid);
    const typename Backend::Guard guard(grid);
    Tensor out = labels.has_value() ? new_zeros(data, call.values, data.scalar_type()) : new_like(data, call.values);
    if (out.numel() == 0) return out;
    dispatch_opmath(data, [&](auto zero) {
      using T = decltype(zero);
      const RayBundle<T> rays = call.template bundle<T>();
      const T* const from = data_of(data);
      T* const to = data_of(out);
      constexpr int kWidest = std::is_same_v<T, float> ? 4 : 1;
      dispatch_vector_width<kWidest, 1>(vector_width(kWidest, {rays.channels}, from, to), [&](auto width) {
        dispatch_flag(labels.has_value(), [&](auto labelled) {
          Backend::for_each(rays.slots() * (rays.channels / width.value),
                            IntegrateRays<T, width.value, labelled.value>{rays, from, to});
        });
      });
    });
    return out;
  }

  static Tensor line_gradient(const Tensor& values, const Tensor& grid, const Tensor& origins, const Tensor& directions,
                              const OptionalTensor& near, const OptionalTensor& far, int64_t columns,
                              const OptionalTensor& labels, int64_t label_count) {
    const Call call(shape_of(grid), grid, origins, directions, near, far, columns, labels, label_count);
    const Tensor given = checked("values", values, call.values, grid.scalar_type(), grid), data = as_contiguous(grid);
    const typename Backend::Guard guard(grid);
    Tensor out = new_like(data, call.rows(8));
    dispatch_opmath(data, [&](auto zero) {
      using T = decltype(zero);
      const RayBundle<T> rays = call.template bundle<T>();
      dispatch_flag(rays.channels == 1 && !labels.has_value(), [&](auto single) {
        Backend::for_each(rays.slots(),
                          LineGradient<T, single.value>{rays, data_of(given), data_of(data), data_of(out)});
      });
    });
    return out;
  }

  static Tensor backproject_rays(const Tensor& values, const Tensor& origins, const Tensor& directions,
                                 const OptionalTensor& near, const OptionalTensor& far, int64_t columns,
                                 const OptionalTensor& labels, int64_t label_count, std::vector<int64_t> size,
                                 const OptionalTensor& scale) {
    size.push_back(values.dim() > 0 ? values.size(-1) : any('C'));
    if (origins.dim() == 3) size.insert(size.begin(), origins.size(0));
    const Call call(size, values, origins, directions, near, far, columns, labels, label_count);
    const Tensor given = checked("values", values, call.values, values.scalar_type(), values);
    const typename Backend::Guard guard(values);
    return sum_exactly<Backend>(values, size, scale, [&](auto zero, void* sums, const double* per_one) {
      using T = decltype(zero);
      const T* const from = data_of(given);
      if (given.numel() > 0) Backend::backproject(call.template bundle<T>(), from, sums, per_one, values);
    });
  }

  static std::tuple<Tensor, Tensor> first_crossing(const Tensor& grid, const Tensor& origins, const Tensor& directions,
                                                   const OptionalTensor& near, const OptionalTensor& far,
                                                   int64_t columns, double level) {
    const Call call(shape_of(grid), grid, origins, directions, near, far, columns, std::nullopt, 1);
    STD_TORCH_CHECK(grid.size(-1) == 1, "grid must have one channel, got ", grid.size(-1));
    const typename Backend::Guard guard(grid);
    const std::vector<int64_t> shape(call.values.begin(), call.values.end() - 1);
    const Tensor data = as_contiguous(grid);
    Tensor t = new_like(data, shape), hit = new_empty(data, shape, ScalarType::Bool);
    dispatch_opmath(data, [&](auto zero) {
      using T = decltype(zero);
      const RayBundle<T> rays = call.template bundle<T>();
      Backend::for_each(rays.slots(),
                        FirstCrossing<T>{rays, data_of(data), static_cast<T>(level), data_of(t), data_of(hit)});
    });
    return {t, hit};
  }

  static void implement(Library& m) {
    m.impl("integrate_rays", TORCH_BOX(&integrate_rays));
    m.impl("line_gradient", TORCH_BOX(&line_gradient));
    m.impl("backproject_rays", TORCH_BOX(&backproject_rays));
    m.impl("first_crossing", TORCH_BOX(&first_crossing));
  }

 private:
  // The arguments that all ops share, checked.
  struct Call {
    std::vector<int64_t> grid;    // shape
    std::vector<int64_t> values;  // shape of the values of rays
    Tensor origins, directions;
    OptionalTensor near, far, labels;
    int64_t columns, label_count;

    Call(std::vector<int64_t> grid, const Tensor& like, const Tensor& from, const Tensor& along,
         const OptionalTensor& first, const OptionalTensor& last, int64_t columns, const OptionalTensor& codes,
         int64_t label_count)
        : grid(std::move(grid)), columns(columns), label_count(label_count) {
      const ScalarType dtype = like.scalar_type();
      VOXELFIELD_CHECK_TYPE(dtype == ScalarType::Float || dtype == ScalarType::Double,
                            "grid must be float32 or float64, got ", dtype_name(dtype));
      const size_t axes = this->grid.size();
      STD_TORCH_CHECK(axes == 4 || axes == 5, "grid must have shape (X, Y, Z, C) or (B, X, Y, Z, C), got ",
                      describe(this->grid));
      const auto end = this->grid.end() - 1;
      check_vertices("grid", end - 3, end, this->grid);
      std::vector<int64_t> shape{any('N'), 3};
      if (axes == 5) shape.insert(shape.begin(), this->grid[0]);
      origins = checked("origins", from, shape, dtype, like);
      shape = shape_of(from);
      directions = checked("directions", along, shape, dtype, like);
      shape.pop_back();
      near = checked("near", first, shape, dtype, like);
      far = checked("far", last, shape, dtype, like);
      STD_TORCH_CHECK(columns > 0 && origins.numel() / 3 % columns == 0,
                      "columns must be positive and divide the number of rays, got ", columns);
      STD_TORCH_CHECK(label_count >= 0 && (codes.has_value() || label_count == 1),
                      "label_count must not be negative, and 1 without labels, got ", label_count);
      labels = checked("labels", codes, std::vector<int64_t>(end - 3, end), ScalarType::Int, like);
      values = rows(*end);
      if (labels.has_value()) values.insert(values.end() - 1, label_count);
    }

    std::vector<int64_t> rows(int64_t width) const {
      std::vector<int64_t> shape = shape_of(origins);
      shape.back() = width;
      return shape;
    }

    template <typename T>
    RayBundle<T> bundle() const {
      RayBundle<T> rays{data_of(origins), data_of(directions), data_of(near), data_of(far), data_of(labels)};
      rays.label_count = label_count;
      rays.channels = grid.back();
      rays.count = origins.numel() / 3;
      rays.rays_per_grid = grid.size() == 5 ? origins.size(1) : 0;
      rays.columns = columns;
      std::copy_n(grid.end() - 4, 3, rays.resolution);
      return rays;
    }
  };
};

}  // namespace voxelfield
