// Sampling on the CPU: for every point and set of weights, a weighted sum of the eight corners.
#include <vector>

#include "common/backend.h"
#include "common/huge_pages.h"
#include "common/narrow.h"
#include "stencil/batches.h"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// The corners of one point's cell, weighted and summed into a row: of the output, or with kAdd onto what is in it.
template <bool kAdd, typename scalar_t, typename Result, typename T>
struct CornerSum {
  const scalar_t* corner[kCorners];
  const T* weight;
  Result* row;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void piece(int64_t first) const {
    Result* out = row + first;
    VOXELFIELD_VECTORIZE
    for (int c = 0; c < kWidth; ++c) {
      T sum = kAdd ? widen(out[c]) : T(0);
      for (int k = 0; k < kCorners; ++k) sum += weight[k] * widen(corner[k][first + c]);
      out[c] = Narrow<Result>::from(sum);
    }
  }
};

template <bool kAdd, int kSets, typename scalar_t, typename Result, typename T>
VOXELFIELD_HOST_DEVICE void gather_rows(const scalar_t* data, const Stencil<T>& s, const T (&weight)[kSets][kCorners],
                                        int64_t channels, Result* row, int64_t set_stride) {
  CornerSum<kAdd, scalar_t, Result, T> sum;
  for (int k = 0; k < kCorners; ++k) sum.corner[k] = data + s.offset(k);
  for (int set = 0; set < kSets; ++set) {
    sum.weight = weight[set];
    sum.row = row + set * set_stride;
    for_each_piece(channels, sum);
  }
}

// `total`, for levels that add up, holds the rows of a block, (kSets, kPointsPerBlock, columns): 16-bit grids are
// summed in float32 and rounded once.
template <typename scalar_t, typename Weights, typename Locator, typename T = opmath_t<scalar_t>>
VOXELFIELD_MULTIVERSION void gather_range(const Levels<Locator, const scalar_t>& levels, const T* points,
                                          const T* directions, scalar_t* out, int64_t n, int64_t begin, int64_t end,
                                          T* total) {
  constexpr int kSets = Weights::kSets;
  const int64_t columns = levels.columns;
  Stencil<T> stencils[kPointsPerBlock];
  for (int64_t first = begin; first < end; first += kPointsPerBlock) {
    const int64_t count = std::min(kPointsPerBlock, end - first);
    if (levels.sum) std::fill_n(total, kSets * kPointsPerBlock * columns, T(0));
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      const int64_t channels = level.locator.channels;
      locate(level.locator, points, Consecutive{first}, count, stencils);
      prefetch_corners(level.locator, level.data, stencils, count);
      for (int64_t i = 0; i < count; ++i) {
        const Stencil<T>& s = stencils[i];
        scalar_t* row = out + (first + i) * columns + level.column;
        if (s.empty) {
          for (int set = 0; set < kSets && !levels.sum; ++set) {
            std::fill_n(row + set * n * columns, channels, scalar_t(0));
          }
          continue;
        }
        const Weights weights(directions, first + i);
        T weight[kSets][kCorners];
        for (int set = 0; set < kSets; ++set) {
          for (int k = 0; k < kCorners; ++k) weight[set][k] = weights(s, k, set);
        }
        if (!levels.sum) {
          gather_rows<false>(level.data, s, weight, channels, row, n * columns);
        } else if constexpr (std::is_same_v<Locator, GridLocator<T>>) {
          gather_rows<true>(level.data, s, weight, channels, total + i * columns, kPointsPerBlock * columns);
        }
      }
    }
    for (int set = 0; set < kSets && levels.sum; ++set) {
      const T* sums = total + set * kPointsPerBlock * columns;
      scalar_t* rows = out + (set * n + first) * columns;
      VOXELFIELD_VECTORIZE
      for (int64_t c = 0; c < count * columns; ++c) rows[c] = Narrow<scalar_t>::from(sums[c]);
    }
  }
}

struct Cpu : CpuBackend {
  template <typename scalar_t, typename Weights, typename Locator, typename T>
  static void gather(const Levels<Locator, const scalar_t>& levels, const T* points, const T* directions, scalar_t* out,
                     int64_t n) {
    ask_for_huge_pages(out, Weights::kSets * n * levels.columns * sizeof(scalar_t));
    for_each_range(n, kPointsPerTask, [&](int64_t begin, int64_t end) {
      std::vector<T> total(levels.sum ? Weights::kSets * kPointsPerBlock * levels.columns : 0);
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
