// The trilinear stencil: the eight vertices around a point, their weights, and the derivatives of the weights. This is
// the only definition: host and device, forward and all derivatives, the grid op and the per-cell op share it.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/constants.h"
#include "common/finite.h"
#include "common/platform.h"

namespace voxelfield {

// How values outside the grid are defined. The numbers are part of the op schemas. A closed periodic grid ends, along
// each axis, with a copy of its first vertex, so that the vertices of every cell are neighbours in memory: gradients of
// periodic grids are summed in such a grid, whose last vertices are then added to the first ones.
enum class Padding : int32_t { kBorder = 0, kZeros = 1, kReflection = 2, kPeriodic = 3, kPeriodicClosed = 4 };

// Corners are numbered 4*i + 2*j + k for (x, y, z): the memory order of a 2x2x2 block of an (X, Y, Z, C) grid.
constexpr int kCorners = 8;

VOXELFIELD_HOST_DEVICE constexpr int corner_side(int corner, int axis) { return (corner >> (2 - axis)) & 1; }

template <typename T, typename offset_t = int64_t>
struct Stencil {
  offset_t origin;   // element offset of corner 0
  offset_t step[3];  // element offset from the lower to the upper vertex of each axis; 0 if either is missing, negative
                     // from the last vertex of a periodic axis to the first
  int32_t lower[3];  // index of the lower vertex along each axis; -1 if it lies before the grid
  T weight[3][2];    // linear weight of the lower and upper vertex of each axis
  T slope[3][2];     // derivative of that weight with respect to the point's coordinate
  bool empty;        // no vertex contributes: the point is not finite, or outside under zeros padding

  VOXELFIELD_HOST_DEVICE offset_t offset(int corner) const {
    return origin + corner_side(corner, 0) * step[0] + corner_side(corner, 1) * step[1] +
           corner_side(corner, 2) * step[2];
  }

  // Replaces both vertices of an axis by the lower (0) or the upper (1) one. Threads with different sides can then
  // share code that refers to corners of side 0, without indexing registers.
  VOXELFIELD_HOST_DEVICE void take_side(int axis, bool upper) {
    if (upper) origin += step[axis];
    weight[axis][0] = upper ? weight[axis][1] : weight[axis][0];
    slope[axis][0] = upper ? slope[axis][1] : slope[axis][0];
  }

  VOXELFIELD_HOST_DEVICE T value(int corner) const {
    // The product of z and x comes first: a thread that serves one side along z uses two such products for its four
    // corners, which takes six multiplications instead of eight.
    return weight[2][corner_side(corner, 2)] * weight[0][corner_side(corner, 0)] * weight[1][corner_side(corner, 1)];
  }

  // d value / d point[axis]
  VOXELFIELD_HOST_DEVICE T partial(int corner, int axis) const {
    const int b = (axis + 1) % 3, c = (axis + 2) % 3;
    return slope[axis][corner_side(corner, axis)] * weight[b][corner_side(corner, b)] *
           weight[c][corner_side(corner, c)];
  }

  // d^2 value / d point[axis] d point[other]. The diagonal is zero, because the weights are linear along each axis.
  VOXELFIELD_HOST_DEVICE T mixed_partial(int corner, int axis, int other) const {
    if (axis == other) return T(0);
    const int rest = 3 - axis - other;
    return slope[axis][corner_side(corner, axis)] * slope[other][corner_side(corner, other)] *
           weight[rest][corner_side(corner, rest)];
  }

  // Sampling returns one sum over the corners for each set of weights. Set 0 interpolates, set 1 + a is the derivative
  // along axis a.
  VOXELFIELD_HOST_DEVICE T corner_weight(int corner, int set) const {
    return set == 0 ? value(corner) : partial(corner, set - 1);
  }

