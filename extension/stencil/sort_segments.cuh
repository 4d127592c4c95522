// A fixed order of summation for splat_tiled.cuh: entries of each segment by rising index.
#pragma once

#include "stencil/splat_tiled.cuh"

namespace voxelfield {

constexpr int kShortSegment = 512;  // sorted by a warp
constexpr int kSortThreads = 1024;  // of a block that sorts a longer one
constexpr int kSortShared = 8192;   // entries that such a block holds in shared memory
constexpr int kSortBlocks = 264;

// Bitonic sort by `Threads` threads. Places beyond `count` stand for entries that are larger than all: they never move.
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

// Sorts what a warp can, and lists longer segments for sort_long_segments.
static __global__ void __launch_bounds__(128)
    sort_short_segments(const Segment* __restrict__ segments, int32_t* __restrict__ entries,
                        int32_t* __restrict__ unsorted, TileCursors* __restrict__ cursors, int32_t tiles) {
  __shared__ int32_t held[128 / kWarp][kShortSegment];
  const int64_t tile = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  if (tile >= tiles) return;
  const int lane = threadIdx.x % kWarp;
  const Segment segment = segments[tile];
  if (segment.count < 2) return;
  if (segment.count > kShortSegment) {
    if (lane == 0) unsorted[atomicAdd(&cursors->unsorted, 1)] = static_cast<int32_t>(tile);
    return;
  }
  int32_t* values = entries + segment.start;
  if (segment.count <= kWarp) {
    const int32_t own = lane < segment.count ? values[lane] : INT32_MAX;
    int rank = 0;
    for (int other = 0; other < segment.count; ++other) rank += __shfl_sync(kFullWarp, own, other) < own;
    if (lane < segment.count) values[rank] = own;
    return;
  }
  int32_t* own_held = held[threadIdx.x / kWarp];
  for (int i = lane; i < segment.count; i += kWarp) own_held[i] = values[i];
  __syncwarp();
  sort_bitonic<kWarp>(own_held, segment.count, lane, [] { __syncwarp(); });
  for (int i = lane; i < segment.count; i += kWarp) values[i] = own_held[i];
}

static __global__ void __launch_bounds__(kSortThreads)
    sort_long_segments(const Segment* __restrict__ segments, int32_t* __restrict__ entries,
                       const int32_t* __restrict__ unsorted, const TileCursors* __restrict__ cursors) {
  __shared__ int32_t held[kSortShared];
  const auto sync = [] { __syncthreads(); };
  for (int i = blockIdx.x; i < cursors->unsorted; i += gridDim.x) {
    const Segment segment = segments[unsorted[i]];
    int32_t* values = entries + segment.start;
    if (segment.count > kSortShared) {
      sort_bitonic<kSortThreads>(values, segment.count, threadIdx.x, sync);
      continue;
    }
    for (int k = threadIdx.x; k < segment.count; k += kSortThreads) held[k] = values[k];
    __syncthreads();
    sort_bitonic<kSortThreads>(held, segment.count, threadIdx.x, sync);
    for (int k = threadIdx.x; k < segment.count; k += kSortThreads) values[k] = held[k];
    __syncthreads();
  }
}

}  // namespace voxelfield
