// Summing into a grid on CUDA: by tiles, by bins or with atomics.
#include <array>

#include "common/backend.cuh"
#include "common/launch.cuh"
#include "stencil/levels.cuh"
#include "stencil/sort_segments.cuh"
#include "stencil/splat_atomic.cuh"
#include "stencil/splat_binned.cuh"
#include "stencil/splat_coarse.cuh"
#include "stencil/splat_tiled.cuh"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// When a gradient is summed by tiles, and when with atomics (docs/performance.md has the measurements): atomics are
// quicker for few points, for many points per 4 x 4 x 8 vertices, and for float32 rows no longer than one atomic.
constexpr int64_t kFewPoints = 1 << 15;
constexpr int64_t kManyPoints = 32;
constexpr int64_t kOneAtomic = 4;
constexpr int64_t kMostEntries = int64_t{1} << 30;
// When a grid of four channels is summed by bins: while its float32 sums fit the L2 cache, atomics run at the cache's
// pace, and samples of a ray, which the host cannot tell from random points, find one another there. Sums of twice that
// size make each atomic read and write DRAM, whatever the points. A bin needs points enough for what it costs however
// few they are; beyond one point for each vertex a thread of the atomic kernel adds up several before it writes.
constexpr int64_t kCacheSizes = 2;
constexpr int64_t kVerticesPerPoint = 32;
// Blocks that share what there is to do for split bins: most often nothing.
constexpr int kSplitBlocks = 128;
// Blocks that clear the sums of coarse levels, beside those that count entries.
constexpr int kClearingBlocks = 256;

// Where the tiles of each level begin, and how many there are.
template <typename Shape, int Width, typename Locator, typename element_t>
TileLevels number_tiles(const Levels<Locator, element_t>& levels, int64_t n) {
  TileLevels tiles{};
  int32_t most_chunks = 1;
  for (int l = 0; l < levels.count; ++l) {
    const auto& locator = levels.level[l].locator;
    TileLevel& own = tiles.level[l];
    int64_t along[3], per_grid = 1;
    for (int axis = 0; axis < 3; ++axis) {
      along[axis] = (locator.resolution[axis] + Shape::size(axis) - 1) / Shape::size(axis);
      per_grid *= along[axis];
    }
    own.vectors = static_cast<int32_t>(locator.channels / Width);
    const int32_t chunks = (own.vectors + kTileVectors - 1) / kTileVectors;
    const int64_t grids = locator.points_per_grid > 0 ? n / locator.points_per_grid : 1;
    STD_TORCH_CHECK(tiles.items + per_grid * grids * chunks < kMostEntries,
                    "the grids are too large to be summed by tiles: too many of them");
    own.first_tile = tiles.tiles;
    own.first_item = tiles.items;
    own.tiles_per_grid = Divisor(static_cast<int32_t>(per_grid));
    own.tiles_along_y = Divisor(static_cast<int32_t>(along[1]));
    own.tiles_along_z = Divisor(static_cast<int32_t>(along[2]));
    own.chunks = Divisor(chunks);
    tiles.tiles += static_cast<int32_t>(per_grid * grids);
    tiles.items += static_cast<int32_t>(per_grid * grids * chunks);
    most_chunks = std::max(most_chunks, chunks);
    // Fewer vectors than four leave threads for several entries at once, which need sums of their own.
    tiles.held = std::max(tiles.held, own.vectors == 3 ? 3 : kTileVectors);
    tiles.vectors = std::max(tiles.vectors, std::min(own.vectors, kTileVectors));
  }
  tiles.chunks = Divisor(most_chunks);
  return tiles;
}

// The most entries there can be: a point touches two tiles along each axis at worst.
template <typename Shape, typename Locator, typename element_t>
int64_t most_entries(const Levels<Locator, element_t>& levels, int64_t n) {
  int64_t total = 0;
  for (int l = 0; l < levels.count; ++l) {
    int64_t copies = 1;
    for (int axis = 0; axis < 3; ++axis) copies *= levels.level[l].locator.resolution[axis] > Shape::size(axis) ? 2 : 1;
    total += copies * n;
  }
  return total;
}

