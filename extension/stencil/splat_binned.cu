// Splatting of four channels onto a grid larger than the L2 cache on CUDA, without atomics on the grid: points are
// listed by bin (entries.cuh, splat_methods.cuh), then one block sums each bin in shared memory and writes it once.
// Coarser grids at the same points are summed from the same bins (splat_coarse.cuh).
#include "common/backend.cuh"
#include "stencil/splat_coarse.cuh"
#include "stencil/splat_methods.cuh"

namespace voxelfield {
namespace {

// Counts or places the entries of all points. The first `clearing_blocks` blocks set the sums of coarse levels to zero
// at the same time: clearing is bound by bandwidth, and counting by latency.
template <bool Place>
__global__ void __launch_bounds__(kThreads)
    list_bin_entries(const __grid_constant__ Bins bins, const float* __restrict__ points, TileCounts count,
                     int32_t* __restrict__ entries, int64_t n, const __grid_constant__ CoarseLevels coarse,
                     int clearing_blocks) {
  const int64_t block = int64_t{blockIdx.x} - clearing_blocks;
  if (block < 0) {
    for (int l = 0; l < coarse.count; ++l) {
      const CoarseLevel& level = coarse.level[l];
      const int64_t vertices = int64_t{level.resolution[0]} * level.resolution[1] * level.resolution[2];
      for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < vertices; i += clearing_blocks * kThreads) {
        store_global(level.data + i * kBinWidth, Vector<float, kBinWidth>{});
      }
    }
    return;
  }
  // Threads without a point read the last point again, and produce no entries.
  const int64_t thread = block * kThreads + threadIdx.x, index = min(thread, n - 1);
  const float point[3] = {points[3 * index], points[3 * index + 1], points[3 * index + 2]};
  bool empty = thread >= n || !all_finite(point);
  int32_t first[3], last[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const int32_t last_vertex = bins.resolution[axis] - 1;
    const int32_t lower = AxisPlace(point[axis], bins.resolution[axis], bins.clamps).lower;
    empty = empty || lower < -1 || lower > last_vertex;
    const int32_t near = min(max(lower, 0), last_vertex);
    first[axis] = bin_of_vertex(bins, axis, near);
    last[axis] = lower < 0 ? first[axis] : bin_of_vertex(bins, axis, min(near + 1, last_vertex));
  }
  const TouchedTiles touched(empty, 0, first, last, bins.along[1].value, bins.along[2].value);
  add_entries<Place>(touched, static_cast<int32_t>(index), kHome, count, entries);
}

// The position of a point in a window, packed for the groups: the coordinates of its lower vertex, one bit field each,
// in the bits below its offset in a box. A group subtracts the position of its own box; the vertex lies outside the box
// if a bit above those of a coordinate within the box is then set.
constexpr int kFieldBits = 6, kOffsetShift = 3 * kFieldBits - 1;

VOXELFIELD_HOST_DEVICE constexpr int32_t pack_place(int32_t x, int32_t y, int32_t z) {
  return x * (1 << 2 * kFieldBits) + y * (1 << kFieldBits) + z;
}

__device__ __forceinline__ int32_t outside_bits(const BinnedGrid& grid) {
  const int32_t all = (1 << kFieldBits) - 1;
  return pack_place((-1 << grid.log_box[0]) & (all >> 1), (-1 << grid.log_box[1]) & all, (-1 << grid.log_box[2]) & all);
}

// Called by one thread for each point: adds the point to the lists of the groups whose boxes it touches.
__device__ __forceinline__ void list_point(const BinnedGrid& grid, const BinWindow& window, const float* point,
                                           int slot, float4* places, int32_t* counts, uint8_t* lists) {
  int32_t at[3], first[3], last[3];
  float fraction[3];
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const AxisPlace place(point[axis], grid.bins.resolution[axis], grid.bins.clamps);
    fraction[axis] = place.fraction;
    at[axis] = place.lower - window.low[axis];
    first[axis] = max(at[axis], 0) >> grid.log_box[axis];
    last[axis] = min(at[axis] + 1, window.size[axis] - 1) >> grid.log_box[axis];
  }
  const int32_t offset = at[0] * grid.along_x.value + at[1] * grid.along_y.value + at[2];
  places[slot] = {fraction[0], fraction[1], fraction[2],
                  __int_as_float(offset * (1 << kOffsetShift) + pack_place(at[0], at[1], at[2]))};
  const int log_list = kLogBinThreads - grid.log_copies;
  for (int x = first[0]; x <= last[0]; ++x) {
    for (int y = first[1]; y <= last[1]; ++y) {
      for (int z = first[2]; z <= last[2]; ++z) {
        const int box = (((x << grid.log_boxes[1]) + y) << grid.log_boxes[2]) + z;
        const int32_t position = atomicAdd(counts + box, 1), copy = position & ((1 << grid.log_copies) - 1);
        lists[(box << kLogBinThreads) + (copy << log_list) + (position >> grid.log_copies)] =
            static_cast<uint8_t>(slot);
      }
    }
  }
}

