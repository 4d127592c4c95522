// Summing a gradient into grids on CUDA: chooses how each level is summed.
#include "stencil/splat_methods.cuh"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// The measurements behind these choices are in docs/performance.md.
//
// Tiles cost more than atomics for few points, for many points a tile, and for rows that one atomic can add to: four
// float32 channels, or one of a 16-bit grid, which atomics sum in float32 first.
constexpr int64_t kMinTiledPoints = 1 << 15;
constexpr int64_t kMaxPointsPerTile = 48;
// Grids of four channels are summed by bins where each atomic would read and write DRAM: where the float32 sums are
// this many times the size of the L2 cache. Bins need enough points to make up for their fixed cost. With more than one
// point for each vertex, a thread of the atomic kernel adds up several points before it writes.
constexpr int64_t kMinCacheSizes = 2;
constexpr int64_t kMaxVerticesPerPoint = 32;

int64_t vertices_of(const std::vector<int64_t>& shape) { return shape[0] * shape[1] * shape[2] * shape[3]; }

template <typename scalar_t>
bool suits_tiles(int64_t vertices, int64_t channels, int64_t n, SplatMethod method) {
  if (method == SplatMethod::kAtomic) return false;
  if (method == SplatMethod::kTiled || method == SplatMethod::kDeterministic) return true;
  const bool narrow = sizeof(scalar_t) == 2 ? channels == 1 : std::is_same_v<scalar_t, float> && channels <= 4;
  return n >= kMinTiledPoints && n / kMaxPointsPerTile <= vertices / kTileVertices && !narrow && 8 * n < kMaxEntries;
}

bool suits_bins(int64_t vertices, int64_t n) {
  return n <= vertices && n >= vertices / kMaxVerticesPerPoint &&
         vertices * kBinWidth * static_cast<int64_t>(sizeof(float)) >=
             kMinCacheSizes * device_attribute(cudaDevAttrL2CacheSize);
}

// Chooses the finest level that suits bins, if any, and the coarser ones that then join it.
template <typename scalar_t>
SortedBins choose_bins(const Levels<GridLocator<float>, scalar_t>& levels, const SplatInput<scalar_t>& input,
                       SplatMethod method) {
  SortedBins bins;
  const bool forced = method == SplatMethod::kBinned;
  if (!(forced || method == SplatMethod::kAutomatic) || 8 * input.n >= kMaxEntries) return bins;
  const auto fits = [&](int l) {
    const auto& level = levels.level[l];
    const auto& locator = level.locator;
    return locator.is_plain() && locator.channels == kBinWidth &&
           vector_width(kBinWidth, {levels.columns, level.column}, input.values) == kBinWidth &&
           std::max({locator.resolution[0], locator.resolution[1], locator.resolution[2]}) <= kBinMaxResolution;
  };
  int64_t most = 0;
  for (int l = 0; l < levels.count; ++l) {
    const int32_t* resolution = levels.level[l].locator.resolution;
    const int64_t vertices = int64_t{resolution[0]} * resolution[1] * resolution[2];
    if (vertices <= most || !fits(l) || !(forced || suits_bins(vertices, input.n))) continue;
    most = vertices;
    bins.finest = l;
  }
  if (bins.finest < 0) return bins;
  const auto& finest = levels.level[bins.finest];
  bins.grid.bins = cut_into_bins(finest.locator, input.n);
  bins.grid.column = finest.column;
  bins.grid.columns = bins.coarse.columns = levels.columns;
  if (!cut_into_boxes(bins.grid)) {
    bins.finest = -1;
    return bins;
  }
  // Without clamping, a point may lie outside of the finest level but not of a coarser one.
  if (!bins.grid.bins.clamps) return bins;
  for (int l = 0; l < levels.count; ++l) {
    if (l == bins.finest || !fits(l)) continue;
    CoarseLevel& own = bins.coarse.level[bins.coarse.count];
    std::copy_n(levels.level[l].locator.resolution, 3, own.resolution);
    own.column = levels.level[l].column;
    if (cut_window(bins.grid.bins, bins.coarse, own)) bins.coarse_index[l] = bins.coarse.count++;
  }
  return bins;
}