struct Cuda : CudaBackend {
  template <typename scalar_t, typename Weights, typename T>
  static std::vector<Tensor> splat(const Levels<GridLocator<T>, scalar_t>& levels,
                                   const std::vector<std::vector<int64_t>>& shapes, const Tensor& values,
                                   const T* points, const T* directions, int64_t n, SplatMethod method) {
    // Levels that are summed the same way share their launches.
    Levels<GridLocator<T>, scalar_t> tiled{};
    Levels<GridLocator<T>, T> dense{}, sparse{};
    tiled.columns = dense.columns = sparse.columns = levels.columns;
    const scalar_t* rows = values.const_data_ptr<scalar_t>();
    const bool deterministic = method == SplatMethod::kDeterministic;
    const int64_t levels_at_once = std::max<int64_t>((kMostEntries - 1) / (8 * n), 1);
    std::vector<Tensor> sums;
    Binned binned;
    if constexpr (kSpecialised<Weights>) binned = choose_binned(levels, rows, n, method);
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      const int64_t vertices = shapes[l][0] * shapes[l][1] * shapes[l][2] * shapes[l][3];
      if (l == binned.finest) {
        sums.push_back(new_empty(values, shapes[l], values.scalar_type()));
        binned.grid.data = sums[l].template mutable_data_ptr<scalar_t>();
      } else if (binned.place[l] < 0 && suits_tiles<scalar_t>(vertices, shapes[l][4], n, method)) {
        sums.push_back(new_empty(values, shapes[l], values.scalar_type()));
        if (tiled.count == levels_at_once) {
          splat_tiled<scalar_t, Weights>(tiled, values, rows, points, directions, n, deterministic);
          tiled.count = 0;
        }
        tiled.level[tiled.count++] = {level.locator, sums[l].template mutable_data_ptr<scalar_t>(), level.column};
      } else {
        // 16-bit grids accumulate in float32.
        sums.push_back(new_empty(values, shapes[l], scalar_type_of<T>()));
        T* data = sums[l].template mutable_data_ptr<T>();
        if (binned.place[l] >= 0) {
          if constexpr (kSpecialised<Weights>) binned.coarse.level[binned.place[l]].data = data;
          continue;
        }
        check_cuda(cudaMemsetAsync(data, 0, sums[l].numel() * sizeof(T), stream()));
        if (n > vertices) {
          dense.level[dense.count++] = {level.locator, data, level.column};
        } else {
          // On its own: two large grids would push one another out of the L2 cache.
          sparse.count = 1;
          sparse.level[0] = {level.locator, data, level.column};
          splat_atomic<scalar_t, Weights>(sparse, rows, points, directions, n, false);
        }
      }
    }
    if (dense.count > 0) splat_atomic<scalar_t, Weights>(dense, rows, points, directions, n, true);
    if (tiled.count > 0) {
      splat_tiled<scalar_t, Weights>(tiled, values, rows, points, directions, n, deterministic);
    }
    if constexpr (kSpecialised<Weights>) {
      if (binned.finest >= 0) splat_binned<scalar_t>(binned, values, rows, points, n);
    }
    for (Tensor& sum : sums) {
      if (sum.scalar_type() != values.scalar_type()) sum = torch::stable::to(sum, values.scalar_type());
    }
    return sums;
  }

  template <typename scalar_t, typename T>
  static void accumulate(const Levels<GridLocator<T>, T>& levels, const std::vector<std::vector<int64_t>>& shapes,
                         const Tensor& values, const T* points, int64_t n) {
    const scalar_t* rows = values.const_data_ptr<scalar_t>();
    Levels<GridLocator<T>, T> dense{}, sparse{};
    dense.columns = sparse.columns = levels.columns;
    for (int l = 0; l < levels.count; ++l) {
      const int64_t vertices = shapes[l][0] * shapes[l][1] * shapes[l][2] * shapes[l][3];
      auto& group = n > vertices ? dense : sparse;
      if (levels.level[l].locator.channels > 0) group.level[group.count++] = levels.level[l];
    }
    if (dense.count > 0)
      splat_atomic<scalar_t, ValueWeights<T>>(dense, rows, points, static_cast<const T*>(nullptr), n, true);
    if (sparse.count > 0)
      splat_atomic<scalar_t, ValueWeights<T>>(sparse, rows, points, static_cast<const T*>(nullptr), n, false);
  }

 private:
  template <typename scalar_t>
  static bool suits_tiles(int64_t vertices, int64_t channels, int64_t n, SplatMethod method) {
    if (method == SplatMethod::kAtomic || channels == 0) return false;
    if (method != SplatMethod::kAutomatic && method != SplatMethod::kBinned) return true;
    const bool narrow = std::is_same_v<scalar_t, float> && channels <= kOneAtomic;
    return n >= kFewPoints && n / kManyPoints <= vertices / SmallTile::kVertices && !narrow && 8 * n < kMostEntries;
  }

  static bool suits_bins(int64_t vertices, int64_t n) {
    return n <= vertices && n >= vertices / kVerticesPerPoint &&
           vertices * kBinWidth * static_cast<int64_t>(sizeof(float)) >=
               kCacheSizes * device_attribute(cudaDevAttrL2CacheSize);
  }

  // What is summed by bins: the finest level that can be, if any, and the coarser ones that can then join it.
  struct Binned {
    int finest = -1;
    BinnedGrid grid{};
    CoarseLevels coarse{};
    std::array<int, kMaxLevels> place;  // among the coarse levels, or -1

    Binned() { place.fill(-1); }
  };

  template <typename scalar_t>
  static Binned choose_binned(const Levels<GridLocator<float>, scalar_t>& levels, const scalar_t* values, int64_t n,
                              SplatMethod method) {
    Binned binned;
    const bool aligned =
        levels.columns % kBinWidth == 0 && reinterpret_cast<uintptr_t>(values) % (kBinWidth * sizeof(scalar_t)) == 0;
    if ((method != SplatMethod::kBinned && method != SplatMethod::kAutomatic) || !aligned || 8 * n >= kMostEntries) {
      return binned;
    }
    const auto fits = [&](int l) {
      const auto& locator = levels.level[l].locator;
      return locator.is_plain() && locator.channels == kBinWidth && levels.level[l].column % kBinWidth == 0 &&
             std::max({locator.resolution[0], locator.resolution[1], locator.resolution[2]}) <= kBinResolution;
    };
    int64_t most = 0;
    for (int l = 0; l < levels.count; ++l) {
      const int32_t* resolution = levels.level[l].locator.resolution;
      const int64_t vertices = int64_t{resolution[0]} * resolution[1] * resolution[2];
      if (vertices <= most || !fits(l) || (method == SplatMethod::kAutomatic && !suits_bins(vertices, n))) continue;
      most = vertices;
      binned.finest = l;
    }
    if (binned.finest < 0) return binned;
    const auto& finest = levels.level[binned.finest];
    binned.grid.bins = cut_into_bins(finest.locator, n);
    binned.grid.column = finest.column;
    binned.grid.columns = binned.coarse.columns = levels.columns;
    if (!cut_into_boxes(binned.grid)) {
      binned.finest = -1;
      return binned;
    }
    // A point may lie outside of the finest level, but not of a coarser one, unless both clamp it.
    if (!binned.grid.bins.clamps) return binned;
    for (int l = 0; l < levels.count; ++l) {
      if (l == binned.finest || !fits(l)) continue;
      CoarseLevel& own = binned.coarse.level[binned.coarse.count];
      std::copy_n(levels.level[l].locator.resolution, 3, own.resolution);
      own.column = levels.level[l].column;
      if (cut_window(binned.grid.bins, binned.coarse, own)) binned.place[l] = binned.coarse.count++;
    }
    return binned;
  }

  template <typename scalar_t>
  static void splat_binned(const Binned& binned, const Tensor& like, const scalar_t* values, const float* points,
                           int64_t n) {
    const BinnedGrid& grid = binned.grid;
    const int32_t bins = grid.bins.count, slot = grid.size();
    const int64_t most = 8 * n, whole_pieces = most / kBinPieceEntries;
    const int64_t most_pieces = std::min<int64_t>(2 * whole_pieces, whole_pieces + bins);
    const int64_t most_parts = binned.coarse.count > 0 ? bins + most / kCoarseEntries : 0;
    const int splitting = most_pieces > 0 ? kSplitBlocks : 0;
    Tensor slot_sums = new_empty(like, {(most_pieces + 1) / 2 * slot * kBinWidth}, ScalarType::Float);
    float* slots = slot_sums.mutable_data_ptr<float>();

    // In one allocation: what starts at zero first.
    constexpr int64_t kCursorInts = 4;
    const int64_t ints = kCursorInts + int64_t{3} * bins + 2 * most_pieces + 3 * most_parts + most;
    Tensor scratch = new_empty(like, {ints}, ScalarType::Int);
    auto* cursors = reinterpret_cast<TileCursors*>(scratch.mutable_data_ptr<int32_t>());
    int32_t* count = scratch.mutable_data_ptr<int32_t>() + kCursorInts;
    auto* pieces = reinterpret_cast<Piece*>(count + bins);
    auto* segments = reinterpret_cast<Segment*>(pieces + most_pieces);
    auto* parts = reinterpret_cast<BinPart*>(segments + bins);
    int32_t* entries = reinterpret_cast<int32_t*>(parts + most_parts);

    const cudaStream_t s = stream();
    check_cuda(cudaMemsetAsync(cursors, 0, (kCursorInts + bins) * sizeof(int32_t), s));
    ClearedSums cleared{};
    for (; cleared.count < binned.coarse.count; ++cleared.count) {
      const CoarseLevel& level = binned.coarse.level[cleared.count];
      cleared.data[cleared.count] = level.data;
      cleared.vectors[cleared.count] = int64_t{level.resolution[0]} * level.resolution[1] * level.resolution[2];
    }
    const int clearing = cleared.count > 0 ? kClearingBlocks : 0;
    count_bin_entries<<<blocks(n, kThreads) + clearing, kThreads, 0, s>>>(grid.bins, points, count, n, cleared,
                                                                          clearing);
    reserve_segments<<<blocks(bins, kThreads), kThreads, 0, s>>>(count, segments, pieces, cursors, bins,
                                                                 kBinPieceEntries);
    const int listing = cleared.count > 0 ? static_cast<int>(blocks(bins, kThreads)) : 0;
    place_bin_entries<<<listing + splitting + blocks(n, kThreads), kThreads, 0, s>>>(
        grid.bins, points, count, entries, n, cursors,
        {segments, parts, kCoarseEntries, slots, slot, listing, splitting});
    if (binned.coarse.count > 0) {
      const auto kernel = splat_coarse<scalar_t>;
      const int shared = binned.coarse.shared_bytes(sizeof(scalar_t));
      allow_shared_memory(kernel, shared);
      // Most often every bin is one part.
      kernel<<<bins, kCoarseThreads, shared, s>>>(binned.coarse, grid.bins, values, points, parts, cursors, entries);
    }
    const auto kernel = splat_bins<scalar_t>;
    allow_shared_memory(kernel, kBinShared);
    kernel<<<bins + splitting, kBinThreads, kBinShared, s>>>(grid, values, points, segments, pieces, cursors, entries,
                                                             slots, splitting);
    if (splitting > 0) {
      write_split_bins<scalar_t><<<splitting, kBinThreads, 0, s>>>(grid, pieces, cursors, slots);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename scalar_t, typename Weights, typename T>
  static void splat_atomic(const Levels<GridLocator<T>, T>& levels, const scalar_t* values, const T* points,
                           const T* directions, int64_t n, bool dense) {
    dispatch_level_width<16 / sizeof(T), scalar_t>(levels, values, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const LaneLayout layout(most_vectors(levels, kWidth));
      const int64_t per_block = layout.points * (kThreads / kWarp);
      dispatch_plain<Weights>(levels, [&](const auto& located) {
        if constexpr (kSpecialised<Weights>) {
          if (!dense) {
            splat_kernel<scalar_t, kWidth, Weights, 1>
                <<<blocks(n, per_block), kThreads, 0, stream()>>>(located, values, points, directions, n, layout);
            return;
          }
        }
        splat_kernel<scalar_t, kWidth, Weights, kWalk>
            <<<blocks(n, per_block * kWalk), kThreads, 0, stream()>>>(located, values, points, directions, n, layout);
      });
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename scalar_t, typename Weights, typename T>
  static void splat_tiled(const Levels<GridLocator<T>, scalar_t>& levels, const Tensor& like, const scalar_t* values,
                          const T* points, const T* directions, int64_t n, bool deterministic) {
    dispatch_level_width<16 / sizeof(T), scalar_t>(levels, values, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      dispatch_plain<Weights>(levels, [&](const auto& located) {
        if constexpr (std::is_same_v<T, float>) {
          if (most_vectors(levels, 1) <= kTileVectors) {
            splat_tiled<LargeTile, scalar_t, 1, kWidth, Weights>(located, like, values, points, directions, n,
                                                                 deterministic);
            return;
          }
        }
        splat_tiled<SmallTile, scalar_t, kWidth, kWidth, Weights>(located, like, values, points, directions, n,
                                                                  deterministic);
      });
    });
  }

  template <typename Shape, typename scalar_t, int Width, int OutWidth, typename Weights, typename Locator, typename T>
  static void splat_tiled(const Levels<Locator, scalar_t>& levels, const Tensor& like, const scalar_t* values,
                          const T* points, const T* directions, int64_t n, bool deterministic) {
    const TileLevels tiles = number_tiles<Shape, Width>(levels, n);
    const int64_t most = most_entries<Shape>(levels, n), whole_pieces = most / kPieceEntries;
    STD_TORCH_CHECK(most < kMostEntries, "too many points to be summed by tiles: ", n);
    const int64_t most_pieces = std::min<int64_t>(2 * whole_pieces, whole_pieces + tiles.tiles);
    const int64_t piece_size = static_cast<int64_t>(Shape::kVertices) * tiles.vectors * Width;
    Tensor piece_sums = new_empty(like, {most_pieces * tiles.chunks.value * piece_size}, scalar_type_of<T>());
    T* sums = piece_sums.mutable_data_ptr<T>();

    // In one allocation: what starts at zero first.
    constexpr int64_t kCursorInts = 4;
    const int64_t ints = kCursorInts + int64_t{4} * tiles.tiles + 2 * most_pieces + most;
    Tensor scratch = new_empty(like, {ints}, ScalarType::Int);
    auto* cursors = reinterpret_cast<TileCursors*>(scratch.mutable_data_ptr<int32_t>());
    int32_t* count = scratch.mutable_data_ptr<int32_t>() + kCursorInts;
    int32_t* unsorted = count + tiles.tiles;
    auto* pieces = reinterpret_cast<Piece*>(unsorted + tiles.tiles);
    auto* segments = reinterpret_cast<Segment*>(pieces + most_pieces);
    int32_t* entries = reinterpret_cast<int32_t*>(segments + tiles.tiles);

    const cudaStream_t s = stream();
    check_cuda(cudaMemsetAsync(cursors, 0, (kCursorInts + tiles.tiles) * sizeof(int32_t), s));
    count_entries<Shape><<<blocks(n, kThreads), kThreads, 0, s>>>(levels, tiles, points, count, n);
    reserve_segments<<<blocks(tiles.tiles, kThreads), kThreads, 0, s>>>(count, segments, pieces, cursors, tiles.tiles,
                                                                        kPieceEntries);
    place_entries<Shape><<<blocks(n, kThreads), kThreads, 0, s>>>(levels, tiles, points, count, entries, n);
    if (deterministic) {
      sort_short_segments<<<blocks(tiles.tiles, 128 / kWarp), 128, 0, s>>>(segments, entries, unsorted, cursors,
                                                                           tiles.tiles);
      sort_long_segments<<<kSortBlocks, kSortThreads, 0, s>>>(segments, entries, unsorted, cursors);
    }
    constexpr int kTileThreads = Weights::kSets == 1 ? 128 : 64;
    constexpr int kWarps = kTileThreads / kWarp;
    const int shared = kWarps * tile_shared_bytes<Shape, T, Width, Weights::kSets>(tiles.held);
    check_shared_memory(shared);
    splat_tiles<Shape, scalar_t, Width, OutWidth, Weights, kTileThreads>
        <<<blocks(tiles.items + most_pieces * tiles.chunks.value, kWarps), kTileThreads, shared, s>>>(
            levels, tiles, values, points, directions, segments, pieces, cursors, entries, sums, n);
    if (most_pieces > 0) {
      join_pieces<Shape, scalar_t, Width, OutWidth><<<blocks(most_pieces * tiles.chunks.value, 1), kWarp, 0, s>>>(
          levels, tiles, segments, pieces, cursors, sums);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("splat_trilinear", TORCH_BOX(&StencilOps<Cuda>::splat_trilinear));
  m.impl("accumulate_trilinear", TORCH_BOX(&StencilOps<Cuda>::accumulate_trilinear));
}

}  // namespace voxelfield
