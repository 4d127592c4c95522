// The ways of summing a gradient into grids on CUDA that do without atomics on each vertex: splat_tiled.cu and
// splat_binned.cu. splat.cu chooses among them and atomics.
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
using SplatLevels = Levels<GridLocator<opmath_t<scalar_t>>, scalar_t>;

template <typename scalar_t>
struct SplatInput {
  const Tensor& tensor;    // of the values; scratch memory is allocated like it
  const scalar_t* values;  // (sets, points, columns)
  PointsView<opmath_t<scalar_t>> at;
};

// Writes the levels' data by tiles, in a fixed order of summation if `deterministic`.
template <typename Weights, typename scalar_t>
void splat_tiled(const SplatLevels<scalar_t>& levels, const SplatInput<scalar_t>& input, bool deterministic);

// Writes the data of the finest level of the bins, and of the levels that join it (bins.cuh).
template <typename scalar_t>
void splat_binned(const SortedBins& bins, const SplatInput<scalar_t>& input);

}  // namespace voxelfield
