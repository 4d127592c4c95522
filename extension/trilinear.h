// The trilinear stencil: which eight vertices surround a point, with which weights, and how those weights change as the
// point moves. Host and device, forward and every derivative, the grid op and the per-cell op all take it from here.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define VOXELFIELD_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define VOXELFIELD_HOST_DEVICE __forceinline
#else
#define VOXELFIELD_HOST_DEVICE inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define VOXELFIELD_UNROLL _Pragma("unroll")
#else
#define VOXELFIELD_UNROLL
#endif

namespace voxelfield {

// What a point outside the grid sees. The numbers are part of the op schemas.
enum class Padding : int64_t { kBorder = 0, kZeros = 1 };

// Corners are numbered 4*i + 2*j + k for (x, y, z): the memory order of a 2x2x2 block of an (X, Y, Z, C) grid.
constexpr int kCorners = 8;

VOXELFIELD_HOST_DEVICE constexpr int corner_side(int corner, int axis) { return (corner >> (2 - axis)) & 1; }

template <typename T>
struct Stencil {
  int64_t origin;   // element offset of corner 0
  int64_t step[3];  // element offset from the lower to the upper vertex of each axis
  T weight[3][2];   // linear weight of the lower and upper vertex of each axis
  T slope[3][2];    // derivative of that weight with respect to the point's coordinate
  bool empty;       // no vertex contributes: the point is not finite, or outside under zeros padding

  VOXELFIELD_HOST_DEVICE int64_t offset(int corner) const {
    return origin + corner_side(corner, 0) * step[0] + corner_side(corner, 1) * step[1] +
           corner_side(corner, 2) * step[2];
  }

  VOXELFIELD_HOST_DEVICE T value(int corner) const {
    return weight[0][corner_side(corner, 0)] * weight[1][corner_side(corner, 1)] * weight[2][corner_side(corner, 2)];
  }

  // d value / d point[axis]
  VOXELFIELD_HOST_DEVICE T partial(int corner, int axis) const {
    const int b = (axis + 1) % 3, c = (axis + 2) % 3;
    return slope[axis][corner_side(corner, axis)] * weight[b][corner_side(corner, b)] *
           weight[c][corner_side(corner, c)];
  }

  // d^2 value / d point[axis] d point[other]. The weights are linear along each axis: the diagonal is zero.
  VOXELFIELD_HOST_DEVICE T mixed_partial(int corner, int axis, int other) const {
    if (axis == other) return T(0);
    const int rest = 3 - axis - other;
    return slope[axis][corner_side(corner, axis)] * slope[other][corner_side(corner, other)] *
           weight[rest][corner_side(corner, rest)];
  }
};

// The corner weights of interpolation itself, and their gradient with respect to the point.
template <typename T>
struct ValueWeights {
  VOXELFIELD_HOST_DEVICE ValueWeights(const T* /*directions*/, int64_t /*index*/) {}
  VOXELFIELD_HOST_DEVICE T operator()(const Stencil<T>& s, int corner) const { return s.value(corner); }
  VOXELFIELD_HOST_DEVICE T gradient(const Stencil<T>& s, int corner, int axis) const { return s.partial(corner, axis); }
};

// The corner weights of the derivative of interpolation along a direction, and their gradient with respect to the
// point. Every second-order term of the op is one of the three kernels run with these weights.
template <typename T>
struct DirectionalWeights {
  T direction[3];

  VOXELFIELD_HOST_DEVICE DirectionalWeights(const T* directions, int64_t index)
      : direction{directions[3 * index], directions[3 * index + 1], directions[3 * index + 2]} {}

  VOXELFIELD_HOST_DEVICE T operator()(const Stencil<T>& s, int corner) const {
    return direction[0] * s.partial(corner, 0) + direction[1] * s.partial(corner, 1) +
           direction[2] * s.partial(corner, 2);
  }

  VOXELFIELD_HOST_DEVICE T gradient(const Stencil<T>& s, int corner, int axis) const {
    return direction[0] * s.mixed_partial(corner, axis, 0) + direction[1] * s.mixed_partial(corner, axis, 1) +
           direction[2] * s.mixed_partial(corner, axis, 2);
  }
};

template <typename T>
VOXELFIELD_HOST_DEVICE bool all_finite(const T* point) {
  // A sum of products with zero is zero unless a term is infinite or NaN.
  const T zero = point[0] * T(0) + point[1] * T(0) + point[2] * T(0);
  return zero == T(0);
}

// Finds the cell of a dense, contiguous (X, Y, Z, C) grid that holds a point of the unit cube.
template <typename T>
struct GridLocator {
  using Coordinate = T;
  static constexpr bool kExclusiveCells = false;  // several points may share a vertex

  int64_t resolution[3];
  int64_t channels;
  Padding padding;

  VOXELFIELD_HOST_DEVICE Stencil<T> operator()(const T* points, int64_t index) const {
    const T* point = points + 3 * index;
    Stencil<T> s;
    s.origin = 0;
    s.empty = !all_finite(point);
    int64_t stride = channels;
    VOXELFIELD_UNROLL
    for (int axis = 2; axis >= 0; --axis) {
      const int64_t last = resolution[axis] - 1;
      const T scale = T(last);
      const T u = point[axis] * scale;
      int64_t lower = 0, upper = 0;
      T fraction = 0;
      bool has_lower = true, has_upper = true, moves = true;
      if (padding == Padding::kBorder) {
        // At and beyond the faces the clamped coordinate stands still, as in F.grid_sample.
        moves = u > T(0) && u < scale;
        const T clamped = u > T(0) ? (u < scale ? u : scale) : T(0);
        if (!s.empty) lower = static_cast<int64_t>(clamped);
        upper = lower < last ? lower + 1 : last;
        fraction = clamped - T(lower);
      } else if (u >= T(-1) && u < scale + T(1) && !s.empty) {
        const T cell = std::floor(u);
        const int64_t i = static_cast<int64_t>(cell);
        fraction = u - cell;
        has_lower = i >= 0;
        has_upper = i < last;
        lower = has_lower ? i : 0;
        upper = has_upper ? i + 1 : last;
      } else {
        s.empty = true;
      }
      const T rise = moves ? scale : T(0);
      s.weight[axis][0] = has_lower ? T(1) - fraction : T(0);
      s.weight[axis][1] = has_upper ? fraction : T(0);
      s.slope[axis][0] = has_lower ? -rise : T(0);
      s.slope[axis][1] = has_upper ? rise : T(0);
      s.origin += lower * stride;
      s.step[axis] = (upper - lower) * stride;
      stride *= resolution[axis];
    }
    return s;
  }
};

// Point n owns cell n: features (N, 8, C), coordinates in [-1, 1] from the lower to the upper corner, extrapolated
// beyond.
template <typename T>
struct CellLocator {
  using Coordinate = T;
  static constexpr bool kExclusiveCells = true;

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
    }
    return s;
  }
};

}  // namespace voxelfield
