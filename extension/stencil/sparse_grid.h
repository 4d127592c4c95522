// A sparse grid, which stores only some of its blocks of vertices. Blocks are found through a dense table, as in a
// two-level page table: voxel block hashing (Niessner et al. 2013) without the hash.
//
// Blocks lie side by side in an atlas, which is a dense grid like any other. A block shares its outermost vertices with
// those beside it, and each has a copy of them: all vertices around a point are then of one block, and where the point
// lies in the atlas is all that sampling and its derivatives have to know.
#pragma once

#include "stencil/trilinear.h"

namespace voxelfield {

constexpr int kBlockCells = kBlockVertices - 1;

struct BlockTable {
  // How far points stay from a block's faces, in cells: rounding must not move them into the block beside it in the
  // atlas, at whose vertices there is something else. It is that of coordinates up to 4096.
  static constexpr float kMargin = 1.0f / 1024;

  const int32_t* blocks;  // (X, Y, Z): a block's numbers in the atlas, ten bits for each axis, x highest; -1: not there
  int32_t count[3];
  float atlas_scale[3];  // from vertices of the atlas to its unit cube

  // From a point of the sparse grid's unit cube to the atlas's. Beyond the faces, points belong to the nearest one.
  // False if the point is not finite, or its block is not there.
  VOXELFIELD_HOST_DEVICE bool place(const float* point, float* placed) const {
    if (!all_finite(point)) return false;
    int32_t index = 0;
    float within[3];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float cells = static_cast<float>(kBlockCells * count[axis]);
      const float u = clamp(multiply_add(point[axis], cells, 0.0f), cells);
      const int32_t block = static_cast<int32_t>(u * (1.0f / kBlockCells)), last = count[axis] - 1;
      const int32_t own = block < last ? block : last;
      within[axis] = clamp(u - static_cast<float>(kBlockCells * own) - kMargin, kBlockCells - 2 * kMargin) + kMargin;
      index = index * count[axis] + own;
    }
    const int32_t found = blocks[index];
    if (found < 0) return false;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const int32_t number = found >> kTileBits * (2 - axis) & ((1 << kTileBits) - 1);
      placed[axis] = (static_cast<float>(kBlockVertices * number) + within[axis]) * atlas_scale[axis];
    }
    return true;
  }
};

}  // namespace voxelfield
