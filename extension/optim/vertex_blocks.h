// Which vertices of a grid (X, Y, Z, C) a kernel visits: all of them, or those of blocks named by a list on the device.
#pragma once

#include <cstdint>

#include "common/platform.h"

namespace voxelfield {

// Vertices of a block along x, y, z. Eight along z are 128 contiguous bytes of a float32 grid of four channels; fewer
// along x and y fit a surface more closely. The numbers are also in voxelfield/ops/blocks.py.
VOXELFIELD_HOST_DEVICE constexpr int block_shift(int axis) { return axis < 2 ? 2 : 3; }
constexpr int kBlockVertices = 4 * 4 * 8;

VOXELFIELD_HOST_DEVICE constexpr int32_t blocks_along(int32_t vertices, int axis) {
  return ((vertices - 1) >> block_shift(axis)) + 1;
}

// A block's id has its number along each axis in ten bits, x highest: nothing is divided to find it.
constexpr int kBlockBits = 10;
constexpr int32_t kMaxBlocksAlong = 1 << kBlockBits;

VOXELFIELD_HOST_DEVICE constexpr int32_t block_id(int32_t x, int32_t y, int32_t z) {
  return (x << kBlockBits | y) << kBlockBits | z;
}

struct VertexGrid {
  int32_t size[3];
  int32_t channels;
  int64_t vertices;
  const int32_t* blocks;       // ids of blocks; null: every vertex is visited
  const int32_t* block_count;  // how many of them to visit
  int32_t capacity;            // how many there is room for

  // Visits are numbered; some of a list's lie outside the grid, in blocks that its far faces cut.
  VOXELFIELD_HOST_DEVICE int64_t visits() const {
    if (blocks == nullptr) return vertices;
    const int32_t count = *block_count;
    return static_cast<int64_t>(count < 0 ? 0 : (count < capacity ? count : capacity)) * kBlockVertices;
  }

  int64_t most_visits() const { return blocks == nullptr ? vertices : static_cast<int64_t>(capacity) * kBlockVertices; }

  // The block that a visit of a list lies in.
  VOXELFIELD_HOST_DEVICE int32_t id_of(int64_t visit) const { return blocks[visit / kBlockVertices]; }

  // Finds the vertex of a visit, in block `id` if there is a list; false if there is none.
  VOXELFIELD_HOST_DEVICE bool find(int64_t visit, int32_t id, int32_t (&vertex)[3]) const {
    if (blocks == nullptr) {
      const int64_t row = visit / size[2];
      vertex[2] = static_cast<int32_t>(visit - row * size[2]);
      vertex[0] = static_cast<int32_t>(row / size[1]);
      vertex[1] = static_cast<int32_t>(row - static_cast<int64_t>(vertex[0]) * size[1]);
      return true;
    }
    int32_t within = static_cast<int32_t>(visit % kBlockVertices);
    bool inside = id >= 0;
    VOXELFIELD_UNROLL
    for (int axis = 2; axis >= 0; --axis) {
      const int32_t block = axis > 0 ? id & (kMaxBlocksAlong - 1) : id;
      vertex[axis] = block << block_shift(axis) | (within & ((1 << block_shift(axis)) - 1));
      inside = inside && vertex[axis] < size[axis];
      id >>= kBlockBits;
      within >>= block_shift(axis);
    }
    return inside;
  }

  VOXELFIELD_HOST_DEVICE int64_t index_of(const int32_t (&vertex)[3]) const {
    return (static_cast<int64_t>(vertex[0]) * size[1] + vertex[1]) * size[2] + vertex[2];
  }

  // The index of a visit's vertex, -1 if there is none.
  VOXELFIELD_HOST_DEVICE int64_t index_of_visit(int64_t visit, int32_t id) const {
    if (blocks == nullptr) return visit;
    int32_t vertex[3];
    return find(visit, id, vertex) ? index_of(vertex) : -1;
  }
};

}  // namespace voxelfield
