// Integrals of grids along rays, their adjoint and derivatives, and first crossings of a level: formulas, and the host
// side for both backends. Rays are (N, 3) for one grid, or (B, N, 3) for a batch. All numbers are float32 or float64.
//   Backend::for_each(n, formula)
//   Backend::backproject(job, sums, scale)                                  adds to zeros, or as whole numbers
#pragma once

#include "common/checks.h"
#include "lines/line.h"
#include "stencil/separable_ops.h"

namespace voxelfield {

template <typename T, int Width>
struct alignas(sizeof(T) * Width) Channels {
  T lane[Width];
};

// Which label each vertex (X, Y, Z) has. Without labels, all vertices have label 0.
struct LabelView {
  const int32_t* labels;  // or null
  int64_t count;

  // Returns whether a vertex has a label that counts, and sets `label` to it.
  VOXELFIELD_HOST_DEVICE bool find(int64_t vertex, int64_t& label) const {
    label = labels == nullptr ? 0 : labels[vertex];
    return label >= 0 && label < count;
  }
};

// Some channels of a ray's integrals, of one label or of each.
template <typename T, int Width, bool kLabelled>
struct IntegrateRays {
  RayBundle<T> rays;
  LabelView labels;
  int64_t channels;
  const T* grid;
  T* out;  // (count, labels, channels)

  struct Vertex {
    Channels<T, Width> value;
    int64_t label;  // -1 if it does not count
  };

  VOXELFIELD_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t blocks = channels / Width, ray = i / blocks, channel = i % blocks * Width;
    const T* const data = grid + rays.grid_of(ray) * rays.vertices() * channels + channel;
    T* const row = out + ray * labels.count * channels + channel;
    Channels<T, Width> sum{};
    Line<T> line(rays, ray);
    if (!line.misses()) {
      int64_t current = -1;
      const auto load = [&](int64_t vertex) {
        Vertex loaded{*reinterpret_cast<const Channels<T, Width>*>(data + vertex * channels), 0};
        if (kLabelled && !labels.find(vertex, loaded.label)) loaded.label = -1;
        return loaded;
      };
      CornerValues<Vertex> corners;
      corners.load_all(line, load);
      line.walk(
          [&](T from, T to) {
            T weight[kCorners] = {};
            line.add_weights(from, to, weight);
            VOXELFIELD_UNROLL
            for (int corner = 0; corner < kCorners; ++corner) {
              const Vertex& vertex = corners.at[corner];
              if (kLabelled && vertex.label < 0) continue;
              if (kLabelled && vertex.label != current) {
                add(row, current, sum);
                current = vertex.label;
              }
              VOXELFIELD_UNROLL
              for (int c = 0; c < Width; ++c) sum.lane[c] += weight[corner] * vertex.value.lane[c];
            }
            return true;
          },
          [&](int axis) { corners.follow(line, axis, load); });
      if (kLabelled) add(row, current, sum);
    }
    if (!kLabelled) *reinterpret_cast<Channels<T, Width>*>(row) = sum;
  }

 private:
  // Adds a sum to that of a label, and clears it. Sums of labels begin with zeros.
  VOXELFIELD_HOST_DEVICE void add(T* row, int64_t label, Channels<T, Width>& sum) const {
    VOXELFIELD_UNROLL
    for (int c = 0; c < Width; ++c) {
      if (label >= 0) row[label * channels + c] += sum.lane[c];
      sum.lane[c] = T(0);
    }
  }
};

// The derivatives of a ray's integrals, times values and summed over channels and labels.
template <typename T>
struct LineGradient {
  RayBundle<T> rays;
  LabelView labels;
  int64_t channels;
  const T *values, *grid;
  T* out;  // (count, 8): of origin, direction, near and far

  VOXELFIELD_HOST_DEVICE void operator()(int64_t ray) const {
    T* const row = out + 8 * ray;
    VOXELFIELD_UNROLL
    for (int i = 0; i < 8; ++i) row[i] = T(0);
    Line<T> line(rays, ray);
    if (line.misses()) return;
    const T* const data = grid + rays.grid_of(ray) * rays.vertices() * channels;
    const T* const factors = values + ray * labels.count * channels;
    const auto load = [&](int64_t vertex) {
      T sum = T(0);
      int64_t label;
      if (!labels.find(vertex, label)) return sum;
      for (int64_t c = 0; c < channels; ++c) sum += factors[label * channels + c] * data[vertex * channels + c];
      return sum;
    };
    CornerValues<T> corners;
    corners.load_all(line, load);
    // The integrals of the value, of its slopes, and of these times the distance; the values at both ends.
    T total = T(0), slopes[3] = {}, moments[3] = {}, slope[3], last = T(0);
    const T first = value_and_slopes(line.at(T(0)), corners.at, slope);
    line.walk(
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
    const T begin = line.begin / line.speed, end = (line.begin + line.length) / line.speed;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const T rise = line.cell.slope[axis][1];
      row[axis] = rise * slopes[axis];
      row[3 + axis] = (rise * moments[axis] + line.unit[axis] * total) / line.speed + begin * row[axis];
      // Where a face ends the line, its end moves along the ray with the ray.
      if (axis == line.entry) row[axis] += first / line.unit[axis];
      if (axis == line.entry) row[3 + axis] += begin * first / line.unit[axis];
      if (axis == line.exit) row[axis] -= last / line.unit[axis];
      if (axis == line.exit) row[3 + axis] -= end * last / line.unit[axis];
    }
    if (line.entry < 0) row[6] = -line.speed * first;
    if (line.exit < 0) row[7] = line.speed * last;
  }
};