struct Cuda : CudaBackend {
  template <typename scalar_t, typename Weights, typename T>
  static std::vector<Tensor> splat(const Levels<GridLocator<T>, scalar_t>& levels,
                                   const std::vector<std::vector<int64_t>>& shapes, const Tensor& values,
                                   const T* points, const T* directions, int64_t n, SplatMethod method) {
    const SplatInput<scalar_t> input{values, values.const_data_ptr<scalar_t>(), points, directions, n};
    // Levels that are summed the same way share their launches.
    Levels<GridLocator<T>, scalar_t> tiled{};
    Levels<GridLocator<T>, T> dense{};
    tiled.columns = dense.columns = levels.columns;
    const bool deterministic = method == SplatMethod::kDeterministic;
    const int64_t levels_at_once = std::max<int64_t>((kMaxEntries - 1) / (8 * n), 1);
    SortedBins bins;
    if constexpr (kSpecialised<Weights>) bins = choose_bins(levels, input, method);
    std::vector<Tensor> sums;
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      const int64_t vertices = vertices_of(shapes[l]);
      const bool joins_bins = bins.coarse_index[l] >= 0;
      const bool uses_tiles =
          l != bins.finest && !joins_bins && suits_tiles<scalar_t>(vertices, shapes[l][4], n, method);
      // Where several threads add to a vertex in memory, 16-bit grids are summed in float32.
      const bool in_place = l == bins.finest || uses_tiles;
      sums.push_back(new_empty(values, shapes[l], in_place ? values.scalar_type() : scalar_type_of<T>()));
      if (level.locator.channels == 0) continue;
      void* data = sums[l].mutable_data_ptr();
      if (l == bins.finest) {
        bins.grid.data = data;
      } else if (joins_bins) {
        bins.coarse.level[bins.coarse_index[l]].data = static_cast<float*>(data);
      } else if (uses_tiles) {
        if (tiled.count == levels_at_once) {
          splat_tiled<Weights>(tiled, input, deterministic);
          tiled.count = 0;
        }
        tiled.level[tiled.count++] = {level.locator, static_cast<scalar_t*>(data), level.column};
      } else {
        check_cuda(cudaMemsetAsync(data, 0, sums[l].numel() * sizeof(T), stream()));
        const Level<GridLocator<T>, T> zeroed{level.locator, static_cast<T*>(data), level.column};
        if (n > vertices) {
          dense.level[dense.count++] = zeroed;
        } else {
          // A launch of its own: two large grids would push one another out of the L2 cache.
          Levels<GridLocator<T>, T> sparse{{zeroed}, 1, false, levels.columns};
          splat_atomic<Weights>(sparse, input, false);
        }
      }
    }
    if (dense.count > 0) splat_atomic<Weights>(dense, input, true);
    if (tiled.count > 0) splat_tiled<Weights>(tiled, input, deterministic);
    if constexpr (kSpecialised<Weights>) {
      if (bins.finest >= 0) splat_binned(bins, input);
    }
    for (Tensor& sum : sums) {
      if (sum.scalar_type() != values.scalar_type()) sum = torch::stable::to(sum, values.scalar_type());
    }
    return sums;
  }

  template <typename scalar_t, typename T>
  static void accumulate(const Levels<GridLocator<T>, T>& levels, const std::vector<std::vector<int64_t>>& shapes,
                         const Tensor& values, const T* points, int64_t n) {
    const SplatInput<scalar_t> input{values, values.const_data_ptr<scalar_t>(), points, nullptr, n};
    Levels<GridLocator<T>, T> dense{}, sparse{};
    dense.columns = sparse.columns = levels.columns;
    for (int l = 0; l < levels.count; ++l) {
      auto& group = n > vertices_of(shapes[l]) ? dense : sparse;
      if (levels.level[l].locator.channels > 0) group.level[group.count++] = levels.level[l];
    }
    if (dense.count > 0) splat_atomic<ValueWeights<T>>(dense, input, true);
    if (sparse.count > 0) splat_atomic<ValueWeights<T>>(sparse, input, false);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("splat_trilinear", TORCH_BOX(&StencilOps<Cuda>::splat_trilinear));
  m.impl("accumulate_trilinear", TORCH_BOX(&StencilOps<Cuda>::accumulate_trilinear));
}

}  // namespace voxelfield
