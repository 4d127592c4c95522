// Splatting four channels onto a grid that is larger than the L2 cache, without atomics on it: points are binned by
// their place in the grid, then a block sums its bin's part in shared memory and writes it once. Coarser grids at the
// same points can be summed from the same bins (splat_coarse.cuh).
//
// A bin owns a box of vertices. An entry is a point that touches one of them; the one bin that owns a point's lower
// vertex is its home.
#pragma once

#include <algorithm>

#include "common/shared_memory.h"
#include "stencil/splat_tiled.cuh"
#include "stencil/trilinear.h"

namespace voxelfield {

// Vertices that a bin owns at most.
constexpr int kBinSize[3] = {8, 16, 16};
// Sums of a bin's vertices that fit into shared memory, all copies together, and points that are held there at once.
constexpr int kBinVertices = 2240;
constexpr int kLogHeld = 8;
constexpr int kBinThreads = 1 << kLogHeld;
constexpr int kBinGroups = kBinThreads / kCorners;
constexpr int kBinWidth = 4;
constexpr int kBinShared = (kBinVertices + 3 * kBinThreads) * 16 + kBinGroups * (4 + kBinThreads);
static_assert(kBinShared <= kSplatBinnedShared, "within the bound that tests compare with every GPU");
constexpr int kBinPieceEntries = 8192;       // a bin with more entries is split among several blocks
constexpr int32_t kBinResolution = 1 << 11;  // most vertices along an axis
constexpr int32_t kHome = 1 << 30;           // set in the entries of a point's home

struct Bins {
  int32_t resolution[3];
  bool clamps;  // points outside belong to the grid's faces; otherwise they are none of its
  int32_t count;
  Divisor along[3];  // bins
  Divisor spans[3];  // last vertex, at least 1
};

// A group of eight threads, one for each corner, adds points to a box of vertices that is its own. What a bin owns, its
// window, is cut into boxes, and all of them exist in several copies if there are groups left. All numbers of these are
// powers of two.
struct BinnedGrid {
  Bins bins;
  void* data;  // the grid's scalar_t
  int64_t column;
  int64_t columns;
  int32_t log_box[3];    // vertices of a box
  int32_t log_boxes[3];  // boxes of the window
  int32_t log_copies;
  Divisor along_x, along_y;  // strides in a box, in vectors of channels
  int32_t box;               // its size in vectors

  VOXELFIELD_HOST_DEVICE int32_t boxes() const { return 1 << (log_boxes[0] + log_boxes[1] + log_boxes[2]); }
  VOXELFIELD_HOST_DEVICE int32_t size() const { return boxes() * box; }  // of a copy
};

// Where a point lies on an axis: the common case of the locator, written out, which takes a third of the instructions.
struct AxisPlace {
  int32_t lower;
  float fraction;

  __device__ __forceinline__ AxisPlace(float coordinate, int32_t resolution, bool clamps) {
    const float last = static_cast<float>(resolution - 1);
    float u = multiply_add(coordinate, last, 0.f);
    if (clamps) u = fminf(fmaxf(u, 0.f), last);
    const float floor = floorf(u);
    lower = static_cast<int32_t>(floor);
    fraction = u - floor;
  }
};

__device__ __forceinline__ int32_t bin_of_vertex(const Bins& bins, int axis, int32_t vertex) {
  int32_t rest;
  return min(bins.spans[axis].divide(vertex * bins.along[axis].value, rest), bins.along[axis].value - 1);
}

// First vertex that a bin owns, or the first one beyond the grid.
__device__ __forceinline__ int32_t first_vertex(const Bins& bins, int axis, int32_t bin) {
  const Divisor& along = bins.along[axis];
  int32_t rest;
  return bin == along.value ? bins.resolution[axis]
                            : along.divide(bin * bins.spans[axis].value + along.value - 1, rest);
}

// The vertices that a bin owns.
struct BinWindow {
  int32_t low[3], size[3];

  __device__ __forceinline__ BinWindow(const Bins& bins, int32_t index) {
    int32_t bin[3];
    bin[0] = bins.along[1].divide(bins.along[2].divide(index, bin[2]), bin[1]);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      low[axis] = first_vertex(bins, axis, bin[axis]);
      size[axis] = first_vertex(bins, axis, bin[axis] + 1) - low[axis];
    }
  }
};

// The bins of which a point is an entry: the first one along each axis is its home, the last one at most the next.
struct BinRange {
  int32_t first[3], last[3];
  bool empty;

