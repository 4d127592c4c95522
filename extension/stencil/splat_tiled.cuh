// Splatting without atomics on the grid: points are binned by tile of the grid, then each tile is summed in shared
// memory and written once. It reads no old value of the gradient, needs no zeroing, and the order of summation can be
// fixed. Steps: count entries per tile, reserve a segment for each, place the entries, (sort each segment), sum.
//
// An entry is a point that touches a vertex of the tile: a point in a cell between tiles is an entry of each of them.
#pragma once

#include "common/divisor.cuh"
#include "common/vector.cuh"
#include "common/warp.cuh"
#include "stencil/trilinear.h"

namespace voxelfield {

// Vertices of a tile along x, y, z, all powers of two. Its sums take up to 8 KiB of shared memory: grids of few
// channels have larger tiles, which spreads the cost of a tile over more entries.
template <int X, int Y, int Z>
struct TileShape {
  static constexpr int kVertices = X * Y * Z;
  VOXELFIELD_HOST_DEVICE static constexpr int size(int axis) { return axis == 0 ? X : axis == 1 ? Y : Z; }
};

using SmallTile = TileShape<4, 4, 8>;   // up to 16 channels at once
using LargeTile = TileShape<8, 4, 16>;  // up to 4 channels
// Channel vectors that a warp sums at once, a chunk; further ones are another task.
constexpr int kTileVectors = 4;
constexpr int kNowhere = INT32_MIN;
constexpr int kPieceEntries = 2048;  // a tile with more entries is split among several warps

// Tiles of all grids of all levels are numbered through.
struct TileLevel {
  int32_t first_tile;
  int32_t first_item;  // an item is one chunk of one tile
  Divisor tiles_per_grid;
  Divisor tiles_along_y;
  Divisor tiles_along_z;
  Divisor chunks;
  int32_t vectors;  // of all chunks together
};

struct TileLevels {
  TileLevel level[kMaxLevels];
  int32_t tiles;
  int32_t items;
  Divisor chunks;   // most of any level
  int32_t vectors;  // most in a chunk of any level
  int32_t held;     // vectors of sums per vertex, copies included, that a warp must have room for
};

// Entries of one tile.
struct Segment {
  int32_t start;
  int32_t count;

  VOXELFIELD_HOST_DEVICE bool is_split(int32_t piece = kPieceEntries) const { return count > piece; }
  VOXELFIELD_HOST_DEVICE int32_t parts(int32_t piece = kPieceEntries) const { return (count + piece - 1) / piece; }
};

struct Piece {
  int32_t tile;
  int32_t part;
};

struct TileCursors {
  int32_t entries;
  int32_t pieces;
  int32_t unsorted;
  int32_t parts;  // of bins
};

// Counts a thread's home, or, with `Place`, returns the place of its entry there. Neighbouring points, samples of a
// ray, often share their home: one thread speaks for them. All threads of a warp take part, with -1 those that have
// none.
template <bool Place>
__device__ __forceinline__ int32_t count_home(int32_t* __restrict__ count, int32_t home) {
  const int lane = threadIdx.x % kWarp;
  const int32_t before = __shfl_up_sync(kFullWarp, home, 1);
  const unsigned starts = __ballot_sync(kFullWarp, lane == 0 || before != home);
  const int leader = kWarp - 1 - __clz(starts & (kFullWarp >> (kWarp - 1 - lane)));
  int32_t place = 0;
  if (leader == lane && home >= 0) {
    const unsigned later = lane == kWarp - 1 ? 0 : starts >> (lane + 1);
    place = atomicAdd(count + home, later == 0 ? kWarp - lane : __ffs(later));
  }
  if constexpr (!Place) return 0;
  return __shfl_sync(kFullWarp, place, leader) + lane - leader;
}

// Counts entries, or, with `Place`, writes them to where `count` says the next one of a tile belongs. A point's home is
// the first tile that it touches.
template <typename Shape, bool Place, typename scalar_t, typename Locator, typename T>
__device__ __forceinline__ void for_tile_entries(const Levels<Locator, scalar_t>& levels, const TileLevels& tiles,
                                                 const T* __restrict__ points, int32_t* __restrict__ count,
                                                 int32_t* __restrict__ entries, int64_t n) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int l = 0; l < levels.count; ++l) {
    const TileLevel& own = tiles.level[l];
    const Locator& locator = levels.level[l].locator;
    // Threads without a point read along with the last one, and have no entries.
    const auto s = locator(points, index < n ? index : n - 1);
    const bool empty = s.empty || index >= n;
    int first[3], last[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      first[axis] = max(s.lower[axis], 0) / Shape::size(axis);
      last[axis] = min(s.lower[axis] + 1, locator.resolution[axis] - 1) / Shape::size(axis);
    }
    int32_t base = own.first_tile;
    if (locator.points_per_grid > 0) {
      base += static_cast<int32_t>(index / locator.points_per_grid) * own.tiles_per_grid.value;
    }
    const int32_t along_y = own.tiles_along_z.value, along_x = own.tiles_along_y.value * along_y;
    const int32_t home = empty ? -1 : base + first[0] * along_x + first[1] * along_y + first[2];
    const int32_t place = count_home<Place>(count, home);
    if (empty) continue;
    if constexpr (Place) entries[place] = static_cast<int32_t>(index);
    for (int x = first[0]; x <= last[0]; ++x) {
      for (int y = first[1]; y <= last[1]; ++y) {
        for (int z = first[2]; z <= last[2]; ++z) {
          const int32_t tile = base + x * along_x + y * along_y + z;
          if (tile == home) continue;
          const int32_t at = atomicAdd(count + tile, 1);
          if constexpr (Place) entries[at] = static_cast<int32_t>(index);
        }
      }
    }
  }
}

