// Splatting onto grids that are coarser than one whose points are binned (splat_binned.cuh): the points of a bin touch
// so few vertices of them that a warp sums those in shared memory, and only then adds them to the grid with atomics.
#pragma once

#include <algorithm>

#include "splat_binned.cuh"

namespace voxelfield {

constexpr int kCoarseThreads = 128;
constexpr int kCoarseWarps = kCoarseThreads / kWarp;
constexpr int kCoarseVertices = 640;  // sums that a warp holds, all copies together
constexpr int kCoarseGroups = kWarp / kCorners;
constexpr int kCoarseEntries = 512;         // of a bin, for one warp
constexpr float kWindowMargin = 1.f / 256;  // in cells, for the rounding of coordinates
// A level with more vertices, compared with the binned one, would spend more on adding its sums than it saves.
constexpr int kCoarser = 4;

struct CoarseLevel {
  int32_t resolution[3];
  float* data;  // added to
  int64_t column;
  float ratio[3];            // cells of this level in one of the binned grid
  int32_t size[3];           // of a window: what the points of a bin may touch, also vertices beyond the grid
  Divisor along_x, along_y;  // strides in a window, in vectors of channels
  int32_t window;            // its size in vectors
  bool copied;               // each group of threads has a copy of the window
};

struct CoarseLevels {
  CoarseLevel level[kMaxLevels];
  int count;
  int64_t columns;
};

// Lists parts of bins, one for each warp.
static __global__ void __launch_bounds__(256)
    list_parts(const Segment* __restrict__ segments, Piece* __restrict__ parts, TileCursors* __restrict__ cursors,
               int32_t bins) {
  const int32_t bin = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  const int lane = threadIdx.x % kWarp;
  const int32_t own = bin < bins ? segments[bin].parts(kCoarseEntries) : 0;
  const int32_t up_to_here = warp_inclusive_sum(own, lane);
  int32_t start = 0;
  if (lane == kWarp - 1 && up_to_here > 0) start = atomicAdd(&cursors->parts, up_to_here);
  start = __shfl_sync(kFullWarp, start, kWarp - 1) + up_to_here - own;
  for (int32_t part = 0; part < own; ++part) parts[start + part] = {bin, part};
}

// The groups of a warp add the points that it holds, each a point at a time.
template <bool Copied>
__device__ __forceinline__ void add_held(float4* own_sums, const float4* places, const float4* values, int held) {
  const int lane = threadIdx.x % kWarp, group = lane / kCorners;
  const CornerWeight weight_of(lane % kCorners);
  constexpr int kUnroll = 4;
  for (int first = 0; first < held; first += kUnroll * kCoarseGroups) {
    float weight[kUnroll];
    float4 value[kUnroll];
    float4* to[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int slot = first + u * kCoarseGroups + group;
      const float4 place = places[slot];
      value[u] = values[slot];
      to[u] = slot < held ? own_sums + __float_as_int(place.w) : nullptr;
      weight[u] = weight_of(place);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Points of several groups may meet in a vertex: without copies they take turns.
#pragma unroll
      for (int turn = 0; turn < (Copied ? 1 : kCoarseGroups); ++turn) {
        if (to[u] != nullptr && (Copied || group == turn)) add_weighted(to[u], weight[u], value[u]);
        __syncwarp();
      }
    }
  }
}

// One warp for each part of a bin. Coordinates outside of the grids are clamped.
template <typename scalar_t>
__global__ void __launch_bounds__(kCoarseThreads)
    splat_coarse(const __grid_constant__ CoarseLevels levels, const __grid_constant__ Bins bins,
                 const scalar_t* __restrict__ values, const float* __restrict__ points,
                 const Segment* __restrict__ segments, const Piece* __restrict__ parts,
                 const TileCursors* __restrict__ cursors, const int32_t* __restrict__ entries) {
  __shared__ float4 all_sums[kCoarseWarps][kCoarseVertices];
  __shared__ float4 all_places[kCoarseWarps][kWarp], all_values[kCoarseWarps][kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, corner = lane % kCorners;
  const int32_t item = static_cast<int32_t>(blockIdx.x * kCoarseWarps + warp);
  if (item >= cursors->parts) return;
  float4* sums = all_sums[warp];
  float4* places = all_places[warp];
  float4* held_values = all_values[warp];
  const Piece own = parts[item];
  const Segment segment = segments[own.tile];
  const int32_t* own_entries = entries + segment.start + own.part * kCoarseEntries;
  const int count = min(kCoarseEntries, segment.count - own.part * kCoarseEntries);
  const BinWindow bin(bins, own.tile);
  for (int l = 0; l < levels.count; ++l) {
    const CoarseLevel& level = levels.level[l];
    int32_t low[3];
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      low[axis] = static_cast<int32_t>(floorf(static_cast<float>(bin.low[axis]) * level.ratio[axis] - kWindowMargin));
    }
    const int window = level.window, copies = level.copied ? kCoarseGroups : 1;
    float4* own_sums = sums + (level.copied ? lane / kCorners * window : 0) +
                       corner_side(corner, 0) * level.along_x.value + corner_side(corner, 1) * level.along_y.value +
                       corner_side(corner, 2);
    for (int i = lane; i < window * copies; i += kWarp) sums[i] = {0.f, 0.f, 0.f, 0.f};
    int32_t entry = lane < count ? own_entries[lane] : 0;
    for (int first = 0; first < count; first += kWarp) {
      const bool home = (entry & kHome) != 0;
      const unsigned mask = __ballot_sync(kFullWarp, home);
      if (home) {
        const int64_t index = entry & ~kHome;
        const Vector<scalar_t, kBinWidth> stored =
            load_constant<kBinWidth>(values + index * levels.columns + level.column);
        const AxisPlace x(points[3 * index], level.resolution[0], true);
        const AxisPlace y(points[3 * index + 1], level.resolution[1], true);
        const AxisPlace z(points[3 * index + 2], level.resolution[2], true);
        const int32_t offset =
            (x.lower - low[0]) * level.along_x.value + (y.lower - low[1]) * level.along_y.value + (z.lower - low[2]);
        const Vector<float, kBinWidth> value = narrow<float>(stored);
        const int slot = __popc(mask & ((1u << lane) - 1));
        places[slot] = {x.fraction, y.fraction, z.fraction, __int_as_float(offset)};
        held_values[slot] = {value.lane[0], value.lane[1], value.lane[2], value.lane[3]};
      }
      entry = first + kWarp + lane < count ? own_entries[first + kWarp + lane] : 0;
      __syncwarp();
      if (level.copied) {
        add_held<true>(own_sums, places, held_values, __popc(mask));
      } else {
        add_held<false>(own_sums, places, held_values, __popc(mask));
      }
      __syncwarp();
    }
    for (int i = lane; i < window; i += kWarp) {
      const auto sum = sum_copies(sums, i, window, copies);
      if (is_zero(sum)) continue;
      int32_t y, z;
      const int32_t x = low[0] + level.along_x.divide(i, y);
      y = low[1] + level.along_y.divide(y, z);
      z += low[2];
      const int32_t* resolution = level.resolution;
      // Weights of vertices that the grid lacks are zero, but zero times infinity is not.
      if (x < 0 || y < 0 || z < 0 || x >= resolution[0] || y >= resolution[1] || z >= resolution[2]) continue;
      atomic_add<kBinWidth>(level.data + ((x * resolution[1] + y) * resolution[2] + z) * kBinWidth, sum);
    }
    __syncwarp();
  }
}

// What a bin's points touch of a level; false if a warp cannot hold that, or if the level is not coarse.
inline bool cut_window(const Bins& bins, CoarseLevel& level) {
  double vertices = 1, binned_vertices = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const double last = level.resolution[axis] - 1;
    // A bin of a single layer of vertices holds whatever lies along its axis.
    const bool single = bins.resolution[axis] == 1;
    const double ratio = single ? 0 : last / (bins.resolution[axis] - 1);
    const double cells = single ? last : ratio * bin_size(bins, axis);
    level.ratio[axis] = static_cast<float>(ratio);
    // Twice the margin at both ends, of which one is for the device's own rounding, and the vertices that end a cell.
    level.size[axis] = static_cast<int32_t>(std::min(cells + 4 * kWindowMargin, double{kCoarseVertices})) + 3;
    vertices *= level.resolution[axis];
    binned_vertices *= bins.resolution[axis];
  }
  const BoxStrides strides(level.size[1], level.size[2]);
  const int64_t window = int64_t{level.size[0]} * strides.along_x;
  if (vertices * kCoarser > binned_vertices || window > kCoarseVertices) return false;
  level.along_x = Divisor(strides.along_x);
  level.along_y = Divisor(strides.along_y);
  level.window = static_cast<int32_t>(window);
  level.copied = window * kCoarseGroups <= kCoarseVertices;
  return true;
}

}  // namespace voxelfield
