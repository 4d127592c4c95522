// Splatting onto grids that are coarser than one whose points are binned (splat_binned.cuh). The points of a bin lie in
// few of their cells, and samples of a ray follow one another there: a group of threads adds up in registers what
// consecutive points leave in one cell. A warp keeps the sums of the coarsest levels, of which a bin's points touch
// only a few vertices, in shared memory as well; those of finer ones go straight to the grid.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "stencil/splat_binned.cuh"

namespace voxelfield {

constexpr int kCoarseThreads = 128;
constexpr int kCoarseWarps = kCoarseThreads / kWarp;
constexpr int kCoarseGroups = kWarp / kCorners;
constexpr int kCoarseEntries = 224;  // of a bin, for one block: with five levels, six blocks fit a multiprocessor
constexpr int kCoarseStride = kCoarseEntries + 2;  // between levels: a row's first four are in different banks
constexpr int kMostCoarse = 8;                     // levels, for which a block of sm_75 has room
constexpr int kCoarseVertices = 640;               // sums of a level's window, all copies together
constexpr int kCoarseAllVertices = 1280;           // of all levels
constexpr float kWindowMargin = 1.f / 256;         // in cells, for the rounding of coordinates
// A level with more vertices, compared with the binned one, would spend more on adding its sums than it saves.
constexpr int kCoarser = 4;
constexpr int kDirect = -1;

struct CoarseLevel {
  int32_t resolution[3];
  float* data;  // added to
  int64_t column;
  float ratio[3];            // cells of this level in one of the binned grid
  int32_t size[3];           // of a window: what the points of a bin may touch, also vertices beyond the grid
  Divisor along_x, along_y;  // strides in a window, in vectors of channels
  int32_t window;            // its size in vectors; each group of threads has a copy
  int32_t first;             // where its copies begin in a block's shared memory, or kDirect: it has none
};

struct CoarseLevels {
  CoarseLevel level[kMaxLevels];
  int count;
  int64_t columns;
  int32_t windows;  // of all levels, in vectors

  int shared_bytes(int element_size) const { return shared_bytes(windows, count, element_size); }
  static constexpr int most_shared_bytes(int element_size) {
    return shared_bytes(kCoarseAllVertices, kMostCoarse, element_size);
  }

