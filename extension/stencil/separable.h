// Interpolation along one, two or three axes by kernels that are products over the axes and use one, two or four
// vertices along each of them: nearest, linear, cubic convolution and cubic B-splines. trilinear.h has linear and
// nearest interpolation along three axes, for which there are faster kernels.
//
// The four vertices of a cubic kernel are found separately, as in F.grid_sample: with border padding a vertex beyond a
// face is replaced by the one on the face, with reflection by its mirror image. The vertices of the other kernels
// follow trilinear.h: the point's coordinate is clamped or reflected.
#pragma once

#include <utility>

#include "stencil/trilinear.h"

// Paths that few points take are not inlined, because every kernel would have a copy for each axis and vertex.
#if defined(__CUDACC__)
#define VOXELFIELD_OUT_OF_LINE __host__ __device__ __noinline__
#elif defined(_MSC_VER)
#define VOXELFIELD_OUT_OF_LINE __declspec(noinline)
#else
#define VOXELFIELD_OUT_OF_LINE __attribute__((noinline))
#endif

namespace voxelfield {

// The values are part of the op schemas.
enum class Kernel : int32_t { kNearest = 0, kLinear = 1, kConvolution = 2, kBSpline = 3 };

// A polynomial of degree three and its first two derivatives.
template <typename T>
struct Cubic {
  T coefficient[4];

  VOXELFIELD_HOST_DEVICE T value(T x) const {
    return ((coefficient[3] * x + coefficient[2]) * x + coefficient[1]) * x + coefficient[0];
  }
  VOXELFIELD_HOST_DEVICE T slope(T x) const {
    return (T(3) * coefficient[3] * x + T(2) * coefficient[2]) * x + coefficient[1];
  }
  VOXELFIELD_HOST_DEVICE T bend(T x) const { return T(6) * coefficient[3] * x + T(2) * coefficient[2]; }
};

// A cubic kernel at the distance x from the lower one of the two inner vertices, and x + 1 from the outer one.
template <typename T>
struct CubicKernel {
  Cubic<T> outer, inner;
};

template <typename T>
CubicKernel<T> cubic_kernel(Kernel kernel) {
  if (kernel == Kernel::kBSpline) {
    return {{{T(1) / 6, T(-0.5), T(0.5), T(-1) / 6}}, {{T(2) / 3, T(0), T(-1), T(0.5)}}};
  }
  constexpr T a = T(-0.75);  // of torch; Keys (1981) derives -0.5
  return {{{T(0), a, -2 * a, a}}, {{T(1), T(0), -(a + 3), a + 2}}};
}

// The vertices that a point uses: for each axis their offsets, and their weights with the first and second derivatives
// of these with respect to the point's coordinate. Along the last axis only the first kLast vertices are used.
template <typename T, int D, int K, int kLast = K>
struct Taps {
  int64_t origin;
  int64_t offset[D][K];
  T weight[D][3][K];
  bool empty;  // no vertex contributes: the point is not finite, or outside under zeros padding

  VOXELFIELD_HOST_DEVICE void set_axis(int axis, int k, int32_t vertex, int64_t stride, T value, T slope, T bend) {
    offset[axis][k] = vertex * stride;
    weight[axis][0][k] = value;
    weight[axis][1][k] = slope;
    weight[axis][2][k] = bend;
  }
  VOXELFIELD_HOST_DEVICE int64_t offset_of(int axis, int k) const { return offset[axis][k]; }
  VOXELFIELD_HOST_DEVICE T weight_of(int axis, int order, int k) const { return weight[axis][order][k]; }

  // The same with one vertex along the last axis, so that several threads can share the point.
  VOXELFIELD_HOST_DEVICE Taps<T, D, K, 1> with_last(int chosen) const {
    Taps<T, D, K, 1> one{origin, {}, {}, empty};
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < D; ++axis) {
      VOXELFIELD_UNROLL
      for (int k = 0; k < K; ++k) {
        if (axis == D - 1 && k != chosen) continue;
        const int to = axis == D - 1 ? 0 : k;
        one.offset[axis][to] = offset[axis][k];
        for (int order = 0; order < 3; ++order) one.weight[axis][order][to] = weight[axis][order][k];
      }
    }
    return one;
  }
};

