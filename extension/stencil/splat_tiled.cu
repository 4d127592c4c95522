// Splatting by tiles on CUDA, without atomics on the grid. The points are listed by tile of the grid (entries.cuh),
// then one warp sums each tile in shared memory and writes it once. No old value of the gradient is read, the result
// need not be zeroed, and the order of summation can be fixed.
#include "common/backend.cuh"
#include "common/vector.cuh"
#include "stencil/entries.cuh"
#include "stencil/splat_methods.cuh"

namespace voxelfield {
namespace {

// Number of channel vectors that a warp sums at once. They are called a slice. Further slices of a tile are separate
// tasks.
constexpr int kSplatTileVectors = 4;
constexpr int kSplatTileChunk = 2048;  // a tile with more entries is split among several warps
constexpr int kNowhere = INT32_MIN;

// The tiles of all grids of all levels are numbered consecutively, and so are the slices of all tiles.
struct SplatTileLevel {
  int32_t first_tile;
  int32_t first_slice;
  Divisor tiles_per_grid;
  Divisor tiles_along_y;
  Divisor tiles_along_z;
  Divisor slices;   // slices per tile
  int32_t vectors;  // vectors in all slices of a tile
};

struct SplatTileLevels {
  SplatTileLevel level[kMaxLevels];
  int32_t tiles;
  int32_t total_slices;
  Divisor max_slices;   // maximum slices per tile over all levels
  int32_t max_vectors;  // maximum vectors per slice over all levels
  int32_t sum_vectors;  // vectors of sums per vertex, including copies, for which a warp needs room
};

template <bool Place, typename scalar_t, typename Locator, typename T>
__global__ void __launch_bounds__(kThreads)
    list_tile_entries(const __grid_constant__ Levels<Locator, scalar_t> levels,
                      const __grid_constant__ SplatTileLevels tiles, const T* __restrict__ points, TileCounts count,
                      int32_t* __restrict__ entries, int64_t n) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int l = 0; l < levels.count; ++l) {
    const SplatTileLevel& level_tiles = tiles.level[l];
    const Locator& locator = levels.level[l].locator;
    // Threads without a point read the last point, but add no entries.
    const auto s = locator(points, index < n ? index : n - 1);
    int32_t first[3], last[3], base = level_tiles.first_tile;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      first[axis] = max(s.lower[axis], 0) / splat_tile_size(axis);
      last[axis] = min(s.lower[axis] + 1, locator.resolution[axis] - 1) / splat_tile_size(axis);
    }
    if (locator.points_per_grid > 0) {
      base += static_cast<int32_t>(index / locator.points_per_grid) * level_tiles.tiles_per_grid.value;
    }
    const PointTiles touched(s.empty || index >= n, base, first, last, level_tiles.tiles_along_y.value,
                             level_tiles.tiles_along_z.value);
    add_entries<Place>(touched, static_cast<int32_t>(index), count, entries);
  }
}

// The task of a warp: sums the entries of one tile into one slice of its channels.
struct SplatTileTask {
  int32_t level;
  int32_t tile;
  int32_t slice;
  EntryList entries;
  int32_t chunk;  // index in the list of chunks; -1 for the whole tile, which is written directly to the grid
};

// Finds the task with this number. Returns false if there is none. The tasks of the slices of all tiles come first,
// then those of the slices of the chunks of split tiles.
__device__ __forceinline__ bool find_task(int32_t number, const SplatTileLevels& tiles, int levels,
                                          const EntryList* __restrict__ entry_lists, const Chunk* __restrict__ chunks,
                                          const EntryCounters* __restrict__ counters, SplatTileTask& task) {
  Chunk chunk{};
  task.level = 0;
  task.chunk = -1;
  if (number < tiles.total_slices) {
    while (task.level + 1 < levels && number >= tiles.level[task.level + 1].first_slice) ++task.level;
    const SplatTileLevel& level_tiles = tiles.level[task.level];
    task.tile = level_tiles.first_tile + level_tiles.slices.divide(number - level_tiles.first_slice, task.slice);
  } else {
    task.chunk = tiles.max_slices.divide(number - tiles.total_slices, task.slice);
    if (task.chunk >= counters->split_chunks) return false;
    chunk = chunks[task.chunk];
    task.tile = chunk.tile;
    while (task.level + 1 < levels && task.tile >= tiles.level[task.level + 1].first_tile) ++task.level;
    if (task.slice >= tiles.level[task.level].slices.value) return false;
  }
  const int2 stored = __ldg(reinterpret_cast<const int2*>(entry_lists + task.tile));
  task.entries = {stored.x, stored.y};
  if (task.chunk < 0) return task.entries.count <= kSplatTileChunk;  // otherwise its chunks are summed
  task.entries = task.entries.chunk(chunk.number, kSplatTileChunk);
  return true;
}

