// Lists the points that touch each tile of a grid (splat_tiled.cu). This is the first step of summing without atomics
// on the grid.
//
// An entry is a point that touches a vertex of a tile, so a point between tiles has an entry in each of them. The first
// of these tiles along each axis is the home of the point. Listing takes three launches: count the entries of each
// tile, reserve a list for each tile in one array, and place the entries there. The device-wide scan and radix sort of
// cub take longer for the same result (docs/performance.md).
#pragma once

#include <cub/block/block_scan.cuh>

#include "common/backend.cuh"
#include "common/whole_numbers.h"
#include "stencil/trilinear.h"

namespace voxelfield {

struct EntryList {
  int32_t start;
  int32_t count;

  // Divides the list into equal chunks of at most `size` entries and returns the chunk with this number.
  __device__ __forceinline__ EntryList chunk(int32_t number, int32_t size) const {
    const int32_t share = (count + chunks(size) - 1) / chunks(size);
    return {start + number * share, min(share, count - number * share)};
  }
  __device__ __forceinline__ int32_t chunks(int32_t size) const { return (count + size - 1) / size; }
};

struct Chunk {
  int32_t tile;
  int32_t number;  // among the chunks of the tile
};

// The current length of each list.
struct EntryCounters {
  int32_t entries;
  int32_t split_chunks;
  int32_t long_lists;
};
constexpr int64_t kCounterInts = sizeof(EntryCounters) / sizeof(int32_t);

// One counter per tile. If there are few tiles, each counter has its own cache line, because atomics on adjacent
// counters would queue at few slices of the L2 cache.
struct TileCounts {
  int32_t* data;
  int32_t stride;

  static int32_t stride_of(int32_t tiles) { return tiles <= (1 << 15) ? 32 : 1; }
  __device__ __forceinline__ int32_t* operator()(int32_t tile) const { return data + tile * stride; }
};

// Counts the entry of a thread at `home`, or, with `Place`, returns the place of the entry. Neighbouring points, such
// as samples of a ray, often share their home, so one thread counts for all neighbours that do. All threads of a warp
// must take part. Threads without an entry pass -1.
template <bool Place>
__device__ __forceinline__ int32_t count_home(const TileCounts& count, int32_t home) {
  const int lane = threadIdx.x % kWarp;
  const int32_t before = __shfl_up_sync(kFullWarp, home, 1);
  const unsigned starts = __ballot_sync(kFullWarp, lane == 0 || before != home);
  const int leader = kWarp - 1 - __clz(starts & (kFullWarp >> (kWarp - 1 - lane)));
  int32_t place = 0;
  if (leader == lane && home >= 0) {
    const unsigned later = lane == kWarp - 1 ? 0 : starts >> (lane + 1);
    place = atomicAdd(count(home), later == 0 ? kWarp - lane : __ffs(later));
  }
  if constexpr (!Place) return 0;
  return __shfl_sync(kFullWarp, place, leader) + lane - leader;
}

// The tiles that a point touches: its home and, along each axis on which it touches a second tile, the next one. The
// number of tile (x, y, z) is base + (x * along_y + y) * along_z + z.
struct PointTiles {
  int32_t home;     // -1 if the point touches no tile
  int32_t step[3];  // from one tile number to the next along each axis; 0 if the point does not touch the next tile

  __device__ __forceinline__ PointTiles(bool empty, int32_t base, const int32_t (&first)[3], const int32_t (&last)[3],
                                        int32_t along_y, int32_t along_z)
      : home(empty ? -1 : base + (first[0] * along_y + first[1]) * along_z + first[2]),
        step{last[0] > first[0] ? along_y * along_z : 0, last[1] > first[1] ? along_z : 0, last[2] > first[2]} {}
};

// Counts the entries of a point, or, with `Place`, writes each entry to the next free place of its tile, which `count`
// holds. All threads of a warp must take part.
template <bool Place>
__device__ __forceinline__ void add_entries(const PointTiles& tiles, int32_t index, const TileCounts& count,
                                            int32_t* __restrict__ entries) {
  const int32_t home_place = count_home<Place>(count, tiles.home);
  if (tiles.home < 0) return;
  // All counters are incremented before the first entry is written, because each write depends on the result of its
  // atomic.
  int32_t place[kCorners];
#pragma unroll
  for (int k = 1; k < kCorners; ++k) {
    int32_t tile = tiles.home;
    bool touched = true;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      if (corner_side(k, axis) == 0) continue;
      tile += tiles.step[axis];
      touched = touched && tiles.step[axis] > 0;
    }
    place[k] = touched ? atomicAdd(count(tile), 1) : -1;
  }
  if constexpr (Place) {
    entries[home_place] = index;
#pragma unroll
    for (int k = 1; k < kCorners; ++k) {
      if (place[k] >= 0) entries[place[k]] = index;
    }
  }
}

