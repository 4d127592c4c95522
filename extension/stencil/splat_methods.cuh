// The ways of summing a gradient into grids on CUDA, one source file each: splat_atomic.cu, splat_tiled.cu and
// splat_binned.cu. splat.cu chooses among them.
#pragma once

#include "common/backend.cuh"
#include "stencil/bins.cuh"
#include "stencil/levels.cuh"

namespace voxelfield {

// Points that touch a tile or bin, counted once for each that they touch, must be fewer than this.
constexpr int64_t kMaxEntries = int64_t{1} << 30;

// Vertices of a tile along x, y, z: powers of two. The sums of 16 float32 channels take 8 KiB of shared memory.
VOXELFIELD_HOST_DEVICE constexpr int tile_size(int axis) { return axis < 2 ? 4 : 8; }
constexpr int kTileVertices = 4 * 4 * 8;

template <typename scalar_t>
struct SplatInput {
  using T = opmath_t<scalar_t>;

  const Tensor& tensor;    // of the values; scratch memory is allocated like it
  const scalar_t* values;  // (sets, n, columns)
  const T* points;         // (n, 3)
  const T* directions;     // (n, 3), for directional weights
  int64_t n;
};

// Adds to the levels' data with atomics. `dense`: there are more points than vertices.
template <typename Weights, typename scalar_t>
void splat_atomic(const Levels<GridLocator<opmath_t<scalar_t>>, opmath_t<scalar_t>>& levels,
                  const SplatInput<scalar_t>& input, bool dense);

// Writes the levels' data by tiles, in a fixed order of summation if `deterministic`.
template <typename Weights, typename scalar_t>
void splat_tiled(const Levels<GridLocator<opmath_t<scalar_t>>, scalar_t>& levels, const SplatInput<scalar_t>& input,
                 bool deterministic);

// Writes the data of the finest level of the bins, and of the levels that join it (bins.cuh).
template <typename scalar_t>
void splat_binned(const SortedBins& bins, const SplatInput<scalar_t>& input);

// Calls a macro with each type of values.
#define VOXELFIELD_FOR_EACH_FLOATING(F) F(float) F(double) F(torch::headeronly::Half) F(torch::headeronly::BFloat16)

}  // namespace voxelfield
