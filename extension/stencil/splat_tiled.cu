// Splatting by tiles on CUDA.
#include "common/backend.cuh"
#include "stencil/splat_methods.cuh"
#include "stencil/splat_tiled.cuh"

namespace voxelfield {
namespace {

// For a fixed order of summation, the entries of each list are sorted by index.
//
// cub's DeviceSegmentedSort waits for the device, which a CUDA graph cannot capture, and its DeviceSegmentedRadixSort
// takes 200 times as long for the short lists of tiles. cub's warp and block sorts have a maximum length, but the
// length of a list is not limited.
constexpr int kShortList = 512;  // maximum length of a list that one warp sorts
constexpr int kShortSortThreads = 128;
constexpr int kLongSortThreads = 1024;  // threads of a block that sorts a longer list
constexpr int kLongSortShared = 8192;   // entries that such a block sorts in shared memory
constexpr int kLongSortBlocks = 264;

// Bitonic sort by `Threads` threads. Positions beyond `count` are treated as entries that are larger than all others,
// and never move.
template <int Threads, typename Sync>
__device__ __forceinline__ void sort_bitonic(int32_t* values, int count, int thread, const Sync& sync) {
  int size = 1;
  while (size < count) size *= 2;
  const auto order = [&](int low, int high) {
    if (high < count && values[low] > values[high]) {
      const int32_t larger = values[low];
      values[low] = values[high];
      values[high] = larger;
    }
  };
  for (int merged = 2; merged <= size; merged *= 2) {
    for (int i = thread; i < size / 2; i += Threads) {
      const int within = i & (merged / 2 - 1), low = 2 * i - within;
      order(low, low + merged - 1 - 2 * within);
    }
    sync();
    for (int step = merged / 4; step > 0; step /= 2) {
      for (int i = thread; i < size / 2; i += Threads) {
        const int low = 2 * i - (i & (step - 1));
        order(low, low + step);
      }
      sync();
    }
  }
}

// Sorts short lists, one warp per list, and collects the long ones for sort_long_lists.
__global__ void __launch_bounds__(kShortSortThreads)
    sort_short_lists(const EntryList* __restrict__ entry_lists, int32_t* __restrict__ entries,
                     int32_t* __restrict__ long_lists, EntryCounters* __restrict__ counters, int32_t tiles) {
  __shared__ int32_t shared[kShortSortThreads / kWarp][kShortList];
  const int64_t tile = (static_cast<int64_t>(blockIdx.x) * kShortSortThreads + threadIdx.x) / kWarp;
  if (tile >= tiles) return;
  const int lane = threadIdx.x % kWarp;
  const EntryList list = entry_lists[tile];
  if (list.count < 2) return;
  if (list.count > kShortList) {
    if (lane == 0) long_lists[atomicAdd(&counters->long_lists, 1)] = static_cast<int32_t>(tile);
    return;
  }
  int32_t* values = entries + list.start;
  if (list.count <= kWarp) {
    const int32_t entry = lane < list.count ? values[lane] : INT32_MAX;
    int rank = 0;
    for (int other = 0; other < list.count; ++other) rank += __shfl_sync(kFullWarp, entry, other) < entry;
    if (lane < list.count) values[rank] = entry;
    return;
  }
  int32_t* sorted = shared[threadIdx.x / kWarp];
  for (int i = lane; i < list.count; i += kWarp) sorted[i] = values[i];
  __syncwarp();
  sort_bitonic<kWarp>(sorted, list.count, lane, [] { __syncwarp(); });
  for (int i = lane; i < list.count; i += kWarp) values[i] = sorted[i];
}

__global__ void __launch_bounds__(kLongSortThreads)
    sort_long_lists(const EntryList* __restrict__ entry_lists, int32_t* __restrict__ entries,
                    const int32_t* __restrict__ long_lists, const EntryCounters* __restrict__ counters) {
  __shared__ int32_t sorted[kLongSortShared];
  const auto sync = [] { __syncthreads(); };
  for (int i = blockIdx.x; i < counters->long_lists; i += gridDim.x) {
    const EntryList list = entry_lists[long_lists[i]];
    int32_t* values = entries + list.start;
    const bool fits = list.count <= kLongSortShared;
    if (fits) {
      for (int k = threadIdx.x; k < list.count; k += kLongSortThreads) sorted[k] = values[k];
      __syncthreads();
    }
    sort_bitonic<kLongSortThreads>(fits ? sorted : values, list.count, threadIdx.x, sync);
    if (fits) {
      for (int k = threadIdx.x; k < list.count; k += kLongSortThreads) values[k] = sorted[k];
      __syncthreads();
    }
  }
}

// Numbers the tiles of all levels. Adds to `max_entries` the maximum number of entries of n points: a point touches at
// most two tiles along each axis.
template <int Width, typename Locator, typename scalar_t>
SplatTileLevels number_tiles(const Levels<Locator, scalar_t>& levels, int64_t n, int64_t& max_entries) {
  SplatTileLevels tiles{};
  int32_t max_slices = 1;
  for (int l = 0; l < levels.count; ++l) {
    const auto& locator = levels.level[l].locator;
    const auto divisor = [](int64_t value) { return Divisor(static_cast<int32_t>(value)); };
    int64_t along[3], per_grid = 1, touched = 1;
    for (int axis = 0; axis < 3; ++axis) {
      along[axis] = (locator.resolution[axis] + splat_tile_size(axis) - 1) / splat_tile_size(axis);
      per_grid *= along[axis];
      touched *= std::min<int64_t>(along[axis], 2);
    }
    max_entries += touched * n;
    const int32_t vectors = static_cast<int32_t>(locator.channels / Width);
    const int32_t slices = (vectors + kSplatTileVectors - 1) / kSplatTileVectors;
    const int64_t all = per_grid * locator.grids(n);
    STD_TORCH_CHECK(tiles.total_slices + all * slices < kMaxEntries,
                    "grids must have fewer than 2^30 tiles of 4 x 4 x 8 vertices and 4 vectors of channels together");
    tiles.level[l] = {
        tiles.tiles, tiles.total_slices, divisor(per_grid), divisor(along[1]), divisor(along[2]), divisor(slices),
        vectors};
    tiles.tiles += static_cast<int32_t>(all);
    tiles.total_slices += static_cast<int32_t>(all * slices);
    max_slices = std::max(max_slices, slices);
    // With one or two vectors, several entries are processed at once, each with its own sums.
    tiles.sum_vectors = std::max(tiles.sum_vectors, vectors == 3 ? 3 : kSplatTileVectors);
    tiles.max_vectors = std::max(tiles.max_vectors, std::min(vectors, kSplatTileVectors));
  }
  tiles.max_slices = Divisor(max_slices);
  return tiles;
}

template <int Width, int kSets, typename Locator, typename scalar_t>
void splat_located(const Levels<Locator, scalar_t>& levels, const SplatInput<scalar_t, kSets>& input,
                   bool deterministic) {
  using T = opmath_t<scalar_t>;
  const auto launch = [](auto kernel, int64_t items, int per_block, int threads, int shared, const auto&... arguments) {
    CudaBackend::launch(kernel, CudaBackend::blocks(items, per_block), threads, shared, arguments...);
  };
  const T* points = input.at.points;
  const int64_t n = input.at.count;
  int64_t max_entries = 0;
  const SplatTileLevels tiles = number_tiles<Width>(levels, n, max_entries);
  STD_TORCH_CHECK(max_entries < kMaxEntries, "points must have fewer than 2^30 entries in tiles, got up to ",
                  max_entries);
  const EntryLists lists(input.tensor, max_entries, tiles.tiles, kSplatTileChunk);
  const int64_t chunk_slices = lists.split_chunks * tiles.max_slices.value;
  Tensor chunk_sums =
      new_empty(input.tensor, {chunk_slices * kSplatTileVertices * tiles.max_vectors * Width}, scalar_type_of<T>());
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
  constexpr int kSplatTileThreads = kSets == 1 ? 128 : 64, kWarps = kSplatTileThreads / kWarp;
  const int shared = kWarps * tile_shared_bytes<T, Width, kSets>(tiles.sum_vectors);
  check_shared_memory(shared);
  launch(splat_tiles<scalar_t, Width, kSets, kSplatTileThreads, Locator, T>, tiles.total_slices + chunk_slices, kWarps,
         kSplatTileThreads, shared, levels, tiles, input.values, points, lists.lists, lists.chunks, lists.counters,
         lists.entries, sums, n);
  if (lists.split_chunks > 0) {
    launch(join_tile_chunks<scalar_t, Width, Locator, T>, chunk_slices, 1, kWarp, 0, levels, tiles, lists.lists,
           lists.chunks, lists.counters, sums);
  }
}

}  // namespace

template <int Sets, typename scalar_t>
void splat_tiled(const SplatLevels<scalar_t>& levels, const SplatInput<scalar_t, Sets>& input, bool deterministic) {
  // An access to sums is at most 16 bytes, so vectors of 16-bit values, whose sums are twice as wide, are at most 8
  // bytes.
  constexpr int kBytes = 16 * sizeof(scalar_t) / sizeof(opmath_t<scalar_t>);
  dispatch_levels<Sets, kBytes>(levels, input.values, [&](auto width, const auto& located) {
    splat_located<decltype(width)::value>(located, input, deterministic);
  });
}

#define VOXELFIELD_INSTANTIATE(scalar_t)                                                         \
  template void splat_tiled(const SplatLevels<scalar_t>&, const SplatInput<scalar_t, 1>&, bool); \
  template void splat_tiled(const SplatLevels<scalar_t>&, const SplatInput<scalar_t, 4>&, bool);
VOXELFIELD_INSTANTIATE(float)
VOXELFIELD_INSTANTIATE(double)
VOXELFIELD_INSTANTIATE(torch::headeronly::Half)
VOXELFIELD_INSTANTIATE(torch::headeronly::BFloat16)

}  // namespace voxelfield
