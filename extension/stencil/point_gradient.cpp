// The gradient to the points on the CPU: how the weighted sum of a point's corners changes as the point moves, times
// the gradient that comes back, summed over channels.
#include "common/backend.h"
#include "common/narrow.h"
#include "stencil/batches.h"
#include "stencil/corner_sums.h"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

template <typename scalar_t, typename Weights, typename T>
VOXELFIELD_HOST_DEVICE void add_by_channel(const scalar_t* data, const Stencil<T>& s, const Weights& weights, int set,
                                           int64_t channels, const scalar_t* value, T* gradient) {
  CornerSlope<scalar_t, T> sum;
  sum.value = value;
  sum.gradient = gradient;
  for (int k = 0; k < kCorners; ++k) {
    sum.corner[k] = data + s.offset(k);
    for (int axis = 0; axis < 3; ++axis) sum.slope[axis][k] = weights.gradient(s, k, axis, set);
  }
  if constexpr (kConvertsRows<scalar_t>) {
    float16_corners.add_gradient(sum, channels);
  } else {
    for_each_piece(channels, sum);
  }
}

template <typename scalar_t, typename Weights, typename T>
VOXELFIELD_HOST_DEVICE void add_by_corner(const scalar_t* data, const Stencil<T>& s, const Weights& weights, int set,
                                          int64_t channels, const scalar_t* value, T* gradient) {
  for (int k = 0; k < kCorners; ++k) {
    const T product = dot(value, data + s.offset(k), channels);
    for (int axis = 0; axis < 3; ++axis) gradient[axis] += weights.gradient(s, k, axis, set) * product;
  }
}

template <typename scalar_t, typename Weights, typename Locator, typename T = opmath_t<scalar_t>>
VOXELFIELD_MULTIVERSION void point_gradient_range(const Levels<Locator, const scalar_t>& levels, const scalar_t* values,
                                                  const T* points, const T* directions, T* out, int64_t n,
                                                  int64_t begin, int64_t end) {
  std::fill(out + 3 * begin, out + 3 * end, T(0));
  Stencil<T> stencils[kPointsPerBatch];
  for (int64_t first = begin; first < end; first += kPointsPerBatch) {
    const int64_t count = std::min(kPointsPerBatch, end - first);
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      const int64_t channels = level.locator.channels;
      locate(level.locator, points, Consecutive{first}, count, stencils);
      prefetch_corners(level.locator, level.data, stencils, count);
      for (int64_t i = 0; i < count; ++i) {
        const Stencil<T>& s = stencils[i];
        if (s.empty) continue;
        const Weights weights(directions, first + i);
        for (int set = 0; set < Weights::kSets; ++set) {
          const scalar_t* value = values + (set * n + first + i) * levels.columns + level.column;
          T* gradient = out + 3 * (first + i);
          if (kConvertsRows<scalar_t> || channels < kManyChannels) {
            add_by_channel(level.data, s, weights, set, channels, value, gradient);
          } else {
            add_by_corner(level.data, s, weights, set, channels, value, gradient);
          }
        }
      }
    }
  }
}

struct Cpu : CpuBackend {
  template <typename scalar_t, typename Weights, typename Locator, typename T>
  static void point_gradient(const Levels<Locator, const scalar_t>& levels, const scalar_t* values, const T* points,
                             const T* directions, T* out, int64_t n) {
    for_each_range(n, kPointsPerTask, [&](int64_t begin, int64_t end) {
      point_gradient_range<scalar_t, Weights>(levels, values, points, directions, out, n, begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("point_gradient_trilinear", TORCH_BOX(&StencilOps<Cpu>::point_gradient_trilinear));
  m.impl("point_gradient_cells", TORCH_BOX(&StencilOps<Cpu>::point_gradient_cells));
}

}  // namespace voxelfield
