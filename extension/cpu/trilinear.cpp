// Trilinear sampling on the CPU: the three stencil kernels, vectorised over channels and parallel over points.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "../stencil_ops.h"
#include "backend.h"
#include "multiversion.h"

namespace voxelfield {
namespace {

constexpr int64_t kPointsPerTask = 2048;
constexpr int64_t kMaxSlabs = 256;

template <typename scalar_t, typename T>
struct Corners {
  const scalar_t* source[kCorners];
  T weight[kCorners];
};

template <typename scalar_t, typename Weights, typename Locator, typename T = opmath_t<scalar_t>>
VOXELFIELD_MULTIVERSION void gather_range(const scalar_t* source, const T* points, const T* directions, scalar_t* out,
                                          int64_t channels, Locator locator, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const Stencil<T> s = locator(points, n);
    scalar_t* row = out + n * channels;
    if (s.empty) {
      std::fill_n(row, channels, scalar_t(0));
      continue;
    }
    const Weights weights(directions, n);
    Corners<scalar_t, T> corner;
    for (int k = 0; k < kCorners; ++k) {
      corner.source[k] = source + s.offset(k);
      corner.weight[k] = weights(s, k);
    }
    VOXELFIELD_VECTORIZE
    for (int64_t c = 0; c < channels; ++c) {
      T sum = 0;
      for (int k = 0; k < kCorners; ++k) sum += corner.weight[k] * static_cast<T>(corner.source[k][c]);
      row[c] = static_cast<scalar_t>(sum);
    }
  }
}

template <typename scalar_t, typename Weights, typename Locator, typename accumulate_t, typename T = opmath_t<scalar_t>>
VOXELFIELD_MULTIVERSION void scatter_points(const scalar_t* values, const T* points, const T* directions,
                                            accumulate_t* out, int64_t channels, Locator locator, const int64_t* order,
                                            int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t n = order == nullptr ? i : order[i];
    const Stencil<T> s = locator(points, n);
    if (s.empty) {
      if (Locator::kExclusiveCells) std::fill_n(out + s.origin, kCorners * channels, accumulate_t(0));
      continue;
    }
    const Weights weights(directions, n);
    const scalar_t* value = values + n * channels;
    for (int k = 0; k < kCorners; ++k) {
      const T weight = weights(s, k);
      accumulate_t* target = out + s.offset(k);
      if constexpr (Locator::kExclusiveCells) {
        VOXELFIELD_VECTORIZE
        for (int64_t c = 0; c < channels; ++c) target[c] = static_cast<accumulate_t>(weight * static_cast<T>(value[c]));
      } else {
        VOXELFIELD_VECTORIZE
        for (int64_t c = 0; c < channels; ++c) target[c] += weight * static_cast<T>(value[c]);
      }
    }
  }
}

template <typename scalar_t, typename Weights, typename Locator, typename T = opmath_t<scalar_t>>
VOXELFIELD_MULTIVERSION void point_gradient_range(const scalar_t* values, const scalar_t* source, const T* points,
                                                  const T* directions, T* out, int64_t channels, Locator locator,
                                                  int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const Stencil<T> s = locator(points, n);
    T gradient[3] = {0, 0, 0};
    if (!s.empty) {
      const Weights weights(directions, n);
      const scalar_t* value = values + n * channels;
      for (int k = 0; k < kCorners; ++k) {
        const scalar_t* corner = source + s.offset(k);
        T product = 0;
        VOXELFIELD_VECTORIZE_SUM(product)
        for (int64_t c = 0; c < channels; ++c) product += static_cast<T>(value[c]) * static_cast<T>(corner[c]);
        for (int axis = 0; axis < 3; ++axis) gradient[axis] += weights.gradient(s, k, axis) * product;
      }
    }
    std::copy_n(gradient, 3, out + 3 * n);
  }
}

// Points ordered by the slab of x-cells they fall in. A slab touches its own vertices and the first plane of the next
// one, so all even slabs, and then all odd ones, can be written in parallel without atomics. The order within a slab is
// the points' own, which makes the sum bit-reproducible for any number of threads.
struct Slabs {
  std::vector<int64_t> order;
  std::vector<int64_t> start;