  // d corner_weight / d point[axis]
  VOXELFIELD_HOST_DEVICE T corner_slope(int corner, int axis, int set) const {
    return set == 0 ? partial(corner, axis) : mixed_partial(corner, axis, set - 1);
  }
};

// Rounds once on the device: kernels that read the same point must agree on its cell, and the compiler may otherwise
// fuse the two operations in one kernel and not in another.
template <typename T>
VOXELFIELD_HOST_DEVICE T multiply_add(T a, T b, T c) {
#if defined(__CUDA_ARCH__)
  return fma(a, b, c);
#else
  return a * b + c;
#endif
}

// Clamps to [0, high]; returns 0 for NaN.
template <typename T>
VOXELFIELD_HOST_DEVICE T clamp(T u, T high) {
#if defined(__CUDA_ARCH__)
  return fmin(fmax(u, T(0)), high);
#else
  return u > T(0) ? (u < high ? u : high) : T(0);
#endif
}

// Clamps to [0, 1]; returns 0 for NaN. Of float32 on the device, it is a modifier of the instruction before.
template <typename T>
VOXELFIELD_HOST_DEVICE T saturate(T u) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>) return __saturatef(u);
#endif
  return clamp(u, T(1));
}

// Converts a vertex's index to a coordinate. On the device, indices beyond the precision of a float are rounded down.
template <typename T>
VOXELFIELD_HOST_DEVICE T coordinate_of(int32_t index) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>) return __int2float_rz(index);
#endif
  return static_cast<T>(index);
}

// Returns the index of the last vertex at or below u. Requires u <= coordinate_of(largest).
template <typename T>
VOXELFIELD_HOST_DEVICE int32_t index_below(T u, [[maybe_unused]] int32_t largest) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float>) return __float2int_rd(u);
  return static_cast<int32_t>(floor(u));
#else
  const int32_t index = static_cast<int32_t>(std::floor(u));
  return index < largest ? index : largest;
#endif
}

// Reflects a coordinate at both ends of [low, high], and sets whether the result decreases as the original increases.
template <typename T>
struct Reflected {
  T u;
  bool reversed;
};

template <typename T>
VOXELFIELD_HOST_DEVICE Reflected<T> reflect(T u, T low, T high) {
  const T span = high - low;
  if (!(span > T(0))) return {low, false};
  // One period is the distance from one end to the other and back.
  const T phase = std::fmod(std::fabs(u - low), T(2) * span);
  const bool back = phase > span;
  return {back ? high - (phase - span) : low + phase, back != (u < low)};
}

// Returns the coordinate within the first period, [0, period). Rounding can lead to the end of the period, which is the
// start of the next one; so far outside that it can lead further, float precision does not determine the coordinate.
template <typename T>
VOXELFIELD_HOST_DEVICE T wrap(T u, T period) {
  const T rest = multiply_add(-std::floor(u / period), period, u);
  return rest >= T(0) && rest < period ? rest : T(0);
}

// Consecutive planes along x of a grid.
struct Planes {
  int32_t first;
  int32_t count;
};

// Finds the cell of dense, contiguous (B, X, Y, Z, C) grids that contains a point of the unit cube. A `Plain` locator
// supports only the common case (see is_plain()), and takes half the instructions. Without `MayWrap`, it supports all
// but periodic grids, and takes a fifth fewer registers.
template <typename T, bool Plain = false, bool MayWrap = !Plain>
struct GridLocator {
  using offset_t = std::conditional_t<Plain, int32_t, int64_t>;

  int32_t resolution[3];
  Padding padding;
  int64_t channels;
  int64_t points_per_grid;  // point n belongs to grid n / points_per_grid; 0 if there is one grid
  bool align_corners;       // if set, the unit cube ends at the outermost vertices; otherwise, half a cell beyond them
  bool nearest;             // use only the nearest vertex

  // The number of grids for n points, and the number of vertices of all of them.
  int64_t grids(int64_t n) const { return points_per_grid > 0 ? n / points_per_grid : 1; }
  int64_t vertices(int64_t n) const { return grids(n) * resolution[0] * resolution[1] * resolution[2]; }

  // Whether 32-bit offsets address all elements of one grid.
  VOXELFIELD_HOST_DEVICE bool fits_32_bits() const {
    return double(resolution[0]) * resolution[1] * resolution[2] * double(channels) < 0x7fffffff;
  }

  bool is_plain() const {
    return align_corners && !nearest && (padding == Padding::kBorder || padding == Padding::kZeros) &&
           points_per_grid == 0 && fits_32_bits();
  }