template <typename Shape, typename scalar_t, typename Locator, typename T>
__global__ void __launch_bounds__(256)
    count_entries(const __grid_constant__ Levels<Locator, scalar_t> levels, const __grid_constant__ TileLevels tiles,
                  const T* __restrict__ points, int32_t* __restrict__ count, int64_t n) {
  for_tile_entries<Shape, false>(levels, tiles, points, count, nullptr, n);
}

// Segments follow one another in no particular order, which nothing depends on. Leaves the first free place in `count`.
static __global__ void __launch_bounds__(256)
    reserve_segments(int32_t* __restrict__ count, Segment* __restrict__ segments, Piece* __restrict__ pieces,
                     TileCursors* __restrict__ cursors, int32_t tiles, int32_t piece) {
  __shared__ int32_t warp_total[256 / kWarp];
  __shared__ int32_t block_start;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int32_t own = tile < tiles ? count[tile] : 0;
  const int32_t up_to_here = warp_inclusive_sum(own, lane);
  if (lane == kWarp - 1) warp_total[warp] = up_to_here;
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t total = 0;
    for (int32_t& each : warp_total) {
      const int32_t here = each;
      each = total;
      total += here;
    }
    block_start = total > 0 ? atomicAdd(&cursors->entries, total) : 0;
  }
  __syncthreads();
  if (tile >= tiles) return;
  const Segment segment{block_start + warp_total[warp] + up_to_here - own, own};
  segments[tile] = segment;
  count[tile] = segment.start;
  if (segment.is_split(piece)) {
    const int32_t parts = segment.parts(piece), first = atomicAdd(&cursors->pieces, parts);
    for (int32_t part = 0; part < parts; ++part) pieces[first + part] = {static_cast<int32_t>(tile), part};
  }
}

// `next` holds the first free place of each tile.
template <typename Shape, typename scalar_t, typename Locator, typename T>
__global__ void __launch_bounds__(256)
    place_entries(const __grid_constant__ Levels<Locator, scalar_t> levels, const __grid_constant__ TileLevels tiles,
                  const T* __restrict__ points, int32_t* __restrict__ next, int32_t* __restrict__ entries, int64_t n) {
  for_tile_entries<Shape, true>(levels, tiles, points, next, entries, n);
}

// What a warp sums: entries of one tile into one chunk of its channels.
struct TileTask {
  int32_t level;
  int32_t tile;
  int32_t chunk;
  int32_t start;
  int32_t count;
  int32_t piece;  // -1: the whole tile, straight into the grid
};

