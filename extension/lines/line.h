// A straight line through a dense grid over the unit cube, cell by cell. Within a cell, the trilinear interpolant along
// the line is a polynomial of degree 3 in the distance, which the Gauss-Legendre rule with two nodes integrates
// exactly. So are the products of its gradient with the distance, which derivatives in rays need.
//
// Axes along which the line descends are mirrored: cells are counted from the other end, and steps between vertices are
// negative. A line then always enters the next cell through the face that has side 1 in the cell before.
#pragma once

#include <cmath>

#include "stencil/trilinear.h"

namespace voxelfield {

// Rays through grids (B, X, Y, Z, C), vertices at the faces of the unit cube, and the labels of vertices (X, Y, Z).
template <typename T>
struct RayBundle {
  static constexpr int32_t kTile = 16;

  const T *origins, *directions;  // (count, 3)
  const T *near, *far;            // (count,), or null for 0 and infinity
  const int32_t* labels;          // or null: all vertices have label 0
  int64_t label_count, channels, count;
  int64_t rays_per_grid;  // ray n crosses grid n / rays_per_grid; 0 if there is one grid
  int64_t columns;        // of the images whose rows the rays are; 1 if they are not in images
  int32_t resolution[3];

  VOXELFIELD_HOST_DEVICE int64_t grid_of(int64_t ray) const { return rays_per_grid > 0 ? ray / rays_per_grid : 0; }
  VOXELFIELD_HOST_DEVICE int64_t vertices() const { return int64_t{resolution[0]} * resolution[1] * resolution[2]; }

  // The label of a vertex, or -1 if it does not count.
  VOXELFIELD_HOST_DEVICE int64_t label_of(int64_t vertex) const {
    const int64_t label = labels == nullptr ? 0 : labels[vertex];
    return label >= 0 && label < label_count ? label : -1;
  }

  // Rays of images are walked in tiles, so that neighbouring threads read and add to the same vertices: 256 slots in a
  // row are 16 x 16 pixels, and 32 of these 16 x 2 or 2 x 16. Slots beyond the edges have no ray; of small images,
  // these would be too many.
  VOXELFIELD_HOST_DEVICE bool tiled() const { return columns >= 4 * kTile && count >= 4 * kTile * columns; }

  VOXELFIELD_HOST_DEVICE int64_t slots() const {
    if (!tiled()) return count;
    return (count / columns + kTile - 1) / kTile * ((columns + kTile - 1) / kTile) * (kTile * kTile);
  }

  // The ray of a slot, or -1.
  VOXELFIELD_HOST_DEVICE int64_t ray_in(int64_t slot) const {
    if (!tiled()) return slot;
    const int64_t rows = count / columns, across = (columns + kTile - 1) / kTile, tile = slot / (kTile * kTile);
    const int64_t top = tile / across * kTile, left = tile % across * kTile;
    const auto within = static_cast<int32_t>(slot % (kTile * kTile));
    const int32_t small = within / (2 * kTile) * 2 + within % 2, large = within % (2 * kTile) / 2;
    const bool down = runs_down(top * columns + left, rows - top, columns - left);
    const int64_t y = top + (down ? large : small), x = left + (down ? small : large);
    return y < rows && x < columns ? y * columns + x : -1;
  }

  // Whether the pixels of a column of the image differ more along z, where vertices are contiguous, than those of a
  // row. If rows are of different cameras, the pixels of a column are far apart, and tiles follow the rows.
  VOXELFIELD_HOST_DEVICE bool runs_down(int64_t ray, int64_t rows_left, int64_t columns_left) const {
    if (rows_left < 2 || columns_left < 2) return false;
    T below[3], beside[3];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const auto at = [&](int64_t n) { return origins[3 * n + axis] + directions[3 * n + axis]; };
      below[axis] = at(ray + columns) - at(ray);
      beside[axis] = at(ray + 1) - at(ray);
    }
    const auto squares = [](const T(&x)[3]) { return x[0] * x[0] + x[1] * x[1] + x[2] * x[2]; };
    return std::fabs(below[2]) > std::fabs(beside[2]) && squares(below) <= T(16) * squares(beside);
  }