// The vertex of a grid that is reflected or repeated in place of one beyond its faces.
inline VOXELFIELD_OUT_OF_LINE int32_t folded_vertex(int32_t index, int32_t size, bool reflects, bool aligned) {
  const int32_t period = !reflects ? size : !aligned ? 2 * size : size > 1 ? 2 * (size - 1) : 1;
  int32_t phase = index % period;
  if (phase < 0) phase += period;
  return phase < size ? phase : period - phase - (aligned ? 0 : 1);
}

// A coordinate moved into a grid that is reflected or repeated, and whether it then runs backwards.
template <typename T>
VOXELFIELD_OUT_OF_LINE Reflected<T> folded_coordinate(T u, T end, bool reflects, bool aligned) {
  if (!reflects) return {wrap(u, end + T(1)), false};
  const T low = aligned ? T(0) : T(-0.5);
  return reflect(u, low, end - low);
}

// Finds the vertices that a point uses in one of several grids of the same size.
template <typename T, int D, int K>
struct SeparableLocator {
  int32_t resolution[D];
  int64_t stride[D];    // in elements, from one vertex to the next along each axis
  int64_t grid_stride;  // from one grid to the next; 0 if all points read the same grid
  // Vertex coordinates are (point + lead) * rise + shift along each axis.
  T rise[D], shift[D], lead;
  CubicKernel<T> kernel;
  Padding padding;
  bool align_corners;
  bool reversed;  // the point's coordinates are in the opposite order of the axes

  VOXELFIELD_HOST_DEVICE int coordinate(int axis) const { return reversed ? D - 1 - axis : axis; }

  VOXELFIELD_HOST_DEVICE Taps<T, D, K> operator()(const T* points, int64_t index, int64_t grid) const {
    Taps<T, D, K> taps;
    taps.origin = grid * grid_stride;
    taps.empty = false;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < D; ++axis) {
      if (find_axis(axis, points[D * index + coordinate(axis)], padding, taps)) taps.empty = true;
    }
    return taps;
  }

  // The lowest of the vertices along an axis at coordinate u, before vertices beyond the faces are replaced. Sets
  // whether there are none, changes u to what the padding makes of it, and the slope if that is constant or reversed.
  VOXELFIELD_HOST_DEVICE int32_t lowest(int axis, Padding padding, T& u, T& slope, bool& empty) const {
    const int32_t size = resolution[axis], last = size - 1;
    const T end = coordinate_of<T>(last);
    // How far beyond the faces a point still uses vertices of the grid.
    constexpr T reach = K == 4 ? T(2) : T(1);
    const bool folds = padding == Padding::kReflection || padding == Padding::kPeriodic;
    if (folds) {
      const Reflected<T> folded = folded_coordinate(u, end, padding == Padding::kReflection, align_corners);
      if (!(u - u == T(0))) empty = true;  // so far outside that the coordinate has overflowed
      u = folded.u;
      if (folded.reversed) slope = -slope;
    }
    if (padding == Padding::kZeros) {
      if (!(u >= -reach && u < end + reach)) {
        empty = true;
        u = T(0);
      }
    } else if (padding != Padding::kPeriodic) {
      // A cubic kernel also changes beyond the faces, as long as it uses several vertices.
      constexpr T margin = K == 4 ? reach : T(0);
      if (!(u > -margin && u < end + margin)) slope = T(0);
      u = u > -margin ? (u < end + margin ? u : end + margin) : -margin;
    }
    if (K == 1) {
      u = std::rint(u);
      if (padding == Padding::kPeriodic && u > end) u = T(0);
    }
    return index_below(u, last + 3) - (K == 4 ? 1 : 0);
  }

  VOXELFIELD_HOST_DEVICE int32_t replaced(int axis, int32_t vertex, Padding padding) const {
    const int32_t size = resolution[axis], upper = vertex > 0 ? vertex : 0, inside = upper < size ? upper : size - 1;
    if (inside == vertex || padding == Padding::kBorder || padding == Padding::kZeros) return inside;
    return folded_vertex(vertex, size, padding == Padding::kReflection, align_corners);
  }

  // Finds the vertices along one axis of a point with coordinate p; returns whether there are none. `padding` may be a
  // constant, for loops that the compiler vectorises.
  template <typename Target>
  VOXELFIELD_HOST_DEVICE bool find_axis(int axis, T p, Padding padding, Target& taps) const {
    T slope = rise[axis], u = multiply_add(p + lead, rise[axis], shift[axis]);
    bool empty = !(p - p == T(0));
    const int32_t first = lowest(axis, padding, u, slope, empty);
    const T f = u - T(first + (K == 4 ? 1 : 0));
    VOXELFIELD_UNROLL
    for (int k = 0; k < K; ++k) {
      T weight = T(1), first_order = T(0), second_order = T(0);
      if constexpr (K == 2) {
        weight = k == 0 ? T(1) - f : f;
        first_order = k == 0 ? -slope : slope;
      } else if constexpr (K == 4) {
        const Cubic<T>& part = k == 0 || k == 3 ? kernel.outer : kernel.inner;
        const T x = k < 2 ? f : T(1) - f;
        weight = part.value(x);
        first_order = (k < 2 ? slope : -slope) * part.slope(x);
        second_order = slope * slope * part.bend(x);
      }
      const int32_t vertex = first + k;
      if (padding == Padding::kZeros && (vertex < 0 || vertex >= resolution[axis])) {
        weight = first_order = second_order = T(0);
      }
      taps.set_axis(axis, k, replaced(axis, vertex, padding), stride[axis], weight, first_order, second_order);
    }
    return empty;
  }
};

