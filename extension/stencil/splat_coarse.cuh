// Splats onto grids that are coarser than a grid whose points are listed by bin (splat_binned.cu). The points of a bin
// lie in few cells of a coarser grid, and consecutive points often lie in the same cell, because they are samples of a
// ray. A group of eight threads adds up such points in registers. In the coarsest levels, the points of a bin touch
// only a few vertices, so a warp collects these sums in a window in shared memory. In finer levels, the sums are added
// to the grid with atomics.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <cub/block/block_scan.cuh>

#include "stencil/entries.cuh"
#include "stencil/splat_methods.cuh"

namespace voxelfield {

constexpr int32_t kNoCell = INT32_MIN;

// The groups of a warp add up the points of a block for one level, with a quarter of the points per group. A group
// calls add(cell, sum) whenever the next point lies in another cell. `pack` maps the coordinates of a cell to a number
// other than kNoCell.
template <bool Shared, typename scalar_t, typename Pack, typename Add>
__device__ __forceinline__ void walk_points(const CoarseLevel& level, const float* positions,
                                            const Vector<scalar_t, kBinWidth>* values, int held, float4* places,
                                            const Pack& pack, const Add& add) {
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % kWarp, corner = lane % kCorners, group = lane / kCorners;
  const int share = (held + kCoarseGroups - 1) / kCoarseGroups;
  const int begin = group * share, end = min(begin + share, held);
  const CornerWeight weight_of(corner);
  Sums sum{};
  int32_t cell = kNoCell;
  for (int first = 0; first < share; first += kCorners) {
    const int own = begin + first + corner;
    float4 found = {0.f, 0.f, 0.f, __int_as_float(kNoCell)};
    if (own < end) {
      const AxisPlace x(positions[own], level.resolution[0], true);
      const AxisPlace y(positions[own + kCoarseChunk], level.resolution[1], true);
      const AxisPlace z(positions[own + 2 * kCoarseChunk], level.resolution[2], true);
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
          if (cell != kNoCell) add(cell, sum);
          sum = {};
          cell = next;
        }
        // The eight threads of a group share its window, so they synchronise here.
        if (Shared) __syncwarp();
        add_weighted(sum, weight_of(place[u].x, place[u].y, place[u].z), stored[u]);
      }
    }
    __syncwarp();
  }
  if (cell != kNoCell) add(cell, sum);
  __syncwarp();
}

// Blocks take chunks of bins, and the warps of a block take levels. Coordinates outside the grids are clamped.
template <typename scalar_t>
__global__ void __launch_bounds__(kCoarseThreads, 6)
    splat_coarse(const __grid_constant__ CoarseLevels levels, const __grid_constant__ Bins bins,
                 const scalar_t* __restrict__ values, const float* __restrict__ points,
                 const EntryList* __restrict__ entry_lists, const Chunk* __restrict__ chunks,
                 const EntryCounters* __restrict__ counters, const int32_t* __restrict__ entries) {
  using Value = Vector<scalar_t, kBinWidth>;
  using Scan = cub::BlockScan<int, kCoarseThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int32_t indices[kCoarseChunk];
  __shared__ typename Scan::TempStorage scan_scratch;
  Sums* windows = reinterpret_cast<Sums*>(shared);
  float4* all_places = reinterpret_cast<float4*>(windows + levels.windows);
  float* positions = reinterpret_cast<float*>(all_places + kCoarseThreads);
  Value* held_values = reinterpret_cast<Value*>(positions + 3 * kCoarseChunk);
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp, corner = lane % kCorners;

  for (int32_t number = blockIdx.x; number < counters->all_chunks; number += gridDim.x) {
    const Chunk chunk = chunks[number];
    const EntryList own = entry_lists[chunk.tile].chunk(chunk.number, kCoarseChunk);

    // Each thread reads up to two entries. Only entries in the home bin of their point are kept, so that each point
    // counts once.
    constexpr int kPerThread = 2;
    static_assert(kPerThread * kCoarseThreads >= kCoarseChunk);
    int32_t entry[kPerThread];
    int homes = 0, slot, held;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = kPerThread * thread + i;
      entry[i] = at < own.count ? entries[own.start + at] : 0;
      homes += (entry[i] & kHome) != 0;
    }
    for (int i = thread; i < levels.windows; i += kCoarseThreads) windows[i] = {};
    Scan(scan_scratch).ExclusiveSum(homes, slot, held);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if ((entry[i] & kHome) != 0) indices[slot++] = entry[i] & ~kHome;
    }
    __syncthreads();
    for (int i = thread; i < held; i += kCoarseThreads) {
      const float* from = points + int64_t{3} * indices[i];
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        __pipeline_memcpy_async(positions + axis * kCoarseChunk + i, from + axis, sizeof(float));
      }
    }
    // The levels of a row of values are adjacent in memory, so neighbouring threads fetch them.
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
        // The number of the lower vertex, followed by three bits that mark the axes along which it is the last vertex.
        const auto pack = [&](int32_t x, int32_t y, int32_t z) {
          const int last =
              (x + 1 < resolution[0] ? 0 : 4) + (y + 1 < resolution[1] ? 0 : 2) + (z + 1 < resolution[2] ? 0 : 1);
          return ((x * resolution[1] + y) * resolution[2] + z) * kCorners + last;
        };
        float* data = level.data + ((x_side * resolution[1] + y_side) * resolution[2] + z_side) * kBinWidth;
        walk_points<false>(level, positions, own_values, held, places, pack, [&](int32_t cell, const Sums& sum) {
          if ((cell & corner) != 0) return;
          atomic_add<kBinWidth>(data + cell / kCorners * kBinWidth, sum);
        });
        continue;
      }
      const BinWindow bin(bins, chunk.tile);
      int32_t low[3];
#pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        low[axis] = static_cast<int32_t>(floorf(static_cast<float>(bin.low[axis]) * level.ratio[axis] - kWindowMargin));
      }
      const int along_x = level.along_x.value, along_y = level.along_y.value;
      const auto pack = [&](int32_t x, int32_t y, int32_t z) {
        return ((x - low[0]) * along_x + (y - low[1]) * along_y + (z - low[2])) * static_cast<int>(sizeof(Sums));
      };
      Sums* sums = windows + level.first;
      auto* own_sums =
          reinterpret_cast<char*>(sums + lane / kCorners * level.window + x_side * along_x + y_side * along_y + z_side);
      walk_points<true>(level, positions, own_values, held, places, pack, [&](int32_t cell, const Sums& sum) {
        float* const to = reinterpret_cast<float*>(own_sums + cell);
        Sums total = load<kBinWidth>(to);
        total += sum;
        store(to, total);
      });
      for (int i = lane; i < level.window; i += kWarp) {
        const auto sum = sum_copies(sums, i, level.window, kCoarseGroups);
        if (sum.lane[0] == 0 && sum.lane[1] == 0 && sum.lane[2] == 0 && sum.lane[3] == 0) continue;
        int32_t y, z;
        const int32_t x = low[0] + level.along_x.divide(i, y);
        y = low[1] + level.along_y.divide(y, z);
        z += low[2];
        // A vertex beyond the grid has weight zero, but its sum is NaN if a value is infinite.
        if (x < 0 || y < 0 || z < 0 || x >= resolution[0] || y >= resolution[1] || z >= resolution[2]) continue;
        atomic_add<kBinWidth>(level.data + ((x * resolution[1] + y) * resolution[2] + z) * kBinWidth, sum);
      }
    }
    __syncthreads();
  }
}

}  // namespace voxelfield