  // The offset of a ray's row for a label in values (count, labels, channels).
  VOXELFIELD_HOST_DEVICE int64_t row(int64_t ray, int64_t label) const {
    return (ray * label_count + label) * channels;
  }
};

template <typename T>
class Line {
 public:
  Stencil<T> cell{};  // the current cell; `slope` is not set
  T unit[3]{};        // direction
  T rise[3]{};        // derivative of a coordinate along an axis of the cell in that of the point
  T speed{};          // length of the ray's direction
  T begin{};          // distance from the ray's origin to the start of the line
  T length{};         // 0 if the ray misses the cube or is not finite
  // 1 << axis of the face that ends the line, or 0 if `near` or `far` does. A mask instead of the axis: compilers turn
  // a comparison with the axis into an index of arrays, which a GPU keeps in local memory.
  int entry = 0, exit = 0;

  // `stride`: from one vertex to the next along z, 1 if offsets count vertices, the channels if they count elements.
  VOXELFIELD_HOST_DEVICE Line(const RayBundle<T>& rays, int64_t ray, int64_t stride = 1) {
    const T* const origin = rays.origins + 3 * ray;
    const T* const direction = rays.directions + 3 * ray;
    const T largest = std::fmax(std::fabs(direction[0]), std::fmax(std::fabs(direction[1]), std::fabs(direction[2])));
    if (!all_finite(origin) || !all_finite(direction) || !(largest > T(0))) return;
    T squares = T(0);
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) squares += direction[axis] / largest * (direction[axis] / largest);
    speed = largest * std::sqrt(squares);
    if (!(speed < T(INFINITY))) return;
    begin = rays.near == nullptr ? T(0) : rays.near[ray] * speed;
    T end = rays.far == nullptr ? T(INFINITY) : rays.far[ray] * speed;
    bool outside = false;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      unit[axis] = direction[axis] / speed;
      const T first = ((unit[axis] < T(0) ? T(1) : T(0)) - origin[axis]) / unit[axis];
      const T last = ((unit[axis] < T(0) ? T(0) : T(1)) - origin[axis]) / unit[axis];
      // Parallel to the faces, a line lies between them, or in one of them, or misses the cube.
      if (!(std::fabs(unit[axis]) >= kParallel)) {
        unit[axis] = T(0);
        outside = outside || origin[axis] < T(0) || origin[axis] > T(1);
      } else {
        if (first > begin) entry = 1 << axis;
        if (first > begin) begin = first;
        if (last < end) exit = 1 << axis;
        if (last < end) end = last;
      }
    }
    if (outside || !(begin < end) || !(end < T(INFINITY))) return;
    length = end - begin;
    VOXELFIELD_UNROLL
    for (int axis = 2; axis >= 0; --axis) {
      const int32_t last = rays.resolution[axis] - 1;
      const T size = coordinate_of<T>(last);
      const bool descends = unit[axis] < T(0);
      // Fused: the start is on the line as exactly as it can be written, also if the origin is far away.
      const T point = std::fma(begin, unit[axis], origin[axis]);
      start_[axis] = entry == 1 << axis ? T(0) : clamp((descends ? T(1) - point : point) * size, size);
      rise[axis] = descends ? -size : size;
      rate_[axis] = unit[axis] * rise[axis];
      pace_[axis] = rate_[axis] > T(0) ? T(1) / rate_[axis] : T(INFINITY);
      cells_[axis] = last > 1 ? last : 1;
      cell.step[axis] = last == 0 ? 0 : descends ? -stride : stride;
      cell.origin += descends ? last * stride : 0;
      stride *= rays.resolution[axis];
    }
    to_ = length;
    locate();
  }

  VOXELFIELD_HOST_DEVICE bool misses() const { return !(length > T(0)); }
  VOXELFIELD_HOST_DEVICE bool descends(int axis) const { return unit[axis] < T(0); }

  // Restricts the walk to cells `first` to `last` - 1 along x. Returns whether the line may cross any.
  VOXELFIELD_HOST_DEVICE bool restrict_to(int32_t first, int32_t last) {
    if (last > cells_[0]) last = cells_[0];
    first_cell_ = descends(0) ? cells_[0] - last : first;
    const int32_t end = descends(0) ? cells_[0] - first : last;
    if (!(rate_[0] > T(0))) return cell.lower[0] >= first_cell_ && cell.lower[0] < end;
    if (cell.lower[0] < first_cell_) from_ = face(0, first_cell_);
    if (end < cells_[0]) to_ = std::fmin(to_, face(0, end));
    locate();
    return from_ < to_ && cell.lower[0] < end;
  }

  // Returns the current cell with the weights of the point at a distance from the start of the line.
  VOXELFIELD_HOST_DEVICE const Stencil<T>& at(T distance) {
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      cell.weight[axis][0] = saturate(multiply_add(-distance, rate_[axis], upper_[axis] - start_[axis]));
      cell.weight[axis][1] = T(1) - cell.weight[axis][0];
    }
    return cell;
  }

  // Calls f(distance, weight) at the two nodes of the quadrature between two distances in the current cell.
  template <typename F>
  static VOXELFIELD_HOST_DEVICE void at_nodes(T from, T to, const F& f) {
    const T half = (to - from) * T(0.5), middle = from + half;
    const T offset = half * T(0.57735026918962576451);  // 1 / sqrt(3)
    f(middle - offset, half);
    f(middle + offset, half);
  }

  // Adds the integrals of the weights of the cell's vertices.
  VOXELFIELD_HOST_DEVICE void add_weights(T from, T to, T (&sums)[kCorners]) {
    at_nodes(from, to, [&](T distance, T weight) {
      const Stencil<T>& point = at(distance);
      // As point.value(), but four products are weighted instead of eight.
      VOXELFIELD_UNROLL
      for (int corner = 0; corner < kCorners; ++corner) {
        const T in_plane = weight * point.weight[2][corner & 1] * point.weight[0][corner >> 2];
        sums[corner] += in_plane * point.weight[1][corner >> 1 & 1];
      }
    });
  }

  // Calls start() in the first cell, if there is one; then cross(from, to) for each cell in order, with the distances
  // at which the line enters and leaves it, until it returns false; and moved(axis) after each step to the next cell.
  template <typename Start, typename Cross, typename Moved>
  VOXELFIELD_HOST_DEVICE void walk(const Start& start, const Cross& cross, const Moved& moved) {
    if (misses()) return;
    start();
    for (T from = from_;;) {
      T next = T(INFINITY);
      int axis = -1;
      VOXELFIELD_UNROLL
      for (int i = 0; i < 3; ++i) {
        const T distance = (upper_[i] - start_[i]) * pace_[i];
        if (distance < next) axis = i;
        if (distance < next) next = distance;
      }
      bool last = !(next < to_);
      VOXELFIELD_UNROLL
      for (int i = 0; i < 3; ++i) last = last || (i == axis && cell.lower[i] + 1 >= cells_[i]);
      // Distances to faces are rounded: one may lie before that to the face that was crossed last.
      const T to = last ? to_ : std::fmax(next, from);
      if (!cross(from, to) || last) return;
      VOXELFIELD_UNROLL
      for (int i = 0; i < 3; ++i) {
        if (i == axis) cell.lower[i] += 1;
        // Counted in integers: in float32, adding one ends at 2^24.
        if (i == axis) upper_[i] = coordinate_of<T>(cell.lower[i] + 1);
        if (i == axis) cell.origin += cell.step[i];
      }
      moved(axis);
      from = to;
    }
  }

  // As walk, for a grid of one vertex along z and at most 2^24 along the others, without branches that depend on which
  // axis the line crosses next, because a processor cannot predict them. Calls
  // add(distance, u, v, uv) in each cell with the length of the line in it, and the integrals of the point's
  // coordinates in the cell along x and y and of their product, in which the line is a polynomial of degree 2.
  template <typename Add>
  VOXELFIELD_HOST_DEVICE void walk_plane(const Add& add) {
    if (misses()) return;
    T x = coordinate_of<T>(cell.lower[0]), y = coordinate_of<T>(cell.lower[1]);
    const T last_x = coordinate_of<T>(cells_[0] - 1), last_y = coordinate_of<T>(cells_[1] - 1);
    // A line that does not move along an axis never reaches a face of it.
    const bool moves_x = rate_[0] > T(0), moves_y = rate_[1] > T(0);
    const T pace_x = moves_x ? pace_[0] : T(0), first_x = moves_x ? (T(1) - start_[0]) * pace_x : T(INFINITY);
    const T pace_y = moves_y ? pace_[1] : T(0), first_y = moves_y ? (T(1) - start_[1]) * pace_y : T(INFINITY);
    T from = from_, u = multiply_add(from, rate_[0], start_[0]) - x, v = multiply_add(from, rate_[1], start_[1]) - y;
    for (bool last = false; !last;) {
      const T end_x = multiply_add(x, pace_x, first_x), end_y = multiply_add(y, pace_y, first_y);
      const bool along_x = end_x < end_y;
      const T next = along_x ? end_x : end_y;
      last = !(next < to_) || (along_x ? x >= last_x : y >= last_y);
      const T to = last ? to_ : next > from ? next : from, distance = to - from;
      const T next_u = multiply_add(to, rate_[0], start_[0]) - x, next_v = multiply_add(to, rate_[1], start_[1]) - y;
      const T products = T(0.5) * (u * v + next_u * next_v) - (next_u - u) * (next_v - v) * T(1.0 / 6);
      add(distance, T(0.5) * distance * (u + next_u), T(0.5) * distance * (v + next_v), distance * products);
      x += along_x ? T(1) : T(0);
      y += along_x ? T(0) : T(1);
      cell.origin += along_x ? cell.step[0] : cell.step[1];
      u = along_x ? T(0) : next_u;
      v = along_x ? next_v : T(0);
      from = to;
    }
  }

 private:
  static constexpr T kParallel = T(1e-18);  // between the smallest numbers and what moves a point by a rounding error

  VOXELFIELD_HOST_DEVICE T face(int axis, int32_t index) const {
    return (coordinate_of<T>(index) - start_[axis]) * pace_[axis];
  }

  // Goes to the cell in which the walk begins.
  VOXELFIELD_HOST_DEVICE void locate() {
    const bool restarts = first_cell_ >= 0;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const int32_t before = restarts ? cell.lower[axis] : 0;
      const T u = clamp(multiply_add(from_, rate_[axis], start_[axis]), coordinate_of<T>(cells_[axis] - 1));
      int32_t now = index_below(u, cells_[axis] - 1);
      if (axis == 0 && restarts) now = before < first_cell_ ? first_cell_ : before;
      cell.lower[axis] = now;
      upper_[axis] = coordinate_of<T>(now + 1);
      cell.origin += (now - before) * cell.step[axis];
    }
  }

  T start_[3]{}, rate_[3]{};  // in cells: where the line starts, and its slope
  T pace_[3]{};               // the inverse of that, infinite along axes along which the line does not move
  T upper_[3]{};              // the upper vertex of the current cell, kept because conversions take time on a GPU
  T from_{}, to_{};           // the distances between which the line is walked
  int32_t cells_[3]{};
  int32_t first_cell_ = -1;  // along x, or -1 if the walk is not restricted
};