// `kWidth` channels of one point.
template <typename T, int kWidth>
struct Lanes {
  T lane[kWidth];
};

template <typename T, int kWidth, template <typename, int> typename Wide>
VOXELFIELD_HOST_DEVICE void add_product(Wide<T, kWidth>& sum, T factor, const Wide<T, kWidth>& value) {
  VOXELFIELD_VECTORIZE
  for (int i = 0; i < kWidth; ++i) sum.lane[i] += factor * value.lane[i];
}

template <typename T>
VOXELFIELD_HOST_DEVICE void add_product(T& sum, T factor, T value) {
  sum += factor * value;
}

// The value of an interpolant, from order 1 on its derivatives along the axes, and from order 2 on the second ones.
template <typename V, int D>
struct Jet {
  V value;
  V slope[D];
  V bend[D][D];  // [a][b] for a <= b
};

// Sums the vertices of a point over axis kAxis and all later ones. `load(offset)` returns a vertex.
template <int kOrder, int kAxis, typename V, int D, int K, int kLast, typename TapsT, typename Offset, typename Load>
VOXELFIELD_HOST_DEVICE Jet<V, D> sum_axis(const TapsT& taps, Offset offset, const Load& load);

template <int kOrder, int kAxis, typename V, int D, int K, int kLast, typename TapsT, typename Offset, typename Load>
VOXELFIELD_HOST_DEVICE void add_tap(Jet<V, D>& sum, int k, const TapsT& taps, Offset offset, const Load& load) {
  const Jet<V, D> part =
      sum_axis<kOrder, kAxis + 1, V, D, K, kLast>(taps, static_cast<Offset>(offset + taps.offset_of(kAxis, k)), load);
  const auto weight = taps.weight_of(kAxis, 0, k);
  add_product(sum.value, weight, part.value);
  if constexpr (kOrder > 0) {
    const auto slope = taps.weight_of(kAxis, 1, k);
    add_product(sum.slope[kAxis], slope, part.value);
    VOXELFIELD_UNROLL
    for (int a = kAxis + 1; a < D; ++a) add_product(sum.slope[a], weight, part.slope[a]);
    if constexpr (kOrder > 1) {
      add_product(sum.bend[kAxis][kAxis], taps.weight_of(kAxis, 2, k), part.value);
      VOXELFIELD_UNROLL
      for (int a = kAxis + 1; a < D; ++a) {
        add_product(sum.bend[kAxis][a], slope, part.slope[a]);
        VOXELFIELD_UNROLL
        for (int b = a; b < D; ++b) add_product(sum.bend[a][b], weight, part.bend[a][b]);
      }
    }
  }
}

// The taps are written out one after another, so that a loop over points around them can be vectorised.
template <int kOrder, int kAxis, typename V, int D, int K, int kLast, typename TapsT, typename Offset, typename Load,
          int... k>
VOXELFIELD_HOST_DEVICE void add_taps(Jet<V, D>& sum, const TapsT& taps, Offset offset, const Load& load,
                                     std::integer_sequence<int, k...>) {
  (add_tap<kOrder, kAxis, V, D, K, kLast>(sum, k, taps, offset, load), ...);
}