 private:
  // Windows, places of the points that warps are at, positions of all points of the block, their values.
  static constexpr int shared_bytes(int windows, int count, int element_size) {
    return (windows + kCoarseThreads) * static_cast<int>(sizeof(float4)) +
           kCoarseEntries * 3 * static_cast<int>(sizeof(float)) + count * kCoarseStride * kBinWidth * element_size;
  }
};

static_assert(CoarseLevels::most_shared_bytes(sizeof(float)) <= kSplatCoarseShared,
              "within the bound that tests compare with every GPU");

// The groups of a warp add up the points of a block, a quarter of them each, for one level. Where a point's cell is not
// that of the one before, `add` takes what there is of that. `pack` makes a number of a cell, and kNowhere of none.
template <bool Shared, typename scalar_t, typename Pack, typename Add>
__device__ __forceinline__ void walk_points(const CoarseLevel& level, const float* positions,
                                            const Vector<scalar_t, kBinWidth>* values, int held, float4* places,
                                            const Pack& pack, const Add& add) {
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % kWarp, corner = lane % kCorners, group = lane / kCorners;
  const int share = (held + kCoarseGroups - 1) / kCoarseGroups;
  const int begin = group * share, end = min(begin + share, held);
  const CornerWeight weight_of(corner);
  float4 sum{};
  int32_t cell = kNowhere;
  for (int first = 0; first < share; first += kCorners) {
    const int own = begin + first + corner;
    float4 found = {0.f, 0.f, 0.f, __int_as_float(kNowhere)};
    if (own < end) {
      const AxisPlace x(positions[own], level.resolution[0], true);
      const AxisPlace y(positions[own + kCoarseEntries], level.resolution[1], true);
      const AxisPlace z(positions[own + 2 * kCoarseEntries], level.resolution[2], true);
      found = {x.fraction, y.fraction, z.fraction, __int_as_float(pack(x.lower, y.lower, z.lower))};
    }
    places[lane] = found;
    __syncwarp();
    for (int some = 0; some < kCorners && first + some < share; some += kUnroll) {
      float4 place[kUnroll];
      Vector<scalar_t, kBinWidth> stored[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        place[u] = places[group * kCorners + some + u];
        stored[u] = values[begin + first + some + u];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int32_t next = __float_as_int(place[u].w);
        if (next != cell) {
          if (cell != kNowhere) add(cell, sum);
          sum = {};
          cell = next;
        }
        // Groups have sums of their own, but the threads of one share them.
        if (Shared) __syncwarp();
        const Vector<float, kBinWidth> value = narrow<float>(stored[u]);
        add_weighted(&sum, weight_of(place[u]), {value.lane[0], value.lane[1], value.lane[2], value.lane[3]});
      }
    }
    __syncwarp();
  }
  if (cell != kNowhere) add(cell, sum);
  __syncwarp();
}

// One block for each part of a bin, one warp for each level. Coordinates outside of the grids are clamped.
template <typename scalar_t>
__global__ void __launch_bounds__(kCoarseThreads, 6)
    splat_coarse(const __grid_constant__ CoarseLevels levels, const __grid_constant__ Bins bins,
                 const scalar_t* __restrict__ values, const float* __restrict__ points,
                 const BinPart* __restrict__ parts, const TileCursors* __restrict__ cursors,
                 const int32_t* __restrict__ entries) {
  using Value = Vector<scalar_t, kBinWidth>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int32_t indices[kCoarseEntries];
  __shared__ int warp_homes[kCoarseWarps];
  float4* windows = reinterpret_cast<float4*>(shared);
  float4* all_places = windows + levels.windows;
  float* positions = reinterpret_cast<float*>(all_places + kCoarseThreads);
  Value* held_values = reinterpret_cast<Value*>(positions + 3 * kCoarseEntries);
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp, corner = lane % kCorners;

  for (int32_t item = blockIdx.x; item < cursors->parts; item += gridDim.x) {
    const BinPart own = parts[item];

    // Two entries for each thread, of which those of other bins' points are left out.
    constexpr int kTwice = 2;
    int32_t entry[kTwice];
    unsigned homes[kTwice];
#pragma unroll
    for (int i = 0; i < kTwice; ++i) {
      const int at = warp * kTwice * kWarp + i * kWarp + lane;
      entry[i] = at < own.count ? entries[own.start + at] : 0;
    }
    for (int i = thread; i < levels.windows; i += kCoarseThreads) windows[i] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kTwice; ++i) homes[i] = __ballot_sync(kFullWarp, (entry[i] & kHome) != 0);
    if (lane == 0) warp_homes[warp] = __popc(homes[0]) + __popc(homes[1]);
    __syncthreads();
    int slot = 0, held = 0;
#pragma unroll
    for (int i = 0; i < kCoarseWarps; ++i) {
      slot += i < warp ? warp_homes[i] : 0;
      held += warp_homes[i];
    }
#pragma unroll
    for (int i = 0; i < kTwice; ++i) {
      const unsigned before = homes[i] & ((1u << lane) - 1);
      if ((entry[i] & kHome) != 0) indices[slot + __popc(before)] = entry[i] & ~kHome;
      slot += __popc(homes[i]);
    }
    __syncthreads();
    for (int i = thread; i < held; i += kCoarseThreads) {
      const float* from = points + int64_t{3} * indices[i];
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        __pipeline_memcpy_async(positions + axis * kCoarseEntries + i, from + axis, sizeof(float));
      }
    }
    // The levels of a row lie side by side: neighbouring threads fetch them.
    constexpr int kSide = 4;
    for (int i = thread; i < held * kSide; i += kCoarseThreads) {
      const scalar_t* from = values + indices[i / kSide] * levels.columns;
      for (int l = i % kSide; l < levels.count; l += kSide) {
        __pipeline_memcpy_async(held_values + l * kCoarseStride + i / kSide, from + levels.level[l].column,
                                sizeof(Value));
      }
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();

    for (int l = warp; l < levels.count; l += kCoarseWarps) {
      const CoarseLevel& level = levels.level[l];
      float4* places = all_places + warp * kWarp;
      const Value* own_values = held_values + l * kCoarseStride;
      const int32_t* resolution = level.resolution;
      const int x_side = corner_side(corner, 0), y_side = corner_side(corner, 1), z_side = corner_side(corner, 2);
      if (level.first == kDirect) {
        // A vertex, and along which axes it is the last.
        const auto pack = [&](int32_t x, int32_t y, int32_t z) {
          const int last =
              (x + 1 < resolution[0] ? 0 : 4) + (y + 1 < resolution[1] ? 0 : 2) + (z + 1 < resolution[2] ? 0 : 1);
          return ((x * resolution[1] + y) * resolution[2] + z) * kCorners + last;
        };
        float* data = level.data + ((x_side * resolution[1] + y_side) * resolution[2] + z_side) * kBinWidth;
        walk_points<false>(level, positions, own_values, held, places, pack, [&](int32_t cell, const float4& sum) {
          if ((cell & corner) != 0) return;
          atomic_add<kBinWidth>(data + cell / kCorners * kBinWidth,
                                Vector<float, kBinWidth>{sum.x, sum.y, sum.z, sum.w});
        });
        continue;
      }
      const BinWindow bin(bins, own.bin);
      int32_t low[3];
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        low[axis] = static_cast<int32_t>(floorf(static_cast<float>(bin.low[axis]) * level.ratio[axis] - kWindowMargin));
      }
      const int along_x = level.along_x.value, along_y = level.along_y.value;
      const auto pack = [&](int32_t x, int32_t y, int32_t z) {
        return ((x - low[0]) * along_x + (y - low[1]) * along_y + (z - low[2])) * static_cast<int>(sizeof(float4));
      };
      float4* sums = windows + level.first;
      auto* own_sums =
          reinterpret_cast<char*>(sums + lane / kCorners * level.window + x_side * along_x + y_side * along_y + z_side);
      walk_points<true>(level, positions, own_values, held, places, pack, [&](int32_t cell, const float4& sum) {
        add_weighted(reinterpret_cast<float4*>(own_sums + cell), 1.f, sum);
      });
      for (int i = lane; i < level.window; i += kWarp) {
        const auto sum = sum_copies(sums, i, level.window, kCoarseGroups);
        if (is_zero(sum)) continue;
        int32_t y, z;
        const int32_t x = low[0] + level.along_x.divide(i, y);
        y = low[1] + level.along_y.divide(y, z);
        z += low[2];
        // Weights of vertices that the grid lacks are zero, but zero times infinity is not.
        if (x < 0 || y < 0 || z < 0 || x >= resolution[0] || y >= resolution[1] || z >= resolution[2]) continue;
        atomic_add<kBinWidth>(level.data + ((x * resolution[1] + y) * resolution[2] + z) * kBinWidth, sum);
      }
    }
    __syncthreads();
  }
}

// Readies a level to be summed from a grid's bins: with a window if there is room for it. False if it is not coarse, or
// if there are too many.
inline bool cut_window(const Bins& bins, CoarseLevels& levels, CoarseLevel& level) {
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
  if (vertices * kCoarser > binned_vertices || levels.count == kMostCoarse) return false;
  const BoxStrides strides(level.size[1], level.size[2]);
  const int64_t copies = int64_t{level.size[0]} * strides.along_x * kCoarseGroups;
  level.first = kDirect;
  if (copies > kCoarseVertices || levels.windows + copies > kCoarseAllVertices) return true;
  level.along_x = Divisor(strides.along_x);
  level.along_y = Divisor(strides.along_y);
  level.window = static_cast<int32_t>(copies / kCoarseGroups);
  level.first = levels.windows;
  levels.windows += static_cast<int32_t>(copies);
  return true;
}

}  // namespace voxelfield