// The lowest vertex of a tile, and the grid of a batch that contains the tile.
struct SplatTileBox {
  int32_t origin[3];
  int32_t grid;

  template <typename Locator>
  __device__ __forceinline__ SplatTileBox(const SplatTileLevel& level_tiles, const Locator& locator, int32_t tile) {
    int32_t rest = tile - level_tiles.first_tile;
    grid = locator.points_per_grid > 0 ? level_tiles.tiles_per_grid.divide(rest, rest) : 0;
    const int32_t column = level_tiles.tiles_along_z.divide(rest, origin[2]);
    origin[0] = level_tiles.tiles_along_y.divide(column, origin[1]);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) origin[axis] *= splat_tile_size(axis);
  }
};

// How the threads of a warp share the entries of a tile. Eight corners times `vectors` threads process an entry, and as
// many entries as fit in a warp are processed at once. Each of these has its own sums, so that threads never add to the
// same sum.
struct SplatTileLane {
  int vectors;
  int together;  // entries processed at once
  int entry;     // index among those
  int corner;
  int vector;
  bool serves;

  __device__ __forceinline__ explicit SplatTileLane(int vectors) : vectors(vectors) {
    const int lane = threadIdx.x % kWarp;
    together = vectors == 1 ? 4 : vectors == 2 ? 2 : 1;
    const int threads = kWarp / together;
    entry = lane / threads;
    const int rest = lane % threads;
    corner = vectors == 3 ? rest / 3 : rest / vectors;
    vector = rest - corner * vectors;
    serves = corner < kCorners;
  }
};

// The shared memory of a warp: sums, then the weights and places of 32 entries.
template <typename T, int Width, int Sets>
VOXELFIELD_HOST_DEVICE constexpr int tile_shared_bytes(int sum_vectors) {
  return kSplatTileVertices * sum_vectors * Width * static_cast<int>(sizeof(T)) +
         kWarp * (Sets * kCorners * static_cast<int>(sizeof(T)) + static_cast<int>(sizeof(int2)));
}