template <int kOrder, int kAxis, typename V, int D, int K, int kLast, typename TapsT, typename Offset, typename Load>
VOXELFIELD_HOST_DEVICE Jet<V, D> sum_axis(const TapsT& taps, Offset offset, const Load& load) {
  Jet<V, D> sum{};
  if constexpr (kAxis == D) {
    sum.value = load(offset);
  } else {
    constexpr int kTaps = kAxis == D - 1 ? kLast : K;
    add_taps<kOrder, kAxis, V, D, K, kLast>(sum, taps, offset, load, std::make_integer_sequence<int, kTaps>{});
  }
  return sum;
}

template <int kOrder, typename V, typename T, int D, int K, int kLast, typename Load>
VOXELFIELD_HOST_DEVICE Jet<V, D> interpolate(const Taps<T, D, K, kLast>& taps, const Load& load) {
  return sum_axis<kOrder, 0, V, D, K, kLast>(taps, taps.origin, load);
}

// A set of results is the interpolant, or one of its derivatives along the axes. Returns its value, and its derivative
// along an axis.
template <typename V, int D>
VOXELFIELD_HOST_DEVICE V& value_of(Jet<V, D>& jet, int set) {
  return set == 0 ? jet.value : jet.slope[set > 0 ? set - 1 : 0];
}

template <typename V, int D>
VOXELFIELD_HOST_DEVICE const V& slope_of(const Jet<V, D>& jet, int set, int axis) {
  const int other = set > 0 ? set - 1 : 0;
  return set == 0 ? jet.slope[axis] : jet.bend[axis < other ? axis : other][axis < other ? other : axis];
}

// What a point gives to its vertices: `put(offset, V)` receives for each vertex the sum over the sets of the weights
// times `values`, which are in the order of the axes.
template <int kSets, int kAxis, int D, int K, int kLast, typename V, typename TapsT, typename Offset, typename Put>
VOXELFIELD_HOST_DEVICE void distribute(const TapsT& taps, Offset offset, const V (&values)[kSets], const Put& put);

template <int kSets, int kAxis, int D, int K, int kLast, typename V, typename TapsT, typename Offset, typename Put>
VOXELFIELD_HOST_DEVICE void distribute_tap(const TapsT& taps, int k, Offset offset, const V (&values)[kSets],
                                           const Put& put) {
  V along[kSets] = {};
  const auto weight = taps.weight_of(kAxis, 0, k);
  add_product(along[0], weight, values[0]);
  if constexpr (kSets > 1) {
    add_product(along[0], taps.weight_of(kAxis, 1, k), values[1 + kAxis]);
    VOXELFIELD_UNROLL
    for (int a = kAxis + 1; a < D; ++a) add_product(along[1 + a], weight, values[1 + a]);
  }
  distribute<kSets, kAxis + 1, D, K, kLast>(taps, static_cast<Offset>(offset + taps.offset_of(kAxis, k)), along, put);
}

template <int kSets, int kAxis, int D, int K, int kLast, typename V, typename TapsT, typename Offset, typename Put>
VOXELFIELD_HOST_DEVICE void distribute(const TapsT& taps, Offset offset, const V (&values)[kSets], const Put& put) {
  if constexpr (kAxis == D) {
    put(offset, values[0]);
  } else {
    VOXELFIELD_UNROLL
    for (int k = 0; k < (kAxis == D - 1 ? kLast : K); ++k) {
      distribute_tap<kSets, kAxis, D, K, kLast>(taps, k, offset, values, put);
    }
  }
}

inline VOXELFIELD_OUT_OF_LINE int64_t quotient(int64_t a, int64_t b) { return a / b; }

// Where the values of points are: rows of channels, or with `planar` results a plane for each channel.
struct ValueLayout {
  int64_t points_per_grid;
  int64_t grid_stride;
  int64_t row_stride;
  int64_t channel_stride;
  int64_t set_stride;

  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t point, int64_t grid) const {
    return grid * grid_stride + (point - grid * points_per_grid) * row_stride;
  }
};

// Sets of values are in the order of the points' coordinates; returns where one is that is numbered by its axis.
template <typename Locator>
VOXELFIELD_HOST_DEVICE int set_of(const Locator& locator, int set) {
  return set == 0 ? 0 : 1 + locator.coordinate(set - 1);
}

}  // namespace voxelfield
