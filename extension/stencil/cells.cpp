// The gradient in cells on the CPU: every corner belongs to one point, so it is written rather than added to.
#include <vector>

#include "common/backend.h"
#include "common/narrow.h"
#include "stencil/batches.h"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// `spare` has room for the nine rows of a point, if rows are converted.
template <typename scalar_t, typename Weights, typename T = opmath_t<scalar_t>>
VOXELFIELD_MULTIVERSION void write_cells_range(const Levels<CellLocator<T>, scalar_t>& levels, const scalar_t* values,
                                               const T* points, const T* directions, int64_t begin, int64_t end,
                                               T* spare) {
  const int64_t channels = levels.columns;
  for (int64_t n = begin; n < end; ++n) {
    const Stencil<T> s = levels.level[0].locator(points, n);
    const Weights weights(directions, n);
    const auto* value = compute_row(values + n * channels, channels, spare);
    scalar_t* const cell = levels.level[0].data + s.origin;
    for (int k = 0; k < kCorners; ++k) {
      const T weight = weights(s, k, 0);
      if constexpr (kConvertsRows<scalar_t>) {
        T* target = spare + (1 + k) * channels;
        VOXELFIELD_VECTORIZE
        for (int64_t c = 0; c < channels; ++c) target[c] = s.empty ? T(0) : weight * value[c];
      } else {
        scalar_t* target = cell + k * channels;
        VOXELFIELD_VECTORIZE
        for (int64_t c = 0; c < channels; ++c) {
          target[c] = Narrow<scalar_t>::from(s.empty ? T(0) : weight * widen(value[c]));
        }
      }
    }
    if constexpr (kConvertsRows<scalar_t>) round_values(spare + channels, kCorners * channels, cell);
  }
}

struct Cpu : CpuBackend {
  template <typename scalar_t, typename Weights, typename T>
  static void write_cells(const Levels<CellLocator<T>, scalar_t>& levels, const scalar_t* values, const T* points,
                          const T* directions, int64_t n) {
    ask_for_huge_pages(levels.level[0].data, n * kCorners * levels.columns * sizeof(scalar_t));
    for_each_range(n, kPointsPerTask, [&](int64_t begin, int64_t end) {
      std::vector<T> spare(kConvertsRows<scalar_t> ? (1 + kCorners) * levels.columns : 0);
      write_cells_range<scalar_t, Weights>(levels, values, points, directions, begin, end, spare.data());
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { m.impl("splat_cells", TORCH_BOX(&StencilOps<Cpu>::splat_cells)); }

}  // namespace voxelfield