// A group adds the points of its list. Threads whose corner lies outside the group's box add to their own `unused`.
__device__ __forceinline__ void add_points(Sums* own_sums, Sums* unused, int32_t own_place, int32_t outside,
                                           const uint8_t* list, int count, const float4* places, const Sums* values) {
  const CornerWeight weight_of(threadIdx.x % kCorners);
  // The largest count among the warp's four groups, so that its threads do not diverge.
  int most = max(count, __shfl_xor_sync(kFullWarp, count, kCorners));
  most = max(most, __shfl_xor_sync(kFullWarp, most, 2 * kCorners));
  constexpr int kUnroll = 4;
  for (int i = 0; i < most; i += kUnroll) {
    const uint32_t slots = *reinterpret_cast<const uint32_t*>(list + i);
    float weight[kUnroll];
    Sums value[kUnroll];
    Sums* to[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int slot = slots >> 8 * u & 0xff;
      const float4 place = places[slot];
      value[u] = values[slot];
      const int packed = __float_as_int(place.w) + own_place;
      to[u] = i + u < count && (packed & outside) == 0 ? own_sums + (packed >> kOffsetShift) : unused;
      weight[u] = weight_of(place.x, place.y, place.z);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Sums sum = load<kBinWidth>(to[u]->lane);
      add_weighted(sum, weight[u], value[u]);
      store(to[u]->lane, sum);
      __syncwarp();
    }
  }
}

// Calls f(offset in the grid, offset in a copy of the sums) for the vertices of a window.
template <typename F>
__device__ __forceinline__ void for_each_vertex(const BinnedGrid& grid, const BinWindow& window, const F& f) {
  const int log_z = grid.log_box[2] + grid.log_boxes[2], log_y = grid.log_box[1] + grid.log_boxes[1];
  const int step = kBinThreads >> (log_z + log_y);
  const int z = threadIdx.x & ((1 << log_z) - 1), y = threadIdx.x >> log_z & ((1 << log_y) - 1);
  if (z >= window.size[2] || y >= window.size[1]) return;
  const int box = (y >> grid.log_box[1] << grid.log_boxes[2]) + (z >> grid.log_box[2]);
  const int in_box = (y & ((1 << grid.log_box[1]) - 1)) * grid.along_y.value + (z & ((1 << grid.log_box[2]) - 1));
  const int32_t along_y = grid.bins.resolution[2] * kBinWidth, along_x = grid.bins.resolution[1] * along_y;
  const int32_t own = (window.low[1] + y) * along_y + (window.low[2] + z) * kBinWidth;
  for (int x = threadIdx.x >> (log_z + log_y); x < window.size[0]; x += step) {
    const int box_x = x >> grid.log_box[0];
    f(own + (window.low[0] + x) * along_x, ((box_x << (grid.log_boxes[1] + grid.log_boxes[2])) + box) * grid.box +
                                               (x & ((1 << grid.log_box[0]) - 1)) * grid.along_x.value + in_box);
  }
}