template <typename scalar_t, int Width, int kSets, typename Locator, typename T>
__device__ __forceinline__ void sum_entries(const Level<Locator, scalar_t>& level, const SplatTileTask& task,
                                            const SplatTileLane& lane, const int32_t (&origin)[3],
                                            const scalar_t* __restrict__ values, int64_t columns,
                                            const T* __restrict__ points, const int32_t* __restrict__ entries,
                                            int64_t n, T* sums, T* weights, int2* places) {
  constexpr int kUnroll = kSets == 1 ? 4 : 2;
  const int thread = threadIdx.x % kWarp;
  const int lane_bit = lane.serves ? 1 << lane.corner : 0;
  const int lane_vertex =
      (corner_side(lane.corner, 0) * splat_tile_size(1) + corner_side(lane.corner, 1)) * splat_tile_size(2) +
      corner_side(lane.corner, 2) + lane.entry * kSplatTileVertices;
  T* lane_sums = sums + (lane_vertex * lane.vectors + lane.vector) * Width;
  const scalar_t* lane_values = values + level.column + (task.slice * kSplatTileVectors + lane.vector) * Width;
  const uint32_t row = static_cast<uint32_t>(columns);
  for (int begin = 0; begin < task.entries.count; begin += kWarp) {
    const int batch = min(kWarp, task.entries.count - begin);
    __syncwarp();
    places[thread] = {0, 0};
    if (thread < batch) {
      const int32_t index = entries[task.entries.start + begin + thread];
      const auto s = level.locator(points, index);
      // One bit per corner. Nearest lookup has no upper vertex. A weight of zero is not enough, because zero times an
      // infinite value is NaN.
      int low[3], inside = level.locator.nearest ? 1 : 0xff;
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        const int upper = axis == 0 ? 0xf0 : axis == 1 ? 0xcc : 0xaa;
        low[axis] = s.lower[axis] - origin[axis];
        if (low[axis] < 0 || low[axis] >= splat_tile_size(axis)) inside &= upper;
        if (low[axis] + 1 < 0 || low[axis] + 1 >= splat_tile_size(axis)) inside &= ~upper;
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int k = 0; k < kCorners; ++k) weights[(thread * kSets + set) * kCorners + k] = s.corner_weight(k, set);
      }
      const int vertex = (low[0] * splat_tile_size(1) + low[1]) * splat_tile_size(2) + low[2];
      places[thread] = {index, (vertex * lane.vectors * Width) * (1 << kCorners) | inside};
    }
    __syncwarp();
    // 32 is a multiple of the number of entries processed at once, and places after the last entry refer to no corner.
    const int2* next = places + lane.entry;
    const T* next_weights = weights + lane.entry * kSets * kCorners + lane.corner % kCorners;
    for (int first = 0; first < batch; first += kUnroll * lane.together) {
      Vector<scalar_t, Width> value[kUnroll][kSets];
      int at[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int2 entry = next[u * lane.together];
        at[u] = (entry.y & lane_bit) != 0 ? entry.y >> kCorners : kNowhere;
        if (at[u] != kNowhere) {
          const scalar_t* from = lane_values + static_cast<uint64_t>(static_cast<uint32_t>(entry.x)) * row;
#pragma unroll
          for (int set = 0; set < kSets; ++set) value[u][set] = load_constant<Width>(from + set * n * columns);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (at[u] != kNowhere) {
          Vector<T, Width> sum = load<Width>(lane_sums + at[u]);
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            const T weight = next_weights[(u * lane.together * kSets + set) * kCorners];
            add_weighted(sum, weight, value[u][set]);
          }
          store(lane_sums + at[u], sum);
        }
        __syncwarp();
      }
      next += kUnroll * lane.together;
      next_weights += kUnroll * lane.together * kSets * kCorners;
    }
  }
}

// Calls f(offset of a vector in the grid, offset of the vector in the sums of the tile) for all vectors of a task. Each
// thread updates its position in the rows of vertices along z, so that little has to be computed per row.
template <int Width, typename Locator, typename F>
__device__ __forceinline__ void for_each_vector(const Locator& locator, const SplatTileBox& place, int slice,
                                                int vectors, const F& f) {
  static_assert(splat_tile_size(2) * kSplatTileVectors <= kWarp);
  const int row = splat_tile_size(2) * vectors, rows = row == 8 ? 4 : row == 16 ? 2 : 1;
  const int thread = threadIdx.x % kWarp, lane_row = rows == 1 ? 0 : thread / row, vector = thread - lane_row * row;
  const int vertex = vectors == 3 ? vector / 3 : vector / vectors;
  if (vector >= row || vertex >= locator.resolution[2] - place.origin[2]) return;
  const int64_t along_y = locator.resolution[2] * locator.channels, along_x = along_y * locator.resolution[1];
  int64_t to = place.grid * along_x * locator.resolution[0] + place.origin[0] * along_x +
               (place.origin[1] + lane_row) * along_y + (place.origin[2] + vertex) * locator.channels +
               (slice * kSplatTileVectors + vector - vertex * vectors) * Width;
  const int size_x = min(splat_tile_size(0), locator.resolution[0] - place.origin[0]);
  const int size_y = min(splat_tile_size(1), locator.resolution[1] - place.origin[1]);
  for (int x = 0; x < size_x; ++x) {
#pragma unroll
    for (int y = 0; y < splat_tile_size(1); ++y) {
      if (y % rows != 0 || y + lane_row >= size_y) continue;
      f(to + y * along_y, ((x * splat_tile_size(1) + y + lane_row) * row + vector) * Width);
    }
    to += along_x;
  }
}