  __device__ __forceinline__ BinRange(const Bins& bins, const float* points, int64_t index) {
    const float point[3] = {points[3 * index], points[3 * index + 1], points[3 * index + 2]};
    empty = !all_finite(point);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      const int32_t last_vertex = bins.resolution[axis] - 1;
      const int32_t lower = AxisPlace(point[axis], bins.resolution[axis], bins.clamps).lower;
      empty = empty || lower < -1 || lower > last_vertex;
      const int32_t near = min(max(lower, 0), last_vertex);
      first[axis] = bin_of_vertex(bins, axis, near);
      last[axis] = lower < 0 ? first[axis] : bin_of_vertex(bins, axis, min(near + 1, last_vertex));
    }
  }
};

// Counts entries, or, with `Place`, writes them to where `count` says the next one of a bin belongs.
template <bool Place>
__device__ __forceinline__ void for_entries(const Bins& bins, const float* __restrict__ points,
                                            int32_t* __restrict__ count, int32_t* __restrict__ entries, int64_t n,
                                            int64_t index) {
  // Threads without a point read along with the last one, and have no entries.
  BinRange range(bins, points, index < n ? index : n - 1);
  if (index >= n) range.empty = true;
  const int32_t along_y = bins.along[2].value, along_x = bins.along[1].value * along_y;
  const int32_t home = range.empty ? -1 : range.first[0] * along_x + range.first[1] * along_y + range.first[2];
  const int32_t place = count_home<Place>(count, home);
  if (range.empty) return;
  if constexpr (Place) entries[place] = static_cast<int32_t>(index) | kHome;
  for (int x = range.first[0]; x <= range.last[0]; ++x) {
    for (int y = range.first[1]; y <= range.last[1]; ++y) {
      for (int z = range.first[2]; z <= range.last[2]; ++z) {
        const int32_t bin = x * along_x + y * along_y + z;
        if (bin == home) continue;
        const int32_t at = atomicAdd(count + bin, 1);
        if constexpr (Place) entries[at] = static_cast<int32_t>(index);
      }
    }
  }
}

// Sums of coarser grids, which begin at zero.
struct ClearedSums {
  float* data[kMaxLevels];
  int64_t vectors[kMaxLevels];
  int count;
};

__device__ __forceinline__ void clear_vectors(float* data, int64_t vectors, int64_t block, int blocks) {
  for (int64_t i = block * blockDim.x + threadIdx.x; i < vectors; i += int64_t{blockDim.x} * blocks) {
    store_global(data + i * kBinWidth, Vector<float, kBinWidth>{});
  }
}

// Entries of one bin that a block adds to coarser grids.
struct BinPart {
  int32_t bin;
  int32_t start;
  int32_t count;
};

// Lists parts of bins, of at most `most` entries each and all of a bin's alike: one bin for each thread.
__device__ __forceinline__ void list_parts(const Segment* __restrict__ segments, BinPart* __restrict__ parts,
                                           TileCursors* __restrict__ cursors, int32_t bins, int32_t bin, int32_t most) {
  const int lane = threadIdx.x % kWarp;
  const Segment segment = bin < bins ? segments[bin] : Segment{};
  const int32_t own = segment.parts(most), share = own > 0 ? (segment.count + own - 1) / own : 0;
  const int32_t up_to_here = warp_inclusive_sum(own, lane);
  int32_t start = 0;
  if (lane == kWarp - 1 && up_to_here > 0) start = atomicAdd(&cursors->parts, up_to_here);
  start = __shfl_sync(kFullWarp, start, kWarp - 1) + up_to_here - own;
  for (int32_t part = 0; part < own; ++part) {
    const int32_t begin = part * share;
    parts[start + part] = {bin, segment.start + begin, min(share, segment.count - begin)};
  }
}

// The first `clearing` blocks clear sums meanwhile: storing needs the memory, counting its latency.
static __global__ void __launch_bounds__(256)
    count_bin_entries(const __grid_constant__ Bins bins, const float* __restrict__ points, int32_t* __restrict__ count,
                      int64_t n, const __grid_constant__ ClearedSums cleared, int clearing) {
  const int64_t block = blockIdx.x;
  if (block < clearing) {
    for (int l = 0; l < cleared.count; ++l) clear_vectors(cleared.data[l], cleared.vectors[l], block, clearing);
    return;
  }
  for_entries<false>(bins, points, count, nullptr, n, (block - clearing) * blockDim.x + threadIdx.x);
}

// What else there is to do once segments are known: list parts of `most` entries for coarser grids, and clear the slots
// of bins that are split, each of `slot` vectors.
struct BinTasks {
  const Segment* segments;
  BinPart* parts;
  int32_t most;
  float* slots;
  int32_t slot;
  int listing;   // first blocks
  int clearing;  // blocks behind those
};