// The first `split_blocks` blocks process the chunks of bins that have too many entries for one block, and write the
// sums of each chunk to its own slot. They are followed by one block for each bin.
template <typename scalar_t>
__global__ void __launch_bounds__(kBinThreads, 4)
    splat_bins(const __grid_constant__ BinnedGrid grid, const scalar_t* __restrict__ values,
               const float* __restrict__ points, const EntryList* __restrict__ entry_lists,
               const Chunk* __restrict__ chunks, const EntryCounters* __restrict__ counters,
               const int32_t* __restrict__ entries, float* __restrict__ slots, int split_blocks) {
  extern __shared__ __align__(16) unsigned char shared[];
  Sums* sums = reinterpret_cast<Sums*>(shared);
  Sums* unused = sums + kBinVertices;
  Sums* held_values = unused + kBinThreads;
  float4* places = reinterpret_cast<float4*>(held_values + kBinThreads);
  int32_t* counts = reinterpret_cast<int32_t*>(places + kBinThreads);
  uint8_t* lists = reinterpret_cast<uint8_t*>(counts + kBinGroups);
  const int thread = threadIdx.x, corner = thread % kCorners, group = thread / kCorners;
  scalar_t* const data = static_cast<scalar_t*>(grid.data);

  const int size = grid.size(), copies = 1 << grid.log_copies;
  const int box = group & (grid.boxes() - 1);
  const int copy = group >> (grid.log_boxes[0] + grid.log_boxes[1] + grid.log_boxes[2]);
  const int z = box & ((1 << grid.log_boxes[2]) - 1);
  const int y = box >> grid.log_boxes[2] & ((1 << grid.log_boxes[1]) - 1);
  const int x = box >> (grid.log_boxes[1] + grid.log_boxes[2]);
  const int low_x = (x << grid.log_box[0]) - corner_side(corner, 0);
  const int low_y = (y << grid.log_box[1]) - corner_side(corner, 1);
  const int low_z = (z << grid.log_box[2]) - corner_side(corner, 2);
  Sums* own_sums =
      sums + (copy * size + box * grid.box - low_x * grid.along_x.value - low_y * grid.along_y.value - low_z);
  const int32_t own_place = -pack_place(low_x, low_y, low_z);
  // Groups beyond the last copy have empty lists.
  const bool serves = copy < copies;
  const uint8_t* own_list =
      lists + (serves ? (box << kLogBinThreads) + (copy << (kLogBinThreads - grid.log_copies)) : 0);

  const int32_t bin = blockIdx.x - split_blocks;
  const bool whole = bin >= 0;
  for (int32_t number = blockIdx.x; whole || number < counters->split_chunks; number += split_blocks) {
    const Chunk chunk = whole ? Chunk{bin, 0} : chunks[number];
    EntryList own = entry_lists[chunk.tile];
    if (whole && own.count > kBinChunk) return;
    if (!whole) own = own.chunk(chunk.number, kBinChunk);
    const int32_t begin = own.start, count = own.count;
    const BinWindow window(grid.bins, chunk.tile);
    if (count == 0) {
      for_each_vertex(grid, window, [&](int32_t to, int) { store_global(data + to, Vector<scalar_t, kBinWidth>{}); });
      return;
    }

    int32_t entry = thread < count ? entries[begin + thread] : 0;
    for (int i = thread; i < size * copies; i += kBinThreads) sums[i] = {};
    for (int first = 0; first < count; first += kBinThreads) {
      if (thread < kBinGroups) counts[thread] = 0;
      __syncthreads();
      if (first + thread < count) {
        const int64_t index = entry & ~kHome;
        const Vector<scalar_t, kBinWidth> stored =
            load_constant<kBinWidth>(values + index * grid.columns + grid.column);
        const float point[3] = {points[3 * index], points[3 * index + 1], points[3 * index + 2]};
        list_point(grid, window, point, thread, places, counts, lists);
        held_values[thread] = narrow<float>(stored);
      }
      entry = first + kBinThreads + thread < count ? entries[begin + first + kBinThreads + thread] : 0;
      __syncthreads();
      const int own_count = serves ? (counts[box] + copies - 1 - copy) >> grid.log_copies : 0;
      add_points(own_sums, unused + thread, own_place, outside_bits(grid), own_list, own_count, places, held_values);
      __syncthreads();
    }
    if (whole) {
      for_each_vertex(grid, window, [&](int32_t to, int at) {
        store_global(data + to, narrow<scalar_t>(sum_copies(sums, at, size, copies)));
      });
      return;
    }
    float* slot = slots + int64_t{number} * size * kBinWidth;
    for (int i = thread; i < size; i += kBinThreads) {
      store_global(slot + i * kBinWidth, sum_copies(sums, i, size, copies));
    }
    __syncthreads();
  }
}