  int64_t count() const { return static_cast<int64_t>(start.size()) - 1; }
};

template <typename T>
Slabs sort_into_slabs(const GridLocator<T>& locator, const T* points, int64_t n) {
  const int64_t cells = std::max<int64_t>(locator.resolution[0] - 1, 1);
  const int64_t slabs = std::min(cells, kMaxSlabs);
  const int64_t plane = locator.resolution[1] * locator.resolution[2] * locator.channels;
  const auto slab_of = [&](int64_t i) {
    const int64_t cell = std::min(locator(points, i).origin / plane, cells - 1);
    return cell * slabs / cells;
  };
  std::vector<int32_t> slab(n);
  torch::stable::parallel_for(0, n, kPointsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) slab[i] = static_cast<int32_t>(slab_of(i));
  });
  Slabs sorted{std::vector<int64_t>(n), std::vector<int64_t>(slabs + 1, 0)};
  for (int64_t i = 0; i < n; ++i) ++sorted.start[slab[i] + 1];
  std::partial_sum(sorted.start.begin(), sorted.start.end(), sorted.start.begin());
  std::vector<int64_t> next(sorted.start.begin(), sorted.start.end() - 1);
  for (int64_t i = 0; i < n; ++i) sorted.order[next[slab[i]]++] = i;
  return sorted;
}

struct Cpu : CpuBackend {
  template <typename scalar_t, typename Weights, typename Locator, typename T>
  static void gather(const scalar_t* source, const T* points, const T* directions, scalar_t* out, int64_t n,
                     int64_t channels, const Locator& locator) {
    torch::stable::parallel_for(0, n, kPointsPerTask, [&](int64_t begin, int64_t end) {
      gather_range<scalar_t, Weights>(source, points, directions, out, channels, locator, begin, end);
    });
  }

  template <typename scalar_t, typename Weights, typename T, typename accumulate_t, typename Locator>
  static void scatter(const scalar_t* values, const T* points, const T* directions, accumulate_t* out, int64_t n,
                      int64_t channels, const Locator& locator) {
    const auto write = [&](const int64_t* order, int64_t begin, int64_t end) {
      scatter_points<scalar_t, Weights>(values, points, directions, out, channels, locator, order, begin, end);
    };
    if constexpr (Locator::kExclusiveCells) {
      torch::stable::parallel_for(0, n, kPointsPerTask,
                                  [&](int64_t begin, int64_t end) { write(nullptr, begin, end); });
    } else {
      const Slabs slabs = sort_into_slabs(locator, points, n);
      for (int64_t parity = 0; parity < 2; ++parity) {
        const int64_t pairs = (slabs.count() - parity + 1) / 2;
        torch::stable::parallel_for(0, pairs, 1, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const int64_t slab = 2 * i + parity;
            write(slabs.order.data(), slabs.start[slab], slabs.start[slab + 1]);
          }
        });
      }
    }
  }

  template <typename scalar_t, typename Weights, typename T, typename Locator>
  static void point_gradient(const scalar_t* values, const scalar_t* source, const T* points, const T* directions,
                             T* out, int64_t n, int64_t channels, const Locator& locator) {
    torch::stable::parallel_for(0, n, kPointsPerTask, [&](int64_t begin, int64_t end) {
      point_gradient_range<scalar_t, Weights>(values, source, points, directions, out, channels, locator, begin, end);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  using Ops = StencilOps<Cpu>;
  m.impl("sample_trilinear", TORCH_BOX(&Ops::sample_trilinear));
  m.impl("splat_trilinear", TORCH_BOX(&Ops::splat_trilinear));
  m.impl("point_gradient_trilinear", TORCH_BOX(&Ops::point_gradient_trilinear));
  m.impl("interpolate_cells", TORCH_BOX(&Ops::interpolate_cells));
  m.impl("splat_cells", TORCH_BOX(&Ops::splat_cells));
  m.impl("point_gradient_cells", TORCH_BOX(&Ops::point_gradient_cells));
}

}  // namespace voxelfield
