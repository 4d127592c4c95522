// Summing a gradient into grids on CUDA without an atomic operation for each vertex (splat_tiled.cu). splat.cu chooses
// between this and atomics.
#pragma once

#include "common/backend.cuh"
#include "stencil/levels.cuh"

namespace voxelfield {

// Upper limit (exclusive) of the number of entries, one for each pair of a point and a tile that it touches.
constexpr int64_t kMaxEntries = int64_t{1} << 30;

// Vertices of a tile along x, y, z, which are powers of two. The sums of 16 float32 channels take 8 KiB of shared
// memory.
VOXELFIELD_HOST_DEVICE constexpr int splat_tile_size(int axis) { return axis < 2 ? 4 : 8; }
constexpr int kSplatTileVertices = 4 * 4 * 8;

template <typename scalar_t>
using SplatLevels = Levels<GridLocator<opmath_t<scalar_t>>, scalar_t>;

template <typename scalar_t, int Sets>
struct SplatInput {
  const Tensor& tensor;    // the tensor of values; scratch memory is allocated with its device and options
  const scalar_t* values;  // (sets, points, columns)
  PointsView<opmath_t<scalar_t>, Sets> at;
};

// Writes the levels' data by tiles, in a fixed order of summation if `deterministic`.
template <int Sets, typename scalar_t>
void splat_tiled(const SplatLevels<scalar_t>& levels, const SplatInput<scalar_t, Sets>& input, bool deterministic);

}  // namespace voxelfield