// The four vertices of side 0 along an axis: vertex i of them has the sides i / 2 and i % 2 along the other two.
template <typename T>
struct CellFace {
  int64_t origin, along, first, second;

  VOXELFIELD_HOST_DEVICE CellFace(const Line<T>& line, int axis)
      : origin(line.cell.origin),
        along(axis == 0   ? line.cell.step[0]
              : axis == 1 ? line.cell.step[1]
                          : line.cell.step[2]),
        first(axis == 0 ? line.cell.step[1] : line.cell.step[0]),
        second(axis == 2 ? line.cell.step[1] : line.cell.step[2]) {}

  VOXELFIELD_HOST_DEVICE int64_t vertex(int i) const { return origin + (i >> 1) * first + (i & 1) * second; }
};

// What the vertices of the current cell of a line hold, loaded by load(vertex).
template <typename Value>
struct CornerValues {
  Value at[kCorners];

  template <typename T, typename Load>
  VOXELFIELD_HOST_DEVICE void load_all(const Line<T>& line, const Load& load) {
    VOXELFIELD_UNROLL
    for (int corner = 0; corner < kCorners; ++corner) at[corner] = load(line.cell.offset(corner));
  }

  // After the line has entered the next cell. On a GPU, whose first cache is what limits a walk, only the four vertices
  // that the cell before did not have are loaded; a CPU loads eight faster than it moves four.
  template <typename T, typename Load>
  VOXELFIELD_HOST_DEVICE void follow(const Line<T>& line, int axis, const Load& load) {
#if defined(__CUDA_ARCH__)
    const CellFace<T> face(line, axis);
    Value fresh[4];
    VOXELFIELD_UNROLL
    for (int i = 0; i < 4; ++i) fresh[i] = load(face.vertex(i) + face.along);
    shift(axis, fresh);
#else
    static_cast<void>(axis);
    load_all(line, load);
#endif
  }