// Finds the task of an item; false if there is none. The items beyond those of whole tiles are pieces.
__device__ __forceinline__ bool find_task(int32_t item, const TileLevels& tiles, int levels,
                                          const Segment* __restrict__ segments, const Piece* __restrict__ pieces,
                                          const TileCursors* __restrict__ cursors, TileTask& task) {
  int32_t part = 0;
  task.level = 0;
  task.piece = -1;
  if (item < tiles.items) {
    while (task.level + 1 < levels && item >= tiles.level[task.level + 1].first_item) ++task.level;
    const TileLevel& own = tiles.level[task.level];
    task.tile = own.first_tile + own.chunks.divide(item - own.first_item, task.chunk);
  } else {
    task.piece = tiles.chunks.divide(item - tiles.items, task.chunk);
    if (task.piece >= cursors->pieces) return false;
    const Piece piece = pieces[task.piece];
    task.tile = piece.tile;
    part = piece.part;
    while (task.level + 1 < levels && task.tile >= tiles.level[task.level + 1].first_tile) ++task.level;
    if (task.chunk >= tiles.level[task.level].chunks.value) return false;
  }
  const int2 stored = __ldg(reinterpret_cast<const int2*>(segments + task.tile));
  const Segment segment{stored.x, stored.y};
  task.start = segment.start;
  task.count = segment.count;
  if (task.piece >= 0) {
    task.start += part * kPieceEntries;
    task.count = min(kPieceEntries, task.count - part * kPieceEntries);
    return true;
  }
  return !segment.is_split();  // its pieces do the work
}

// Lowest vertex of a tile, and which grid of a batch it is in.
template <typename Shape>
struct TilePlace {
  int32_t origin[3];
  int32_t grid;

  template <typename Locator>
  __device__ __forceinline__ TilePlace(const TileLevel& own, const Locator& locator, int32_t tile) {
    int32_t rest = tile - own.first_tile;
    grid = locator.points_per_grid > 0 ? own.tiles_per_grid.divide(rest, rest) : 0;
    const int32_t column = own.tiles_along_z.divide(rest, origin[2]);
    origin[0] = own.tiles_along_y.divide(column, origin[1]);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) origin[axis] *= Shape::size(axis);
  }
};

// How the threads of a warp share the entries of a tile: eight corners times `vectors` threads serve an entry, as many
// entries at once as fit. Entries that are served at once have sums of their own, so that threads never meet.
struct TileLane {
  int vectors;
  int together;  // entries served at once
  int entry;     // of those
  int corner;
  int vector;
  bool serves;

  __device__ __forceinline__ explicit TileLane(int vectors) : vectors(vectors) {
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

template <typename Shape, typename T, int Width, int Sets>
VOXELFIELD_HOST_DEVICE constexpr int tile_shared_bytes(int held) {
  // Sums, then weights and whereabouts of a batch of entries.
  return Shape::kVertices * held * Width * static_cast<int>(sizeof(T)) +
         kWarp * (Sets * kCorners * static_cast<int>(sizeof(T)) + static_cast<int>(sizeof(int2)));
}

template <typename Shape, typename scalar_t, int Width, typename Weights, typename Locator, typename T>
__device__ __forceinline__ void sum_entries(const Level<Locator, scalar_t>& level, const TileTask& task,
                                            const TileLane& lane, const int32_t (&origin)[3],
                                            const scalar_t* __restrict__ values, int64_t columns,
                                            const T* __restrict__ points, const T* __restrict__ directions,
                                            const int32_t* __restrict__ entries, int64_t n, T* sums, T* weights,
                                            int2* where) {
  constexpr int kSets = Weights::kSets;
  constexpr int kUnroll = kSets == 1 ? 4 : 2;
  const int own = threadIdx.x % kWarp;
  const int own_bit = lane.serves ? 1 << lane.corner : 0;
  T* own_sums = sums + ((((lane.corner >> 2) * Shape::size(1) + ((lane.corner >> 1) & 1)) * Shape::size(2) +
                         (lane.corner & 1) + lane.entry * Shape::kVertices) *
                            lane.vectors +
                        lane.vector) *
                           Width;
  const scalar_t* own_values = values + level.column + (task.chunk * kTileVectors + lane.vector) * Width;
  const uint32_t row = static_cast<uint32_t>(columns);
  for (int begin = 0; begin < task.count; begin += kWarp) {
    const int batch = min(kWarp, task.count - begin);
    __syncwarp();
    where[own] = {0, 0};
    if (own < batch) {
      const int32_t index = entries[task.start + begin + own];
      const auto s = level.locator(points, index);
      const Weights weights_of(directions, index);
      int low[3], inside = 0xff;
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        const int upper = axis == 0 ? 0xf0 : axis == 1 ? 0xcc : 0xaa;
        low[axis] = s.lower[axis] - origin[axis];
        if (low[axis] < 0 || low[axis] >= Shape::size(axis)) inside &= upper;
        if (low[axis] + 1 < 0 || low[axis] + 1 >= Shape::size(axis)) inside &= ~upper;
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int k = 0; k < kCorners; ++k) weights[(own * kSets + set) * kCorners + k] = weights_of(s, k, set);
      }
      const int vertex = (low[0] * Shape::size(1) + low[1]) * Shape::size(2) + low[2];
      where[own] = {index, (vertex * lane.vectors * Width) * (1 << kCorners) | inside};
    }
    __syncwarp();
    // A batch is a multiple of what is served at once: places behind its last entry hold none.
    const int2* next = where + lane.entry;
    const T* next_weights = weights + lane.entry * kSets * kCorners + lane.corner % kCorners;
    for (int first = 0; first < batch; first += kUnroll * lane.together) {
      Vector<scalar_t, Width> value[kUnroll][kSets];
      int spot[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int2 entry = next[u * lane.together];
        spot[u] = (entry.y & own_bit) != 0 ? entry.y >> kCorners : kNowhere;
        if (spot[u] != kNowhere) {
          const scalar_t* from = own_values + static_cast<uint64_t>(static_cast<uint32_t>(entry.x)) * row;
#pragma unroll
          for (int set = 0; set < kSets; ++set) value[u][set] = load_constant<Width>(from + set * n * columns);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (spot[u] != kNowhere) {
          Vector<T, Width> sum = load<Width>(own_sums + spot[u]);
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            const T weight = next_weights[(u * lane.together * kSets + set) * kCorners];
#pragma unroll
            for (int i = 0; i < Width; ++i) sum.lane[i] += weight * static_cast<T>(value[u][set].lane[i]);
          }
          store(own_sums + spot[u], sum);
        }
        __syncwarp();
      }
      next += kUnroll * lane.together;
      next_weights += kUnroll * lane.together * kSets * kCorners;
    }
  }
}