// Adds up the sums of the chunks of split bins.
template <typename scalar_t>
__global__ void __launch_bounds__(kBinThreads)
    join_bin_chunks(const __grid_constant__ BinnedGrid grid, const EntryList* __restrict__ entry_lists,
                    const Chunk* __restrict__ chunks, const EntryCounters* __restrict__ counters,
                    const float* __restrict__ slots) {
  for (int32_t number = blockIdx.x; number < counters->split_chunks; number += gridDim.x) {
    if (chunks[number].number != 0) continue;
    const int32_t bin = chunks[number].tile, count = entry_lists[bin].chunks(kBinChunk), size = grid.size();
    const auto* sums = reinterpret_cast<const Sums*>(slots) + int64_t{number} * size;
    for_each_vertex(grid, BinWindow(grid.bins, bin), [&](int32_t to, int at) {
      const auto sum = sum_copies(sums, at, size, count);
      store_global(static_cast<scalar_t*>(grid.data) + to, narrow<scalar_t>(sum));
    });
  }
}

// Number of blocks for the chunks of split bins. There are usually no such chunks.
constexpr int kSplitBlocks = 128;
// Number of blocks that clear the sums of coarse levels while others count entries.
constexpr int kClearingBlocks = 256;

}  // namespace

template <typename scalar_t>
void splat_binned(const SortedBins& binned, const SplatInput<scalar_t>& input) {
  const auto launch = [](auto kernel, int64_t blocks, int threads, int shared, const auto&... arguments) {
    allow_shared_memory(kernel, shared);
    CudaBackend::launch(kernel, static_cast<unsigned>(blocks), threads, shared, arguments...);
  };
  const BinnedGrid& grid = binned.grid;
  const CoarseLevels& coarse = binned.coarse;
  const int32_t bins = grid.bins.count;
  const int64_t n = input.at.count;
  const float* points = input.at.points;
  const EntryLists lists(input.tensor, 8 * n, bins, kBinChunk, coarse.count > 0 ? kCoarseChunk : 0);
  const int split_blocks = lists.split_chunks > 0 ? kSplitBlocks : 0;
  Tensor slot_sums = new_empty(input.tensor, {lists.split_chunks * grid.size() * kBinWidth}, ScalarType::Float);
  float* slots = slot_sums.mutable_data_ptr<float>();

  lists.fill([&](auto place) {
    const int clearing_blocks = coarse.count > 0 && !place ? kClearingBlocks : 0;
    launch(list_bin_entries<place.value>, CudaBackend::blocks(n, kThreads) + clearing_blocks, kThreads, 0, grid.bins,
           points, lists.count, lists.entries, n, coarse, clearing_blocks);
  });
  if (coarse.count > 0) {
    // Usually each bin is a single chunk.
    launch(splat_coarse<scalar_t>, bins, kCoarseThreads,
           coarse.shared_bytes(coarse.windows, coarse.count, sizeof(scalar_t)), coarse, grid.bins, input.values, points,
           lists.lists, lists.all.chunks, lists.counters, lists.entries);
  }
  launch(splat_bins<scalar_t>, bins + split_blocks, kBinThreads, kBinShared, grid, input.values, points, lists.lists,
         lists.split.chunks, lists.counters, lists.entries, slots, split_blocks);
  if (split_blocks > 0) {
    launch(join_bin_chunks<scalar_t>, split_blocks, kBinThreads, 0, grid, lists.lists, lists.split.chunks,
           lists.counters, slots);
  }
}

template void splat_binned<float>(const SortedBins&, const SplatInput<float>&);
template void splat_binned<torch::headeronly::Half>(const SortedBins&, const SplatInput<torch::headeronly::Half>&);
template void splat_binned<torch::headeronly::BFloat16>(const SortedBins&,
                                                        const SplatInput<torch::headeronly::BFloat16>&);

}  // namespace voxelfield