  // The number in its face of a corner, without its side along an axis.
  static VOXELFIELD_HOST_DEVICE constexpr int within_face(int corner, int axis) {
    return axis == 0 ? corner & 3 : axis == 1 ? ((corner >> 1) & 2) | (corner & 1) : corner >> 1;
  }

  // Values of side 1 along an axis become those of side 0, and others take their place. Branches of each axis would
  // diverge, and registers cannot be indexed.
  VOXELFIELD_HOST_DEVICE void shift(int axis, const Value (&fresh)[4]) {
    Value moved[kCorners];
    VOXELFIELD_UNROLL
    for (int corner = 0; corner < kCorners; ++corner) {
      const Value x = corner & 4 ? fresh[within_face(corner, 0)] : at[corner | 4];
      const Value y = corner & 2 ? fresh[within_face(corner, 1)] : at[corner | 2];
      const Value z = corner & 1 ? fresh[within_face(corner, 2)] : at[corner | 1];
      moved[corner] = axis == 0 ? x : axis == 1 ? y : z;
    }
    VOXELFIELD_UNROLL
    for (int corner = 0; corner < kCorners; ++corner) at[corner] = moved[corner];
  }

  // The values of side 0 along an axis.
  VOXELFIELD_HOST_DEVICE void lower_face(int axis, Value (&face)[4]) const {
    VOXELFIELD_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int y = (i & 2) << 1 | (i & 1), z = i << 1;
      face[i] = axis == 0 ? at[i] : axis == 1 ? at[y] : at[z];
    }
  }
};

