// Splatting by tiles on CUDA.
#include "common/launch.cuh"
#include "stencil/sort_entries.cuh"
#include "stencil/splat_methods.cuh"
#include "stencil/splat_tiled.cuh"

namespace voxelfield {
namespace {

// Numbers the tiles of all levels.
template <int Width, typename Locator, typename scalar_t>
TileLevels number_tiles(const Levels<Locator, scalar_t>& levels, int64_t n) {
  TileLevels tiles{};
  int32_t max_slices = 1;
  for (int l = 0; l < levels.count; ++l) {
    const auto& locator = levels.level[l].locator;
    TileLevel& own = tiles.level[l];
    int64_t along[3], per_grid = 1;
    for (int axis = 0; axis < 3; ++axis) {
      along[axis] = (locator.resolution[axis] + tile_size(axis) - 1) / tile_size(axis);
      per_grid *= along[axis];
    }
    own.vectors = static_cast<int32_t>(locator.channels / Width);
    const int32_t slices = (own.vectors + kTileVectors - 1) / kTileVectors;
    const int64_t grids = locator.grids(n);
    STD_TORCH_CHECK(tiles.total_slices + per_grid * grids * slices < kMaxEntries,
                    "grids must have fewer than 2^30 tiles of 4 x 4 x 8 vertices and 4 vectors of channels together");
    own.first_tile = tiles.tiles;
    own.first_slice = tiles.total_slices;
    own.tiles_per_grid = Divisor(static_cast<int32_t>(per_grid));
    own.tiles_along_y = Divisor(static_cast<int32_t>(along[1]));
    own.tiles_along_z = Divisor(static_cast<int32_t>(along[2]));
    own.slices = Divisor(slices);
    tiles.tiles += static_cast<int32_t>(per_grid * grids);
    tiles.total_slices += static_cast<int32_t>(per_grid * grids * slices);
    max_slices = std::max(max_slices, slices);
    // With one or two vectors several entries are served at once, each into sums of its own.
    tiles.sum_vectors = std::max(tiles.sum_vectors, own.vectors == 3 ? 3 : kTileVectors);
    tiles.max_vectors = std::max(tiles.max_vectors, std::min(own.vectors, kTileVectors));
  }
  tiles.max_slices = Divisor(max_slices);
  return tiles;
}

// Most entries that n points can have: a point touches at most two tiles along each axis.
template <typename Locator, typename scalar_t>
int64_t max_entries(const Levels<Locator, scalar_t>& levels, int64_t n) {
  int64_t total = 0;
  for (int l = 0; l < levels.count; ++l) {
    int64_t touched = 1;
    for (int axis = 0; axis < 3; ++axis) touched *= levels.level[l].locator.resolution[axis] > tile_size(axis) ? 2 : 1;
    total += touched * n;
  }
  return total;
}

template <int Width, typename Weights, typename Locator, typename scalar_t>
void splat_located(const Levels<Locator, scalar_t>& levels, const SplatInput<scalar_t>& input, bool deterministic) {
  using T = opmath_t<scalar_t>;
  const auto launch = [](auto kernel, int64_t items, int per_block, int threads, int shared, const auto&... arguments) {
    CudaBackend::launch(kernel, CudaBackend::blocks(items, per_block), threads, shared, arguments...);
  };
  const T* points = input.at.points;
  const int64_t n = input.at.count;
  const TileLevels tiles = number_tiles<Width>(levels, n);
  const int64_t most = max_entries(levels, n);
  STD_TORCH_CHECK(most < kMaxEntries, "points must have fewer than 2^30 entries in tiles, got up to ", most);
  const EntryLists lists(input.tensor, most, tiles.tiles, kTileChunk, 0);
  const int64_t chunk_slices = lists.split_chunks * tiles.max_slices.value;
  Tensor chunk_sums =
      new_empty(input.tensor, {chunk_slices * kTileVertices * tiles.max_vectors * Width}, scalar_type_of<T>());
  T* sums = chunk_sums.mutable_data_ptr<T>();

  lists.fill([&](auto place) {
    launch(list_tile_entries<place.value, scalar_t, Locator, T>, n, kThreads, kThreads, 0, levels, tiles, points,
           lists.count, lists.entries, n);
  });
  if (deterministic) {
    launch(sort_short_lists, tiles.tiles, kShortSortThreads / kWarp, kShortSortThreads, 0, lists.lists, lists.entries,
           lists.long_lists, lists.counters, tiles.tiles);
    launch(sort_long_lists, kLongSortBlocks, 1, kLongSortThreads, 0, lists.lists, lists.entries, lists.long_lists,
           lists.counters);
  }
  constexpr int kTileThreads = Weights::kSets == 1 ? 128 : 64, kWarps = kTileThreads / kWarp;
  const int shared = kWarps * tile_shared_bytes<T, Width, Weights::kSets>(tiles.sum_vectors);
  check_shared_memory(shared);
  launch(splat_tiles<scalar_t, Width, Weights, kTileThreads, Locator, T>, tiles.total_slices + chunk_slices, kWarps,
         kTileThreads, shared, levels, tiles, input.values, points, input.at.directions, lists.lists,
         lists.split.chunks, lists.counters, lists.entries, sums, n);
  if (lists.split_chunks > 0) {
    launch(join_tile_chunks<scalar_t, Width, Locator, T>, chunk_slices, 1, kWarp, 0, levels, tiles, lists.lists,
           lists.split.chunks, lists.counters, sums);
  }
}

}  // namespace

template <typename Weights, typename scalar_t>
void splat_tiled(const SplatLevels<scalar_t>& levels, const SplatInput<scalar_t>& input, bool deterministic) {
  // Sums are accessed in 16 bytes at most, and so may be twice as wide as 16-bit values.
  constexpr int kBytes = 16 * sizeof(scalar_t) / sizeof(opmath_t<scalar_t>);
  dispatch_level_width<Weights, kBytes>(levels, input.values, [&](auto width) {
    dispatch_plain<Weights>(levels, [&](const auto& located) {
      splat_located<decltype(width)::value, Weights>(located, input, deterministic);
    });
  });
}

#define VOXELFIELD_INSTANTIATE(scalar_t, Weights) \
  template void splat_tiled<Weights>(const SplatLevels<scalar_t>&, const SplatInput<scalar_t>&, bool);
VOXELFIELD_FOR_EACH_SPLAT(VOXELFIELD_INSTANTIATE)

}  // namespace voxelfield