  GridLocator<T, true> plain() const {
    return {{resolution[0], resolution[1], resolution[2]}, padding, channels, 0, true, false};
  }

  Planes planes() const { return {0, resolution[0]}; }

  bool is_periodic() const { return padding == Padding::kPeriodic || padding == Padding::kPeriodicClosed; }

  GridLocator<T, false, false> without_wrapping() const {
    return {{resolution[0], resolution[1], resolution[2]}, padding, channels, points_per_grid, align_corners, nearest};
  }

  VOXELFIELD_HOST_DEVICE Stencil<T, offset_t> operator()(const T* points, int64_t index) const {
    return find(points, index, padding != Padding::kZeros);
  }

  // `clamps`: whether the padding maps all points into the grid; a bool, or std::true_type or std::false_type if known
  // at compile time. Only axes kFirst, kFirst - 1, ..., kLast are found, as if there were no others.
  template <int kFirst = 2, int kLast = 0, typename Clamps>
  VOXELFIELD_HOST_DEVICE Stencil<T, offset_t> find(const T* points, int64_t index, Clamps clamps) const {
    const bool aligned = Plain || align_corners, rounds = !Plain && nearest;
    const bool closed = MayWrap && padding == Padding::kPeriodicClosed;
    const bool wraps = MayWrap && (closed || padding == Padding::kPeriodic);
    const T* point = points + 3 * index;
    Stencil<T, offset_t> s;
    s.origin = 0;
    s.empty = !all_finite(point);
    offset_t stride = static_cast<offset_t>(channels);
    VOXELFIELD_UNROLL
    for (int axis = kFirst; axis >= kLast; --axis) {
      const int32_t last = resolution[axis] - (closed ? 2 : 1);
      const T end = coordinate_of<T>(last);
      T rise = aligned ? end : T(resolution[axis] - (closed ? 1 : 0));
      T u = multiply_add(point[axis], rise, aligned ? T(0) : T(-0.5));
      if (!Plain && padding == Padding::kReflection) {
        const T margin = aligned ? T(0) : T(0.5);
        const Reflected<T> folded = reflect(u, -margin, end + margin);
        // So far outside that float precision does not determine the reflected coordinate.
        if (!(folded.u >= -margin && folded.u <= end + margin)) s.empty = true;
        u = folded.u;
        if (folded.reversed) rise = -rise;
      }
      if (wraps) {
        u = wrap(u, coordinate_of<T>(last + 1));
      } else if (clamps) {
        // At and beyond the faces the clamped coordinate is constant, as in F.grid_sample.
        if (!(u > T(0) && u < end)) rise = T(0);
        u = clamp(u, end);
      } else if (!(u >= T(-1) && u < end + T(1))) {
        s.empty = true;
        u = T(0);
      }
      if (rounds) {
        u = std::rint(u);
        if (wraps && u > end) u = T(0);
        rise = T(0);
      }
      const int32_t i = index_below(u, clamps ? last : resolution[axis]);
      const T fraction = u - T(i);
      const bool has_lower = clamps || (i >= 0 && i <= last), has_upper = (wraps || i < last) && !rounds;
      s.lower[axis] = i;
      s.weight[axis][0] = has_lower ? T(1) - fraction : T(0);
      // At the last vertex the fraction of a clamped coordinate is zero. If clamping is known at compile time, this
      // saves a select instruction; at run time it would only add a condition.
      s.weight[axis][1] = std::is_same_v<Clamps, std::true_type> || has_upper ? fraction : T(0);
      s.slope[axis][0] = has_lower ? -rise : T(0);
      s.slope[axis][1] = has_upper ? rise : T(0);
      // A missing vertex is replaced by the other vertex of the axis, with weight zero.
      s.origin += (has_lower ? i : 0) * stride;
      s.step[axis] = !(has_lower && has_upper) ? 0 : wraps && !closed && i == last ? -last * stride : stride;
      if (!has_lower && !has_upper) s.empty = true;
      stride *= resolution[axis];
    }
    if (!Plain && points_per_grid > 0) s.origin += index / points_per_grid * stride;
    return s;
  }
};

