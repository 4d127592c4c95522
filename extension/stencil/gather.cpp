// On the CPU: sampling, for every point and set of weights a weighted sum of the eight corners; and the gradient to the
// points, how that sum changes as the point moves, times the gradient that comes back, summed over channels.
#include <vector>

#include "common/backend.h"
#include "common/narrow.h"
#include "stencil/batches.h"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

template <bool kAdd, typename scalar_t, typename Weights, typename Result, typename T>
VOXELFIELD_HOST_DEVICE void gather_rows(const scalar_t* data, const Stencil<T>& s, const Weights& weights,
                                        int64_t channels, Result* row, int64_t set_stride) {
  constexpr int kSets = Weights::kSets;
  if (s.empty) {
    for (int set = 0; set < kSets && !kAdd; ++set) std::fill_n(row + set * set_stride, channels, Result(0));
    return;
  }
  const scalar_t* corner[kCorners];
  T weight[kSets][kCorners];
  for (int k = 0; k < kCorners; ++k) {
    corner[k] = data + s.offset(k);
    for (int set = 0; set < kSets; ++set) weight[set][k] = weights(s, k, set);
  }
  if constexpr (kConvertsRows<scalar_t>) {
    const auto sum_rows = kAdd ? float16_corners.add : float16_corners.sum;
    sum_rows(corner, weight[0], kSets, channels, row, set_stride);
  } else {
    sum_corners<kAdd>(corner, weight[0], kSets, channels, row, set_stride);
  }
}

// `total` holds the rows of a batch, (kSets, kPointsPerBatch, columns): levels that add up are summed there and rounded
// once, and float16 rows are rounded together.
template <typename Weights, typename Locator, typename scalar_t, typename T>
VOXELFIELD_MULTIVERSION void gather_range(const Levels<Locator, const scalar_t>& levels, const PointsView<T>& at,
                                          scalar_t* out, int64_t begin, int64_t end, T* total) {
  constexpr int kSets = Weights::kSets;
  const int64_t columns = levels.columns, total_stride = kPointsPerBatch * columns;
  Stencil<T> stencils[kPointsPerBatch];
  for (int64_t first = begin; first < end; first += kPointsPerBatch) {
    const int64_t count = std::min(kPointsPerBatch, end - first);
    if (levels.sum) std::fill_n(total, kSets * total_stride, T(0));
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      const int64_t channels = level.locator.channels;
      locate(level.locator, at.points, Consecutive{first}, count, stencils);
      prefetch_corners(level.locator, level.data, stencils, count);
      for (int64_t i = 0; i < count; ++i) {
        T* const total_row = total + i * columns + level.column;
        const Weights weights(at.directions, first + i);
        if (levels.sum) {
          gather_rows<true>(level.data, stencils[i], weights, channels, total_row, total_stride);
        } else if constexpr (kConvertsRows<scalar_t>) {
          gather_rows<false>(level.data, stencils[i], weights, channels, total_row, total_stride);
        } else {
          scalar_t* const row = out + (first + i) * columns + level.column;
          gather_rows<false>(level.data, stencils[i], weights, channels, row, at.count * columns);
        }
      }
    }
    if (!levels.sum && !kConvertsRows<scalar_t>) continue;
    for (int set = 0; set < kSets; ++set) {
      round_values(total + set * total_stride, count * columns, out + (set * at.count + first) * columns);
    }
  }
}

template <typename Weights, typename Locator, typename scalar_t, typename T>
VOXELFIELD_MULTIVERSION void point_gradient_range(const Levels<Locator, const scalar_t>& levels, const scalar_t* values,
                                                  const PointsView<T>& at, T* out, int64_t begin, int64_t end) {
  std::fill(out + 3 * begin, out + 3 * end, T(0));
  Stencil<T> stencils[kPointsPerBatch];
  for (int64_t first = begin; first < end; first += kPointsPerBatch) {
    const int64_t count = std::min(kPointsPerBatch, end - first);
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      locate(level.locator, at.points, Consecutive{first}, count, stencils);
      prefetch_corners(level.locator, level.data, stencils, count);
      for (int64_t i = 0; i < count; ++i) {
        const Stencil<T>& s = stencils[i];
        if (s.empty) continue;
        const Weights weights(at.directions, first + i);
        for (int set = 0; set < Weights::kSets; ++set) {
          CornerSlope<scalar_t, T> sum;
          sum.value = values + (set * at.count + first + i) * levels.columns + level.column;
          sum.gradient = out + 3 * (first + i);
          for (int k = 0; k < kCorners; ++k) {
            sum.corner[k] = level.data + s.offset(k);
            for (int axis = 0; axis < 3; ++axis) sum.slope[axis][k] = weights.gradient(s, k, axis, set);
          }
          if constexpr (kConvertsRows<scalar_t>) {
            float16_corners.add_gradient(sum, level.locator.channels);
          } else {
            add_gradient(sum, level.locator.channels);
          }
        }
      }
    }
  }
}

struct Cpu : CpuBackend {
  template <typename Weights, typename Locator, typename scalar_t, typename T>
  static void gather(Tag<Weights> /*weights*/, const Levels<Locator, const scalar_t>& levels, const PointsView<T>& at,
                     scalar_t* out) {
    ask_for_huge_pages(out, Weights::kSets * at.count * levels.columns * sizeof(scalar_t));
    const bool totals = levels.sum || kConvertsRows<scalar_t>;
    for_each_range(at.count, kPointsPerTask, [&](int64_t begin, int64_t end) {
      std::vector<T> total(totals ? Weights::kSets * kPointsPerBatch * levels.columns : 0);
      gather_range<Weights>(levels, at, out, begin, end, total.data());
    });
  }

  template <typename Weights, typename Locator, typename scalar_t, typename T>
  static void point_gradient(Tag<Weights> /*weights*/, const Levels<Locator, const scalar_t>& levels,
                             const scalar_t* values, const PointsView<T>& at, T* out) {
    for_each_range(at.count, kPointsPerTask, [&](int64_t begin, int64_t end) {
      point_gradient_range<Weights>(levels, values, at, out, begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { StencilOps<Cpu>::implement_gather(m); }

}  // namespace voxelfield