// Calls f(offset of a vector in the grid, offset of the same in the tile's sums) for all vectors of `channels`
// channels. Threads keep to their place in a row of vertices along z, so that little is left to work out for each row.
template <typename Shape, int Width, typename Locator, typename F>
__device__ __forceinline__ void for_each_vector(const Locator& locator, const TilePlace<Shape>& place,
                                                int first_channel, int channels, const F& f) {
  constexpr int kSteps = Shape::size(2) * (Shape::kVertices > SmallTile::kVertices ? 4 / Width : 4) > kWarp ? 2 : 1;
  const int vectors = channels / Width, row = Shape::size(2) * vectors;
  const int rows = row == 8 ? 4 : row == 16 ? 2 : 1;
  const int own = threadIdx.x % kWarp, own_row = rows == 1 ? 0 : own / row;
  const int depth = min(Shape::size(2), locator.resolution[2] - place.origin[2]);
  int64_t offset[kSteps];
  int at[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int vector = own - own_row * row + step * kWarp;
    const int vertex = vectors == 3 ? vector / 3 : vector / vectors;
    offset[step] = vertex * locator.channels + (vector - vertex * vectors) * Width;
    at[step] = vector < row && vertex < depth ? (own_row * row + vector) * Width : -1;
  }
  const int64_t along_y = locator.resolution[2] * locator.channels, along_x = along_y * locator.resolution[1];
  int64_t to = place.grid * along_x * locator.resolution[0] + place.origin[0] * along_x +
               (place.origin[1] + own_row) * along_y + place.origin[2] * locator.channels + first_channel;
  const int size_x = min(Shape::size(0), locator.resolution[0] - place.origin[0]);
  const int size_y = min(Shape::size(1), locator.resolution[1] - place.origin[1]);
  for (int x = 0; x < size_x; ++x) {
#pragma unroll
    for (int y = 0; y < Shape::size(1); ++y) {
      if (y % rows != 0 || y + own_row >= size_y) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (at[step] >= 0) f(to + y * along_y + offset[step], (x * Shape::size(1) + y) * row * Width + at[step]);
      }
    }
    to += along_x;
  }
}

// Warps of the first items sum whole tiles, those beyond pieces of the tiles that have too many entries. `Width` is
// that of summation, `OutWidth` that of access to the grid.
template <typename Shape, typename scalar_t, int Width, int OutWidth, typename Weights, int Threads, typename Locator,
          typename T>
