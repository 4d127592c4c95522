// A fixed order of summation: sorts the entries of each list by rising index.
//
// cub's DeviceSegmentedSort waits for the device, which a CUDA graph cannot record, and its DeviceSegmentedRadixSort
// takes 200 times as long for the short lists of tiles. Its sorts of a warp or block have a largest length; a
// list has none.
#pragma once

#include "stencil/entries.cuh"

namespace voxelfield {

constexpr int kShortList = 512;  // sorted by a warp
constexpr int kShortSortThreads = 128;
constexpr int kLongSortThreads = 1024;  // of a block that sorts a longer one
constexpr int kLongSortShared = 8192;   // entries that such a block holds in shared memory
constexpr int kLongSortBlocks = 264;

// Bitonic sort by `Threads` threads. Places beyond `count` stand for entries larger than all others, which never move.
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

// Sorts short lists, a warp each, and lists the long ones for sort_long_lists.
static __global__ void __launch_bounds__(kShortSortThreads)
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
    const int32_t own = lane < list.count ? values[lane] : INT32_MAX;
    int rank = 0;
    for (int other = 0; other < list.count; ++other) rank += __shfl_sync(kFullWarp, own, other) < own;
    if (lane < list.count) values[rank] = own;
    return;
  }
  int32_t* held = shared[threadIdx.x / kWarp];
  for (int i = lane; i < list.count; i += kWarp) held[i] = values[i];
  __syncwarp();
  sort_bitonic<kWarp>(held, list.count, lane, [] { __syncwarp(); });
  for (int i = lane; i < list.count; i += kWarp) values[i] = held[i];
}

static __global__ void __launch_bounds__(kLongSortThreads)
    sort_long_lists(const EntryList* __restrict__ entry_lists, int32_t* __restrict__ entries,
                    const int32_t* __restrict__ long_lists, const EntryCounters* __restrict__ counters) {
  __shared__ int32_t held[kLongSortShared];
  const auto sync = [] { __syncthreads(); };
  for (int i = blockIdx.x; i < counters->long_lists; i += gridDim.x) {
    const EntryList list = entry_lists[long_lists[i]];
    int32_t* values = entries + list.start;
    const bool fits = list.count <= kLongSortShared;
    if (fits) {
      for (int k = threadIdx.x; k < list.count; k += kLongSortThreads) held[k] = values[k];
      __syncthreads();
    }
    sort_bitonic<kLongSortThreads>(fits ? held : values, list.count, threadIdx.x, sync);
    if (fits) {
      for (int k = threadIdx.x; k < list.count; k += kLongSortThreads) values[k] = held[k];
      __syncthreads();
    }
  }
}

}  // namespace voxelfield
