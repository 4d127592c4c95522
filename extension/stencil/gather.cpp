// Sampling on the CPU: for every point and set of weights, a weighted sum of the eight corners.
#include <vector>

#include "common/backend.h"
#include "common/narrow.h"
#include "stencil/batches.h"
#include "stencil/corner_sums.h"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

template <bool kAdd, int kSets, typename scalar_t, typename Result, typename T>
VOXELFIELD_HOST_DEVICE void gather_rows(const scalar_t* data, const Stencil<T>& s, const T (&weight)[kSets][kCorners],
                                        int64_t channels, Result* row, int64_t set_stride) {
  CornerSum<kAdd, scalar_t, Result, T> sum;
  for (int k = 0; k < kCorners; ++k) sum.corner[k] = data + s.offset(k);
  if constexpr (kConvertsRows<scalar_t>) {
    const auto sum_rows = kAdd ? float16_corners.add : float16_corners.sum;
    sum_rows(sum.corner, weight[0], kSets, channels, row, set_stride);
  } else {
    for (int set = 0; set < kSets; ++set) {
      sum.weight = weight[set];
      sum.row = row + set * set_stride;
      for_each_piece(channels, sum);
    }
  }
}

// `total` holds the rows of a batch, (kSets, kPointsPerBatch, columns): levels that add up are summed there and rounded
// once, and float16 rows are rounded together.
template <typename scalar_t, typename Weights, typename Locator, typename T = opmath_t<scalar_t>>
VOXELFIELD_MULTIVERSION void gather_range(const Levels<Locator, const scalar_t>& levels, const T* points,
                                          const T* directions, scalar_t* out, int64_t n, int64_t begin, int64_t end,
                                          T* total) {
  constexpr int kSets = Weights::kSets;
  const int64_t columns = levels.columns, total_stride = kPointsPerBatch * columns;
  Stencil<T> stencils[kPointsPerBatch];
  for (int64_t first = begin; first < end; first += kPointsPerBatch) {
    const int64_t count = std::min(kPointsPerBatch, end - first);
    if (levels.sum) std::fill_n(total, kSets * total_stride, T(0));
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      const int64_t channels = level.locator.channels;
      locate(level.locator, points, Consecutive{first}, count, stencils);
      prefetch_corners(level.locator, level.data, stencils, count);
      for (int64_t i = 0; i < count; ++i) {
        const Stencil<T>& s = stencils[i];
        scalar_t* const row = out + (first + i) * columns + level.column;
        T* const total_row = total + i * columns + level.column;
        if (s.empty) {
          for (int set = 0; set < kSets && !levels.sum; ++set) {
            if constexpr (kConvertsRows<scalar_t>) {
              std::fill_n(total_row + set * total_stride, channels, T(0));
            } else {
              std::fill_n(row + set * n * columns, channels, scalar_t(0));
            }
          }
          continue;
        }
        const Weights weights(directions, first + i);
        T weight[kSets][kCorners];
        for (int set = 0; set < kSets; ++set) {
          for (int k = 0; k < kCorners; ++k) weight[set][k] = weights(s, k, set);
        }
        if (!levels.sum) {
          if constexpr (kConvertsRows<scalar_t>) {
            gather_rows<false>(level.data, s, weight, channels, total_row, total_stride);
          } else {
            gather_rows<false>(level.data, s, weight, channels, row, n * columns);
          }
        } else if constexpr (std::is_same_v<Locator, GridLocator<T>>) {
          gather_rows<true>(level.data, s, weight, channels, total_row, total_stride);
        }
      }
    }
    if (!levels.sum && !kConvertsRows<scalar_t>) continue;
    for (int set = 0; set < kSets; ++set) {
      round_values(total + set * total_stride, count * columns, out + (set * n + first) * columns);
    }
  }
}

struct Cpu : CpuBackend {
  template <typename scalar_t, typename Weights, typename Locator, typename T>
  static void gather(const Levels<Locator, const scalar_t>& levels, const T* points, const T* directions, scalar_t* out,
                     int64_t n) {
    ask_for_huge_pages(out, Weights::kSets * n * levels.columns * sizeof(scalar_t));
    const bool totals = levels.sum || kConvertsRows<scalar_t>;
    for_each_range(n, kPointsPerTask, [&](int64_t begin, int64_t end) {
      std::vector<T> total(totals ? Weights::kSets * kPointsPerBatch * levels.columns : 0);
      gather_range<scalar_t, Weights>(levels, points, directions, out, n, begin, end, total.data());
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("sample_trilinear", TORCH_BOX(&StencilOps<Cpu>::sample_trilinear));
  m.impl("interpolate_cells", TORCH_BOX(&StencilOps<Cpu>::interpolate_cells));
}

}  // namespace voxelfield