static __global__ void __launch_bounds__(256)
    place_bin_entries(const __grid_constant__ Bins bins, const float* __restrict__ points, int32_t* __restrict__ next,
                      int32_t* __restrict__ entries, int64_t n, TileCursors* __restrict__ cursors,
                      const __grid_constant__ BinTasks tasks) {
  int64_t block = blockIdx.x;
  if (block < tasks.listing) {
    list_parts(tasks.segments, tasks.parts, cursors, bins.count, static_cast<int32_t>(block * blockDim.x + threadIdx.x),
               tasks.most);
    return;
  }
  block -= tasks.listing;
  if (block < tasks.clearing) {
    // A split bin has two pieces at least.
    clear_vectors(tasks.slots, static_cast<int64_t>(cursors->pieces / 2) * tasks.slot, block, tasks.clearing);
    return;
  }
  for_entries<true>(bins, points, next, entries, n, (block - tasks.clearing) * blockDim.x + threadIdx.x);
}

// Where a point lies in a window, as the groups see it: coordinates of its lower vertex, a field of bits for each,
// below its offset in a box. A group subtracts its box's place; a bit above a field's proper ones then tells that a
// vertex lies outside.
constexpr int kFieldBits = 6, kOffsetShift = 3 * kFieldBits - 1;

VOXELFIELD_HOST_DEVICE constexpr int32_t pack_place(int32_t x, int32_t y, int32_t z) {
  return x * (1 << 2 * kFieldBits) + y * (1 << kFieldBits) + z;
}

__device__ __forceinline__ int32_t outside_bits(const BinnedGrid& grid) {
  const int32_t all = (1 << kFieldBits) - 1;
  return pack_place((-1 << grid.log_box[0]) & (all >> 1), (-1 << grid.log_box[1]) & all, (-1 << grid.log_box[2]) & all);
}

// One thread notes a point for the groups whose boxes it touches.
__device__ __forceinline__ void note_point(const BinnedGrid& grid, const BinWindow& window, const float* point,
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
  const int log_list = kLogHeld - grid.log_copies;
  for (int x = first[0]; x <= last[0]; ++x) {
    for (int y = first[1]; y <= last[1]; ++y) {
      for (int z = first[2]; z <= last[2]; ++z) {
        const int box = (((x << grid.log_boxes[1]) + y) << grid.log_boxes[2]) + z;
        const int32_t position = atomicAdd(counts + box, 1), copy = position & ((1 << grid.log_copies) - 1);
        lists[(box << kLogHeld) + (copy << log_list) + (position >> grid.log_copies)] = static_cast<uint8_t>(slot);
      }
    }
  }
}

// The weight of a thread's corner, given where in its cell a point lies.
struct CornerWeight {
  float base[3], slope[3];

  __device__ __forceinline__ explicit CornerWeight(int corner) {
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      base[axis] = corner_side(corner, axis) ? 0.f : 1.f;
      slope[axis] = corner_side(corner, axis) ? 1.f : -1.f;
    }
  }

  __device__ __forceinline__ float operator()(const float4& place) const {
    return (base[0] + slope[0] * place.x) * (base[1] + slope[1] * place.y) * (base[2] + slope[2] * place.z);
  }
};

__device__ __forceinline__ void add_weighted(float4* to, float weight, const float4& value) {
  float4 sum = *to;
  sum.x += weight * value.x;
  sum.y += weight * value.y;
  sum.z += weight * value.z;
  sum.w += weight * value.w;
  *to = sum;
}

// A group adds the points of its list. What lies outside of its box goes to `nowhere`, the thread's own.
__device__ __forceinline__ void add_points(float4* own_sums, float4* nowhere, int32_t own_place, int32_t outside,
                                           const uint8_t* list, int count, const float4* places, const float4* values) {
  const CornerWeight weight_of(threadIdx.x % kCorners);
  // The threads of a group agree on it already.
  int most = max(count, __shfl_xor_sync(kFullWarp, count, kCorners));
  most = max(most, __shfl_xor_sync(kFullWarp, most, 2 * kCorners));
  constexpr int kUnroll = 4;
  for (int i = 0; i < most; i += kUnroll) {
    const uint32_t slots = *reinterpret_cast<const uint32_t*>(list + i);
    float weight[kUnroll];
    float4 value[kUnroll];
    float4* to[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int slot = slots >> 8 * u & 0xff;
      const float4 place = places[slot];
      value[u] = values[slot];
      const int packed = __float_as_int(place.w) + own_place;
      to[u] = i + u < count && (packed & outside) == 0 ? own_sums + (packed >> kOffsetShift) : nowhere;
      weight[u] = weight_of(place);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      add_weighted(to[u], weight[u], value[u]);
      __syncwarp();
    }
  }
}