template <typename scalar_t, int Width, int kSets, int Threads, typename Locator, typename T>
__global__ void __launch_bounds__(Threads)
    splat_tiles(const __grid_constant__ Levels<Locator, scalar_t> levels, const __grid_constant__ SplatTileLevels tiles,
                const scalar_t* __restrict__ values, const T* __restrict__ points,
                const EntryList* __restrict__ entry_lists, const Chunk* __restrict__ chunks,
                const EntryCounters* __restrict__ counters, const int32_t* __restrict__ entries,
                T* __restrict__ chunk_sums, int64_t n) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / kWarp, thread = threadIdx.x % kWarp;
  SplatTileTask task;
  const int32_t number = blockIdx.x * (Threads / kWarp) + warp;
  if (!find_task(number, tiles, levels.count, entry_lists, chunks, counters, task)) return;
  const auto& level = levels.level[task.level];
  const SplatTileLevel& tile_level = tiles.level[task.level];
  const SplatTileBox place(tile_level, level.locator, task.tile);
  const int vectors = min(kSplatTileVectors, tile_level.vectors - task.slice * kSplatTileVectors);
  if (task.entries.count == 0) {
    for_each_vector<Width>(level.locator, place, task.slice, vectors,
                           [&](int64_t to, int) { store_global(level.data + to, Vector<scalar_t, Width>{}); });
    return;
  }

  T* sums = reinterpret_cast<T*>(shared + warp * tile_shared_bytes<T, Width, kSets>(tiles.sum_vectors));
  T* weights = sums + kSplatTileVertices * tiles.sum_vectors * Width;
  int2* places = reinterpret_cast<int2*>(weights + kWarp * kSets * kCorners);
  const SplatTileLane lane(vectors);
  const int size = kSplatTileVertices * vectors * Width;
  constexpr int kClear = 16 / sizeof(T);
  for (int i = thread * kClear; i < size * lane.together; i += kWarp * kClear) store(sums + i, Vector<T, kClear>{});
  sum_entries<scalar_t, Width, kSets>(level, task, lane, place.origin, values, levels.columns, points, entries, n, sums,
                                      weights, places);
  __syncwarp();
  const auto total = [&](int at) {
    Vector<T, Width> sum = load<Width>(sums + at);
    for (int copy = 1; copy < lane.together; ++copy) sum += load<Width>(sums + copy * size + at);
    return sum;
  };
  if (task.chunk >= 0) {
    const int64_t slice = static_cast<int64_t>(task.chunk) * tiles.max_slices.value + task.slice;
    T* out = chunk_sums + slice * kSplatTileVertices * tiles.max_vectors * Width;
    for (int i = thread * Width; i < size; i += kWarp * Width) store_global(out + i, total(i));
  } else {
    for_each_vector<Width>(level.locator, place, task.slice, vectors,
                           [&](int64_t to, int from) { store_global(level.data + to, narrow<scalar_t>(total(from))); });
  }
}

// Adds up the chunks of each split tile in order, with one warp per slice of channels.
template <typename scalar_t, int Width, typename Locator, typename T>
__global__ void __launch_bounds__(kWarp)
    join_tile_chunks(const __grid_constant__ Levels<Locator, scalar_t> levels,
                     const __grid_constant__ SplatTileLevels tiles, const EntryList* __restrict__ entry_lists,
                     const Chunk* __restrict__ chunks, const EntryCounters* __restrict__ counters,
                     const T* __restrict__ chunk_sums) {
  SplatTileTask task;
  const int32_t number = tiles.total_slices + blockIdx.x;
  if (!find_task(number, tiles, levels.count, entry_lists, chunks, counters, task) || chunks[task.chunk].number != 0) {
    return;
  }
  const auto& level = levels.level[task.level];
  const SplatTileLevel& tile_level = tiles.level[task.level];
  const SplatTileBox place(tile_level, level.locator, task.tile);
  const int vectors = min(kSplatTileVectors, tile_level.vectors - task.slice * kSplatTileVectors);
  const int count = entry_lists[task.tile].chunks(kSplatTileChunk);
  const int64_t slice_size = kSplatTileVertices * tiles.max_vectors * Width,
                stride = tiles.max_slices.value * slice_size;
  const T* first = chunk_sums + task.chunk * stride + task.slice * slice_size;
  for_each_vector<Width>(level.locator, place, task.slice, vectors, [&](int64_t to, int from) {
    Vector<T, Width> sum{};
    for (int chunk = 0; chunk < count; ++chunk) sum += load<Width>(first + chunk * stride + from);
    store_global(level.data + to, narrow<scalar_t>(sum));
  });
}

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