__global__ void __launch_bounds__(Threads)
    splat_tiles(const __grid_constant__ Levels<Locator, scalar_t> levels, const __grid_constant__ TileLevels tiles,
                const scalar_t* __restrict__ values, const T* __restrict__ points, const T* __restrict__ directions,
                const Segment* __restrict__ segments, const Piece* __restrict__ pieces,
                const TileCursors* __restrict__ cursors, const int32_t* __restrict__ entries,
                T* __restrict__ piece_sums, int64_t n) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / kWarp, own = threadIdx.x % kWarp;
  TileTask task;
  const int32_t item = blockIdx.x * (Threads / kWarp) + warp;
  if (!find_task(item, tiles, levels.count, segments, pieces, cursors, task)) return;
  const auto& level = levels.level[task.level];
  const TileLevel& tile_level = tiles.level[task.level];
  const TilePlace<Shape> place(tile_level, level.locator, task.tile);
  const int vectors = min(kTileVectors, tile_level.vectors - task.chunk * kTileVectors);
  const int first_channel = task.chunk * kTileVectors * Width, channels = vectors * Width;
  if (task.count == 0) {
    for_each_vector<Shape, OutWidth>(level.locator, place, first_channel, channels, [&](int64_t to, int) {
      store_global(level.data + to, Vector<scalar_t, OutWidth>{});
    });
    return;
  }

  T* sums = reinterpret_cast<T*>(shared + warp * tile_shared_bytes<Shape, T, Width, Weights::kSets>(tiles.held));
  T* weights = sums + Shape::kVertices * tiles.held * Width;
  int2* where = reinterpret_cast<int2*>(weights + kWarp * Weights::kSets * kCorners);
  const TileLane lane(vectors);
  const int size = Shape::kVertices * channels;
  constexpr int kClear = 16 / sizeof(T);
  for (int i = own * kClear; i < size * lane.together; i += kWarp * kClear) store(sums + i, Vector<T, kClear>{});
  sum_entries<Shape, scalar_t, Width, Weights>(level, task, lane, place.origin, values, levels.columns, points,
                                               directions, entries, n, sums, weights, where);
  __syncwarp();
  const auto total = [&](int at) {
    Vector<T, OutWidth> sum = load<OutWidth>(sums + at);
    for (int copy = 1; copy < lane.together; ++copy) {
      const Vector<T, OutWidth> other = load<OutWidth>(sums + copy * size + at);
#pragma unroll
      for (int i = 0; i < OutWidth; ++i) sum.lane[i] += other.lane[i];
    }
    return sum;
  };
  if (task.piece >= 0) {
    const int64_t piece = static_cast<int64_t>(task.piece) * tiles.chunks.value + task.chunk;
    T* out = piece_sums + piece * Shape::kVertices * tiles.vectors * Width;
    for (int i = own * OutWidth; i < size; i += kWarp * OutWidth) store_global(out + i, total(i));
  } else {
    for_each_vector<Shape, OutWidth>(level.locator, place, first_channel, channels, [&](int64_t to, int from) {
      store_global(level.data + to, narrow<scalar_t>(total(from)));
    });
  }
}

// Adds up the pieces of each split tile, in order; one warp for each chunk of channels.
template <typename Shape, typename scalar_t, int Width, int OutWidth, typename Locator, typename T>
__global__ void __launch_bounds__(kWarp)
    join_pieces(const __grid_constant__ Levels<Locator, scalar_t> levels, const __grid_constant__ TileLevels tiles,
                const Segment* __restrict__ segments, const Piece* __restrict__ pieces,
                const TileCursors* __restrict__ cursors, const T* __restrict__ piece_sums) {
  TileTask task;
  const int32_t item = tiles.items + blockIdx.x;
  if (!find_task(item, tiles, levels.count, segments, pieces, cursors, task) || pieces[task.piece].part != 0) return;
  const auto& level = levels.level[task.level];
  const TileLevel& tile_level = tiles.level[task.level];
  const TilePlace<Shape> place(tile_level, level.locator, task.tile);
  const int vectors = min(kTileVectors, tile_level.vectors - task.chunk * kTileVectors);
  const int parts = segments[task.tile].parts();
  const int64_t chunk_size = Shape::kVertices * tiles.vectors * Width, stride = tiles.chunks.value * chunk_size;
  const T* first = piece_sums + task.piece * stride + task.chunk * chunk_size;
  for_each_vector<Shape, OutWidth>(level.locator, place, task.chunk * kTileVectors * Width, vectors * Width,
                                   [&](int64_t to, int from) {
                                     Vector<T, OutWidth> sum{};
                                     for (int part = 0; part < parts; ++part) {
                                       const Vector<T, OutWidth> term = load<OutWidth>(first + part * stride + from);
#pragma unroll
                                       for (int i = 0; i < OutWidth; ++i) sum.lane[i] += term.lane[i];
                                     }
                                     store_global(level.data + to, narrow<scalar_t>(sum));
                                   });
}

}  // namespace voxelfield
