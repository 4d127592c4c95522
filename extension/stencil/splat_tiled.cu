// Splatting by tiles on CUDA.
#include "common/backend.cuh"
#include "stencil/sort_segments.cuh"
#include "stencil/splat_methods.cuh"
#include "stencil/splat_tiled.cuh"

namespace voxelfield {
namespace {

// Numbers the tiles of all levels.
template <int Width, typename Locator, typename scalar_t>
TileLevels number_tiles(const Levels<Locator, scalar_t>& levels, int64_t n) {
  TileLevels tiles{};
  int32_t max_chunks = 1;
  for (int l = 0; l < levels.count; ++l) {
    const auto& locator = levels.level[l].locator;
    TileLevel& own = tiles.level[l];
    int64_t along[3], per_grid = 1;
    for (int axis = 0; axis < 3; ++axis) {
      along[axis] = (locator.resolution[axis] + tile_size(axis) - 1) / tile_size(axis);
      per_grid *= along[axis];
    }
    own.vectors = static_cast<int32_t>(locator.channels / Width);
    const int32_t chunks = (own.vectors + kTileVectors - 1) / kTileVectors;
    const int64_t grids = locator.points_per_grid > 0 ? n / locator.points_per_grid : 1;
    STD_TORCH_CHECK(tiles.total_chunks + per_grid * grids * chunks < kMaxEntries,
                    "grids must have fewer than 2^30 tiles of 4 x 4 x 8 vertices and 4 vectors of channels together");
    own.first_tile = tiles.tiles;
    own.first_chunk = tiles.total_chunks;
    own.tiles_per_grid = Divisor(static_cast<int32_t>(per_grid));
    own.tiles_along_y = Divisor(static_cast<int32_t>(along[1]));
    own.tiles_along_z = Divisor(static_cast<int32_t>(along[2]));
    own.chunks = Divisor(chunks);
    tiles.tiles += static_cast<int32_t>(per_grid * grids);
    tiles.total_chunks += static_cast<int32_t>(per_grid * grids * chunks);
    max_chunks = std::max(max_chunks, chunks);
    // With one or two vectors several entries are served at once, each into sums of its own.
    tiles.sum_vectors = std::max(tiles.sum_vectors, own.vectors == 3 ? 3 : kTileVectors);
    tiles.max_vectors = std::max(tiles.max_vectors, std::min(own.vectors, kTileVectors));
  }
  tiles.max_chunks = Divisor(max_chunks);
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
  const int64_t n = input.n;
  const TileLevels tiles = number_tiles<Width>(levels, n);
  const int64_t most = max_entries(levels, n);
  STD_TORCH_CHECK(most < kMaxEntries, "points must have fewer than 2^30 entries in tiles, got up to ", most);
  const int64_t pieces = PieceList::max_split_pieces(most, tiles.tiles, kTilePiece);
  const int64_t piece_chunks = pieces * tiles.max_chunks.value;
  Tensor piece_sums =
      new_empty(input.tensor, {piece_chunks * kTileVertices * tiles.max_vectors * Width}, scalar_type_of<T>());
  T* sums = piece_sums.mutable_data_ptr<T>();

  // One allocation, of which counters and counts are zeroed.
  const int64_t ints = kCounterInts + int64_t{4} * tiles.tiles + 2 * pieces + most;
  Tensor scratch = new_empty(input.tensor, {ints}, ScalarType::Int);
  auto* counters = reinterpret_cast<EntryCounters*>(scratch.mutable_data_ptr<int32_t>());
  int32_t* count = scratch.mutable_data_ptr<int32_t>() + kCounterInts;
  int32_t* long_segments = count + tiles.tiles;
  auto* split = reinterpret_cast<Piece*>(long_segments + tiles.tiles);
  auto* segments = reinterpret_cast<Segment*>(split + pieces);
  int32_t* entries = reinterpret_cast<int32_t*>(segments + tiles.tiles);

  const cudaStream_t stream = CudaBackend::stream();
  const auto blocks = CudaBackend::blocks;
  check_cuda(cudaMemsetAsync(counters, 0, (kCounterInts + tiles.tiles) * sizeof(int32_t), stream));
  list_tile_entries<false>
      <<<blocks(n, kThreads), kThreads, 0, stream>>>(levels, tiles, input.points, count, nullptr, n);
  reserve_segments<<<blocks(tiles.tiles, kThreads), kThreads, 0, stream>>>(
      count, segments, counters, tiles.tiles, PieceList::of_split_tiles(split, kTilePiece), PieceList{});
  list_tile_entries<true><<<blocks(n, kThreads), kThreads, 0, stream>>>(levels, tiles, input.points, count, entries, n);
  if (deterministic) {
    sort_short_segments<<<blocks(tiles.tiles, kShortSortThreads / kWarp), kShortSortThreads, 0, stream>>>(
        segments, entries, long_segments, counters, tiles.tiles);
    sort_long_segments<<<kLongSortBlocks, kLongSortThreads, 0, stream>>>(segments, entries, long_segments, counters);
  }
  constexpr int kTileThreads = Weights::kSets == 1 ? 128 : 64;
  constexpr int kWarps = kTileThreads / kWarp;
  const int shared = kWarps * tile_shared_bytes<T, Width, Weights::kSets>(tiles.sum_vectors);
  check_shared_memory(shared);
  splat_tiles<scalar_t, Width, Weights, kTileThreads>
      <<<blocks(tiles.total_chunks + piece_chunks, kWarps), kTileThreads, shared, stream>>>(
          levels, tiles, input.values, input.points, input.directions, segments, split, counters, entries, sums, n);
  if (pieces > 0) {
    join_tile_pieces<scalar_t, Width>
        <<<blocks(piece_chunks, 1), kWarp, 0, stream>>>(levels, tiles, segments, split, counters, sums);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

template <typename Weights, typename scalar_t>
void splat_tiled(const Levels<GridLocator<opmath_t<scalar_t>>, scalar_t>& levels, const SplatInput<scalar_t>& input,
                 bool deterministic) {
  // Sums are accessed in 16 bytes at most, and so may be twice as wide as 16-bit values.
  constexpr int kBytes = 16 * sizeof(scalar_t) / sizeof(opmath_t<scalar_t>);
  dispatch_level_width<Weights, kBytes>(levels, input.values, [&](auto width) {
    dispatch_plain<Weights>(levels, [&](const auto& located) {
      splat_located<decltype(width)::value, Weights>(located, input, deterministic);
    });
  });
}

#define VOXELFIELD_INSTANTIATE_WEIGHTS(scalar_t, Weights)                                                          \
  template void splat_tiled<Weights<opmath_t<scalar_t>>>(const Levels<GridLocator<opmath_t<scalar_t>>, scalar_t>&, \
                                                         const SplatInput<scalar_t>&, bool);
#define VOXELFIELD_INSTANTIATE(scalar_t)                       \
  VOXELFIELD_INSTANTIATE_WEIGHTS(scalar_t, ValueWeights)       \
  VOXELFIELD_INSTANTIATE_WEIGHTS(scalar_t, DirectionalWeights) \
  VOXELFIELD_INSTANTIATE_WEIGHTS(scalar_t, JetWeights)
VOXELFIELD_FOR_EACH_FLOATING(VOXELFIELD_INSTANTIATE)

}  // namespace voxelfield