// Reserves a list for each tile, and lists the chunks of tiles with more than `chunk_size` entries. The order of the
// lists, and of the tiles among the chunks, is unspecified; the chunks of a tile are adjacent. On return, `count` holds
// the first free place of each list.
static __global__ void __launch_bounds__(kThreads)
    reserve_lists(TileCounts count, EntryList* __restrict__ entry_lists, EntryCounters* __restrict__ counters,
                  int32_t tiles, Chunk* __restrict__ chunks, int32_t chunk_size) {
  using Scan = cub::BlockScan<int32_t, kThreads>;
  __shared__ typename Scan::TempStorage scratch;
  __shared__ int32_t block_start;
  const int32_t tile = blockIdx.x * kThreads + threadIdx.x;
  // Reserves `own` items for each thread of the block, and returns the start of this thread's items.
  const auto reserve = [&](int32_t own, int32_t* counter) {
    int32_t before, total;
    Scan(scratch).ExclusiveSum(own, before, total);
    if (threadIdx.x == 0) block_start = total > 0 ? atomicAdd(counter, total) : 0;
    __syncthreads();
    before += block_start;
    __syncthreads();
    return before;
  };
  EntryList own{0, tile < tiles ? *count(tile) : 0};
  own.start = reserve(own.count, &counters->entries);
  if (tile < tiles) {
    entry_lists[tile] = own;
    *count(tile) = own.start;
  }
  const int32_t split = own.count > chunk_size ? own.chunks(chunk_size) : 0;
  Chunk* const to = chunks + reserve(split, &counters->split_chunks);
  for (int32_t number = 0; number < split; ++number) to[number] = {tile, number};
}

// The lists of all tiles in one allocation, and the launches that fill them. Tiles with more entries than `chunk_size`
// are split into chunks of at most that size.
struct EntryLists {
  Tensor memory;
  int32_t tiles, chunk_size;
  int64_t split_chunks;  // maximum number
  EntryList* lists;
  Chunk* chunks;
  EntryCounters* counters;
  TileCounts count;
  int32_t *long_lists, *entries;

  EntryLists(const Tensor& like, int64_t max_entries, int32_t tiles, int32_t chunk_size)
      : tiles(tiles),
        chunk_size(chunk_size),
        split_chunks(std::min(2 * (max_entries / chunk_size), max_entries / chunk_size + tiles)) {
    const int64_t counts = int64_t{tiles} * TileCounts::stride_of(tiles);
    const int64_t ints = 2 * (tiles + split_chunks) + kCounterInts + counts + tiles + max_entries;
    memory = new_empty(like, {ints}, ScalarType::Int);
    // Pairs of numbers come first, so that they are aligned.
    lists = reinterpret_cast<EntryList*>(memory.mutable_data_ptr<int32_t>());
    chunks = reinterpret_cast<Chunk*>(lists + tiles);
    counters = reinterpret_cast<EntryCounters*>(chunks + split_chunks);
    count = {reinterpret_cast<int32_t*>(counters + 1), TileCounts::stride_of(tiles)};
    long_lists = count.data + counts;
    entries = long_lists + tiles;
  }

  // list_entries(place) launches a kernel that counts entries, or places them if `place` is true_type.
  template <typename F>
  void fill(const F& list_entries) const {
    const size_t cleared = (kCounterInts + size_t(tiles) * count.stride) * sizeof(int32_t);
    check_cuda(cudaMemsetAsync(counters, 0, cleared, CudaBackend::stream()));
    list_entries(std::false_type{});
    CudaBackend::launch(reserve_lists, CudaBackend::blocks(tiles, kThreads), kThreads, 0, count, lists, counters, tiles,
                        chunks, chunk_size);
    list_entries(std::true_type{});
  }
};

}  // namespace voxelfield
