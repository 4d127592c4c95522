// Splatting without atomics on the grid. The points are listed by tile of the grid (entries.cuh), then one warp sums
// each tile in shared memory and writes it once. No old value of the gradient is read, the result need not be zeroed,
// and the order of summation can be fixed (splat_tiled.cu).
#pragma once

#include "common/vector.cuh"
#include "stencil/entries.cuh"
#include "stencil/splat_methods.cuh"

namespace voxelfield {

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

}  // namespace voxelfield