__device__ __forceinline__ Vector<float, kBinWidth> sum_copies(const float4* sums, int at, int size, int copies) {
  float4 sum = sums[at];
  for (int copy = 1; copy < copies; ++copy) {
    const float4 other = sums[copy * size + at];
    sum.x += other.x;
    sum.y += other.y;
    sum.z += other.z;
    sum.w += other.w;
  }
  return {sum.x, sum.y, sum.z, sum.w};
}

__device__ __forceinline__ bool is_zero(const Vector<float, kBinWidth>& sum) {
  return sum.lane[0] == 0 && sum.lane[1] == 0 && sum.lane[2] == 0 && sum.lane[3] == 0;
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

// One block for each bin, behind `splitting` blocks that go through the pieces of bins with too many entries.
template <typename scalar_t>
__global__ void __launch_bounds__(kBinThreads, 4)
    splat_bins(const __grid_constant__ BinnedGrid grid, const scalar_t* __restrict__ values,
               const float* __restrict__ points, const Segment* __restrict__ segments, const Piece* __restrict__ pieces,
               const TileCursors* __restrict__ cursors, const int32_t* __restrict__ entries, float* __restrict__ slots,
               int splitting) {
  extern __shared__ __align__(16) unsigned char shared[];
  float4* sums = reinterpret_cast<float4*>(shared);
  float4* nowhere = sums + kBinVertices;
  float4* places = nowhere + kBinThreads;
  float4* held_values = places + kBinThreads;
  int32_t* counts = reinterpret_cast<int32_t*>(held_values + kBinThreads);
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
  float4* own_sums =
      sums + (copy * size + box * grid.box - low_x * grid.along_x.value - low_y * grid.along_y.value - low_z);
  const int32_t own_place = -pack_place(low_x, low_y, low_z);
  // Groups that are left over have empty lists.
  const bool serves = copy < copies;
  const uint8_t* own_list = lists + (serves ? (box << kLogHeld) + (copy << (kLogHeld - grid.log_copies)) : 0);

  const int32_t item = blockIdx.x - splitting;
  const bool whole = item >= 0;
  for (int32_t piece = blockIdx.x; whole || piece < cursors->pieces; piece += splitting) {
    const Piece own = whole ? Piece{item, 0} : pieces[piece];
    const Segment segment = segments[own.tile];
    if (whole && segment.is_split(kBinPieceEntries)) return;
    const int32_t begin = segment.start + own.part * kBinPieceEntries;
    const int32_t count = min(kBinPieceEntries, segment.count - own.part * kBinPieceEntries);
    const BinWindow window(grid.bins, own.tile);
    if (count == 0) {
      for_each_vertex(grid, window, [&](int32_t to, int) { store_global(data + to, Vector<scalar_t, kBinWidth>{}); });
      return;
    }

    int32_t entry = thread < count ? entries[begin + thread] : 0;
    for (int i = thread; i < size * copies; i += kBinThreads) sums[i] = {0.f, 0.f, 0.f, 0.f};
    for (int first = 0; first < count; first += kBinThreads) {
      if (thread < kBinGroups) counts[thread] = 0;
      __syncthreads();
      if (first + thread < count) {
        const int64_t index = entry & ~kHome;
        const Vector<scalar_t, kBinWidth> stored =
            load_constant<kBinWidth>(values + index * grid.columns + grid.column);
        const float point[3] = {points[3 * index], points[3 * index + 1], points[3 * index + 2]};
        note_point(grid, window, point, thread, places, counts, lists);
        const Vector<float, kBinWidth> value = narrow<float>(stored);
        held_values[thread] = {value.lane[0], value.lane[1], value.lane[2], value.lane[3]};
      }
      entry = first + kBinThreads + thread < count ? entries[begin + first + kBinThreads + thread] : 0;
      __syncthreads();
      const int own_count = serves ? (counts[box] + copies - 1 - copy) >> grid.log_copies : 0;
      add_points(own_sums, nowhere + thread, own_place, outside_bits(grid), own_list, own_count, places, held_values);
      __syncthreads();
    }
    if (whole) {
      for_each_vertex(grid, window, [&](int32_t to, int at) {
        store_global(data + to, narrow<scalar_t>(sum_copies(sums, at, size, copies)));
      });
      return;
    }
    // A split bin has two pieces at least: half its first one's number is the bin's alone.
    float* slot = slots + static_cast<int64_t>((piece - own.part) / 2) * size * kBinWidth;
    for (int i = thread; i < size; i += kBinThreads) {
      const auto sum = sum_copies(sums, i, size, copies);
      if (!is_zero(sum)) atomic_add<kBinWidth>(slot + i * kBinWidth, sum);
    }
    __syncthreads();
  }
}

// Writes the sums of split bins.
template <typename scalar_t>
__global__ void __launch_bounds__(kBinThreads)
    write_split_bins(const __grid_constant__ BinnedGrid grid, const Piece* __restrict__ pieces,
                     const TileCursors* __restrict__ cursors, const float* __restrict__ slots) {
  for (int32_t piece = blockIdx.x; piece < cursors->pieces; piece += gridDim.x) {
    const Piece own = pieces[piece];
    if (own.part != 0) continue;
    const float* slot = slots + static_cast<int64_t>(piece / 2) * grid.size() * kBinWidth;
    for_each_vertex(grid, BinWindow(grid.bins, own.tile), [&](int32_t to, int at) {
      store_global(static_cast<scalar_t*>(grid.data) + to, narrow<scalar_t>(load<kBinWidth>(slot + at * kBinWidth)));
    });
  }
}

// Cuts a grid into bins: no larger than allowed, and enough of them for what a block holds at once.
template <typename T>
Bins cut_into_bins(const GridLocator<T>& locator, int64_t n) {
  Bins bins{};
  bins.clamps = locator.padding == Padding::kBorder;
  for (int shift = 0; shift <= 2; ++shift) {
    int64_t count = 1;
    for (int axis = 0; axis < 3; ++axis) {
      const int32_t resolution = locator.resolution[axis], most = kBinSize[axis] >> shift;
      const int32_t along = (resolution + most - 1) / most;
      bins.resolution[axis] = resolution;
      bins.along[axis] = Divisor(along);
      bins.spans[axis] = Divisor(std::max(resolution - 1, 1));
      count *= along;
    }
    bins.count = static_cast<int32_t>(count);
    if (count * kBinThreads >= n) break;
  }
  return bins;
}

// The most vertices that a bin owns along an axis.
inline int32_t bin_size(const Bins& bins, int axis) { return (bins.resolution[axis] - 1) / bins.along[axis].value + 1; }

// Strides in a box of vertices that keep the eight vertices of a cell in different banks: steps along z, y, x of
// 1, 2, 4 (or 1, 4, 2) modulo 8.
struct BoxStrides {
  int32_t along_x, along_y;

  BoxStrides(int32_t size_y, int32_t size_z) {
    along_y = size_z + size_z % 2;
    if (along_y % 8 == 0) along_y += 2;
    along_x = size_y * along_y;
    along_x += ((along_y % 8 == 4 ? 2 : 4) - along_x % 8 + 8) % 8;
  }
};

// Chooses boxes and copies; false if a window would not fit.
inline bool cut_into_boxes(BinnedGrid& grid) {
  double least = 0;
  for (int code = 0; code < 64; ++code) {
    const int log_boxes[3] = {code & 3, code >> 2 & 3, code >> 4};
    const int boxes = 1 << (log_boxes[0] + log_boxes[1] + log_boxes[2]);
    if (boxes > kBinGroups) continue;
    int log_box[3];
    double touched = 1;
    for (int axis = 0; axis < 3; ++axis) {
      log_box[axis] = 0;
      while (1 << (log_box[axis] + log_boxes[axis]) < bin_size(grid.bins, axis)) ++log_box[axis];
      touched *= 1 + 1.0 / (1 << log_box[axis]);
    }
    const BoxStrides strides(1 << log_box[1], 1 << log_box[2]);
    const int box = strides.along_x << log_box[0];
    if (box * boxes > kBinVertices) continue;
    int log_copies = 0;
    while (boxes << (log_copies + 1) <= kBinGroups && box * boxes << (log_copies + 1) <= kBinVertices) ++log_copies;
    // Entries that are added, and that groups differ in how many of them they have.
    const double cost = touched * (1 + 4.0 / (boxes << log_copies));
    if (least > 0 && cost >= least) continue;
    least = cost;
    for (int axis = 0; axis < 3; ++axis) {
      grid.log_box[axis] = log_box[axis];
      grid.log_boxes[axis] = log_boxes[axis];
    }
    grid.log_copies = log_copies;
    grid.along_y = Divisor(strides.along_y);
    grid.along_x = Divisor(strides.along_x);
    grid.box = box;
  }
  return least > 0;
}

}  // namespace voxelfield
