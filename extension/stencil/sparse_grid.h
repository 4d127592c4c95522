// A sparse grid, which stores only some of its blocks of vertices. Blocks are found through a dense table, as in a
// two-level page table. This is voxel block hashing (Niessner et al. 2013) without the hash.
//
// Blocks are adjacent in an atlas, which is an ordinary dense grid. Neighbouring blocks of the sparse grid share their
// outermost vertices, and each has a copy of them. All vertices around a point therefore belong to one block, so
// sampling and its derivatives only need the position of the point in the atlas.
#pragma once

#include "stencil/trilinear.h"

namespace voxelfield {

constexpr int kBlockCells = kBlockVertices - 1;
// A table stores the position of a block in the atlas along each axis in this number of bits.
constexpr int kBlockNumberBits = 10;
static_assert(kMaxAtlasVertices / kBlockVertices <= 1 << kBlockNumberBits, "the numbers of blocks must fit");
// Maximum number of blocks along each axis. Their cells are counted exactly in int32 and in float32.
constexpr int64_t kMaxBlocks = 1 << 19;

struct BlockTable {
  // The minimum distance of points from the faces of a block, in cells. Rounding must not move a point into the
  // neighbouring block in the atlas, whose vertices are unrelated. The margin covers the rounding of coordinates up to
  // 4096.
  static constexpr float kMargin = 1.0f / 1024;

  const int32_t* blocks;  // (X, Y, Z): position in the atlas, x highest; -1 if not stored
  int32_t count[3];
  float atlas_scale[3];  // from vertices of the atlas to the unit cube of the atlas

  // Maps a point of the unit cube of the sparse grid to the unit cube of the atlas. Points beyond a face are moved to
  // the face. Returns false if the point is not finite or its block is not stored.
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
      const int32_t number = found >> kBlockNumberBits * (2 - axis) & ((1 << kBlockNumberBits) - 1);
      placed[axis] = (static_cast<float>(kBlockVertices * number) + within[axis]) * atlas_scale[axis];
    }
    return true;
  }
};

}  // namespace voxelfield