// What backproject() adds to grids: the values of rays, times the integrals of the weights of vertices.
template <typename T>
struct Backprojection {
  RayBundle<T> rays;
  LabelView labels;
  int64_t channels;
  const T* values;  // (count, labels, channels)

  int64_t grids() const { return rays.rays_per_grid > 0 ? rays.count / rays.rays_per_grid : 1; }
};

// The first root in [0, 1] of a polynomial of degree 3 that is not zero at 0, or -1.
template <typename T>
VOXELFIELD_HOST_DEVICE T first_root(const T (&c)[4]) {
  const auto value = [&](T s) { return c[0] + s * (c[1] + s * (c[2] + s * c[3])); };
  // It is monotonic between the roots of its derivative.
  const T a = T(3) * c[3], half = c[2], squares = half * half - a * c[1];
  T ends[3] = {T(1), T(1), T(1)};
  if (squares > T(0)) {
    const T q = -(half + std::copysign(std::sqrt(squares), half));
    const T one = q / a, other = c[1] / q;
    ends[0] = one > T(0) && one < T(1) ? one : T(1);
    ends[1] = other > T(0) && other < T(1) ? other : T(1);
    const T later = std::fmax(ends[0], ends[1]);
    ends[0] = std::fmin(ends[0], ends[1]);
    ends[1] = later;
  }
  T low = T(0), below = c[0];
  VOXELFIELD_UNROLL
  for (int i = 0; i < 3; ++i) {
    T high = ends[i], above = value(high);
    if ((below > T(0) && above <= T(0)) || (below < T(0) && above >= T(0))) {
      // Newton's steps, or halves where these leave the interval.
      T root = high;
      for (int step = 0; step < 60; ++step) {
        const T error = value(root);
        if (error == T(0)) break;
        ((error > T(0)) == (below > T(0)) ? low : high) = root;
        const T slope = c[1] + root * (T(2) * c[2] + root * T(3) * c[3]);
        T next = root - error / slope;
        if (!(next > low && next < high)) next = low + (high - low) * T(0.5);
        if (next == root || next == low || next == high) break;
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

  VOXELFIELD_HOST_DEVICE void operator()(int64_t ray) const {
    t[ray] = T(INFINITY);
    hit[ray] = false;
    Line<T> line(rays, ray);
    if (line.misses()) return;
    const T* const data = grid + rays.grid_of(ray) * rays.vertices();
    const auto load = [&](int64_t vertex) { return data[vertex] - level; };
    CornerValues<T> corners;
    corners.load_all(line, load);
    T before = T(0), found = T(-1);  // the value so far, of which the sign matters
    line.walk(
        [&](T from, T to) {
          bool above = true, below = true;
          VOXELFIELD_UNROLL
          for (int corner = 0; corner < kCorners; ++corner) {
            above = above && corners.at[corner] > T(0);
            below = below && corners.at[corner] < T(0);
          }
          // Most cells are on one side.
          T c[4] = {above ? T(1) : T(-1), T(0), T(0), T(0)};
          const bool mixed = !above && !below;
          if (mixed) polynomial(line, corners.at, from, to, c);
          // Rounding may see a root at a face in neither of the cells beside it.
          const bool at_start = c[0] == T(0) || c[0] * before < T(0);
          const T root = at_start ? T(0) : mixed ? first_root(c) : T(-1);
          if (root >= T(0)) found = from + root * (to - from);
          before = c[0] + c[1] + c[2] + c[3];
          return !(root >= T(0));
        },
        [&](int axis) { corners.follow(line, axis, load); });
    if (!(found >= T(0))) return;
    t[ray] = (line.begin + found) / line.speed;
    hit[ray] = true;
  }

 private:
  // Coefficients of the values between two distances in a cell, which are at 0 and 1.
  static VOXELFIELD_HOST_DEVICE void polynomial(Line<T>& line, const T (&corner)[kCorners], T from, T to, T (&c)[4]) {
    T start[3], rate[3];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) start[axis] = line.at(from).weight[axis][1];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) rate[axis] = line.at(to).weight[axis][1] - start[axis];
    T plane[2][3];
    VOXELFIELD_UNROLL
    for (int i = 0; i < 2; ++i) {
      T row[2][2];
      VOXELFIELD_UNROLL
      for (int j = 0; j < 2; ++j) {
        const T change = corner[4 * i + 2 * j + 1] - corner[4 * i + 2 * j];
        row[j][0] = corner[4 * i + 2 * j] + start[2] * change;
        row[j][1] = rate[2] * change;
      }
      const T change[2] = {row[1][0] - row[0][0], row[1][1] - row[0][1]};
      plane[i][0] = row[0][0] + start[1] * change[0];
      plane[i][1] = row[0][1] + start[1] * change[1] + rate[1] * change[0];
      plane[i][2] = rate[1] * change[1];
    }
    const T change[3] = {plane[1][0] - plane[0][0], plane[1][1] - plane[0][1], plane[1][2] - plane[0][2]};
    c[0] = plane[0][0] + start[0] * change[0];
    c[1] = plane[0][1] + start[0] * change[1] + rate[0] * change[0];
    c[2] = plane[0][2] + start[0] * change[2] + rate[0] * change[1];
    c[3] = rate[0] * change[2];
  }
};

template <typename Backend>
struct LineOps {
  static Tensor integrate_rays(const Tensor& grid, const Tensor& origins, const Tensor& directions,
                               const OptionalTensor& near, const OptionalTensor& far, const OptionalTensor& labels,
                               int64_t label_count) {
    Rays rays(origins, directions, near, far, grid);
    const Tensor data = rays.checked_grid(grid);
    const OptionalTensor of_vertices = rays.checked_labels(labels, label_count);
    const typename Backend::Guard guard(grid);
    const int64_t channels = data.size(-1);
    const std::vector<int64_t> shape = rays.values_shape(labels, label_count, channels);
    Tensor out = labels.has_value() ? new_zeros(data, shape, data.scalar_type()) : new_like(data, shape);
    if (out.numel() == 0) return out;
    dispatch_opmath(data, [&](auto zero) {
      using T = decltype(zero);
      const T* const from = data_of(data);
      T* const to = data_of(out);
      dispatch_vector_width<4, 1>(vector_width(std::is_same_v<T, float> ? 4 : 1, {channels}, from, to), [&](auto w) {
        dispatch_flag(labels.has_value(), [&](auto labelled) {
          constexpr int kWidth = std::is_same_v<T, float> ? w.value : 1;
          Backend::for_each(rays.count() * (channels / kWidth),
                            IntegrateRays<T, kWidth, labelled.value>{
                                rays.template bundle<T>(), {data_of(of_vertices), label_count}, channels, from, to});
        });
      });
    });
    return out;
  }

  static Tensor line_gradient(const Tensor& values, const Tensor& grid, const Tensor& origins, const Tensor& directions,
                              const OptionalTensor& near, const OptionalTensor& far, const OptionalTensor& labels,
                              int64_t label_count) {
    Rays rays(origins, directions, near, far, grid);
    const Tensor data = rays.checked_grid(grid);
    const OptionalTensor of_vertices = rays.checked_labels(labels, label_count);
    const int64_t channels = data.size(-1);
    const Tensor given =
        checked("values", values, rays.values_shape(labels, label_count, channels), data.scalar_type(), data);
    const typename Backend::Guard guard(grid);
    std::vector<int64_t> shape = shape_of(origins);
    shape.back() = 8;
    Tensor out = new_like(data, shape);
    dispatch_opmath(data, [&](auto zero) {
      using T = decltype(zero);
      Backend::for_each(rays.count(), LineGradient<T>{rays.template bundle<T>(),
                                                      {data_of(of_vertices), label_count},
                                                      channels,
                                                      data_of(given),
                                                      data_of(data),
                                                      data_of(out)});
    });
    return out;
  }

  // With `scale`, sums are computed exactly, of whole numbers: that many make one.
  static Tensor backproject_rays(const Tensor& values, const Tensor& origins, const Tensor& directions,
                                 const OptionalTensor& near, const OptionalTensor& far, const OptionalTensor& labels,
                                 int64_t label_count, std::vector<int64_t> size, const OptionalTensor& scale) {
    Rays rays(origins, directions, near, far, values);
    rays.set_size(size);
    const OptionalTensor of_vertices = rays.checked_labels(labels, label_count);
    const int64_t channels = values.dim() > 0 ? values.size(-1) : any('C');
    const Tensor given =
        checked("values", values, rays.values_shape(labels, label_count, channels), values.scalar_type(), values);
    const typename Backend::Guard guard(values);
    std::vector<int64_t> shape = std::move(size);
    shape.push_back(channels);
    if (rays.batched) shape.insert(shape.begin(), origins.size(0));
    const bool whole = scale.has_value() && Backend::kAddsInAnyOrder;
    const double* const per_one =
        whole ? number_data("scale", *scale, ScalarType::Double, values) : TensorData{nullptr};
    Tensor sums = new_zeros(values, shape, whole ? ScalarType::Long : values.scalar_type());
    if (given.numel() > 0) {
      dispatch_opmath(given, [&](auto zero) {
        using T = decltype(zero);
        Backend::backproject(
            Backprojection<T>{rays.template bundle<T>(), {data_of(of_vertices), label_count}, channels, data_of(given)},
            sums.mutable_data_ptr(), per_one);
      });
    }
    if (!whole) return sums;
    Tensor real = new_like(values, shape);
    dispatch_opmath(values, [&](auto zero) {
      using T = decltype(zero);
      Backend::for_each(real.numel(), FromWhole<T>{data_of(sums), per_one, data_of(real)});
    });
    return real;
  }

  static std::tuple<Tensor, Tensor> first_crossing(const Tensor& grid, const Tensor& origins, const Tensor& directions,
                                                   const OptionalTensor& near, const OptionalTensor& far,
                                                   double level) {
    Rays rays(origins, directions, near, far, grid);
    const Tensor data = rays.checked_grid(grid);
    STD_TORCH_CHECK(data.size(-1) == 1, "grid must have one channel, got ", data.size(-1));
    const typename Backend::Guard guard(grid);
    std::vector<int64_t> shape = shape_of(origins);
    shape.pop_back();
    Tensor t = new_like(data, shape), hit = new_empty(data, shape, ScalarType::Bool);
    dispatch_opmath(data, [&](auto zero) {
      using T = decltype(zero);
      Backend::for_each(rays.count(), FirstCrossing<T>{rays.template bundle<T>(), data_of(data), static_cast<T>(level),
                                                       data_of(t), data_of(hit)});
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
  // Rays of a call, checked, and the size of the grids that they cross.
  struct Rays {
    bool batched;
    Tensor origins, directions;
    OptionalTensor near, far;
    std::vector<int64_t> size;

    Rays(const Tensor& from, const Tensor& along, const OptionalTensor& first, const OptionalTensor& last,
         const Tensor& like)
        : batched(from.dim() == 3) {
      const ScalarType dtype = like.scalar_type();
      VOXELFIELD_CHECK_TYPE(dtype == ScalarType::Float || dtype == ScalarType::Double,
                            "grid must be float32 or float64, got ", dtype_name(dtype));
      std::vector<int64_t> shape{any('N'), 3};
      if (batched) shape.insert(shape.begin(), any('B'));
      origins = checked("origins", from, shape, dtype, like);
      shape = shape_of(from);
      directions = checked("directions", along, shape, dtype, like);
      shape.pop_back();
      near = checked("near", first, shape, dtype, like);
      far = checked("far", last, shape, dtype, like);
    }

    int64_t count() const { return origins.numel() / 3; }

    void set_size(const std::vector<int64_t>& sizes) {
      const bool fits = sizes.size() == 3 && std::all_of(sizes.begin(), sizes.end(), [](int64_t number) {
                          return number >= 1 && number <= (int64_t{1} << 30);
                        });
      STD_TORCH_CHECK(fits, "grid must have 1 to 2^30 vertices along each of three axes, got ", describe(sizes));
      size = sizes;
    }

    // Also sets the size. A batch that repeats one grid has been made one grid before.
    Tensor checked_grid(const Tensor& grid) {
      std::vector<int64_t> shape{any('X'), any('Y'), any('Z'), any('C')};
      if (batched) shape.insert(shape.begin(), origins.size(0));
      Tensor data = checked("grid", grid, shape, origins.scalar_type(), origins);
      shape = shape_of(grid);
      set_size({shape.end() - 4, shape.end() - 1});
      return data;
    }

    OptionalTensor checked_labels(const OptionalTensor& labels, int64_t count) const {
      STD_TORCH_CHECK(labels.has_value() ? count >= 0 : count == 1,
                      "label_count must be a number of labels, or 1 without labels, got ", count);
      return checked("labels", labels, size, ScalarType::Int, origins);
    }

    std::vector<int64_t> values_shape(const OptionalTensor& labels, int64_t count, int64_t channels) const {
      std::vector<int64_t> shape = shape_of(origins);
      shape.back() = channels;
      if (labels.has_value()) shape.insert(shape.end() - 1, count);
      return shape;
    }

    template <typename T>
    RayBundle<T> bundle() const {
      RayBundle<T> all{data_of(origins), data_of(directions), data_of(near), data_of(far), count(), 0, {}};
      if (batched) all.rays_per_grid = origins.size(1);
      std::copy_n(size.begin(), 3, all.resolution);
      return all;
    }
  };
};

}  // namespace voxelfield