// Finds the vertices that lie in a slab of a grid: only its planes are in memory, and offsets are those in the slab. A
// missing vertex is replaced by the other vertex of the axis, with weight zero. Supports one grid that is not periodic.
template <typename T, bool Plain = false>
struct SlabLocator : GridLocator<T, Plain> {
  using Grid = GridLocator<T, Plain>;
  using offset_t = typename Grid::offset_t;

  Planes slab;

  Planes planes() const { return slab; }

  bool is_plain() const {
    Grid in_memory = *this;
    in_memory.resolution[0] = slab.count;
    return in_memory.is_plain();
  }

  SlabLocator<T, true> plain() const { return {Grid::plain(), slab}; }

  VOXELFIELD_HOST_DEVICE Stencil<T, offset_t> operator()(const T* points, int64_t index) const {
    const bool clamps = this->padding != Padding::kZeros;
    // The other axes are found only for points that touch the slab, because most points may not.
    const Stencil<T, offset_t> along_x = this->template find<0, 0>(points, index, clamps);
    const int32_t first = along_x.lower[0] < 0 ? 0 : along_x.lower[0];
    const int32_t lower = first - slab.first, upper = along_x.step[0] == 0 ? lower : lower + 1;
    const bool has_lower = lower >= 0 && lower < slab.count, has_upper = upper >= 0 && upper < slab.count;
    Stencil<T, offset_t> s{};
    s.empty = true;
    if (along_x.empty || (!has_lower && !has_upper)) return s;
    s = this->template find<2, 1>(points, index, clamps);
    const offset_t plane = static_cast<offset_t>(this->channels) * this->resolution[1] * this->resolution[2];
    s.origin += (has_lower ? lower : upper) * plane;
    s.step[0] = has_lower && has_upper && upper > lower ? plane : 0;
    s.lower[0] = along_x.lower[0];
    s.weight[0][0] = has_lower ? along_x.weight[0][0] : T(0);
    s.weight[0][1] = has_upper ? along_x.weight[0][1] : T(0);
    s.slope[0][0] = has_lower ? along_x.slope[0][0] : T(0);
    s.slope[0][1] = has_upper ? along_x.slope[0][1] : T(0);
    return s;
  }
};

// Points, and the number of sets of weights at the corners around them: 1 for values, 4 with their derivatives.
template <typename T, int Sets>
struct PointsView {
  const T* points;  // (count, 3)
  int64_t count;
};

// Point n owns cell n: features (N, 8, C), coordinates in [-1, 1] from the lower to the upper corner, extrapolated
// beyond.
template <typename T>
struct CellLocator {
  using offset_t = int64_t;

  int64_t channels;

  VOXELFIELD_HOST_DEVICE Stencil<T> operator()(const T* points, int64_t index) const {
    const T* point = points + 3 * index;
    Stencil<T> s;
    s.origin = index * kCorners * channels;
    s.empty = !all_finite(point);
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const T half = point[axis] * T(0.5);
      s.weight[axis][0] = T(0.5) - half;
      s.weight[axis][1] = T(0.5) + half;
      s.slope[axis][0] = T(-0.5);
      s.slope[axis][1] = T(0.5);
      s.step[axis] = channels << (2 - axis);
      s.lower[axis] = 0;
    }
    return s;
  }
};

// One of several grids that are sampled at the same points: its values, and the column of its first channel in a row of
// output.
template <typename Locator, typename scalar_t>
struct Level {
  Locator locator;
  scalar_t* data;
  int64_t column;
};

template <typename Locator, typename scalar_t>
struct Levels {
  Level<Locator, scalar_t> level[kMaxLevels] = {};
  int count = 0;
  bool sum;         // levels are summed into the same columns
  int64_t columns;  // length of a row of output

  explicit Levels(int64_t columns, bool sum = false) : sum(sum), columns(columns) {}

  void add(const Level<Locator, scalar_t>& next) { level[count++] = next; }
  VOXELFIELD_HOST_DEVICE const Level<Locator, scalar_t>* begin() const { return level; }
  VOXELFIELD_HOST_DEVICE const Level<Locator, scalar_t>* end() const { return level + count; }
};

}  // namespace voxelfield