// The interpolated value at a point of a cell, and its derivatives along the axes of the cell.
template <typename T>
VOXELFIELD_HOST_DEVICE T value_and_slopes(const Stencil<T>& point, const T (&corner)[kCorners], T (&slope)[3]) {
  T along_x[2], slope_y[2], slope_z[2];
  VOXELFIELD_UNROLL
  for (int i = 0; i < 2; ++i) {
    T along_y[2], change[2];
    VOXELFIELD_UNROLL
    for (int j = 0; j < 2; ++j) {
      const T low = corner[4 * i + 2 * j], high = corner[4 * i + 2 * j + 1];
      change[j] = high - low;
      along_y[j] = low + point.weight[2][1] * change[j];
    }
    slope_y[i] = along_y[1] - along_y[0];
    along_x[i] = along_y[0] + point.weight[1][1] * slope_y[i];
    slope_z[i] = change[0] + point.weight[1][1] * (change[1] - change[0]);
  }
  slope[0] = along_x[1] - along_x[0];
  slope[1] = slope_y[0] + point.weight[0][1] * (slope_y[1] - slope_y[0]);
  slope[2] = slope_z[0] + point.weight[0][1] * (slope_z[1] - slope_z[0]);
  return along_x[0] + point.weight[0][1] * slope[0];
}

}  // namespace voxelfield
