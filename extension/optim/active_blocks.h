// Which blocks of a grid's vertices can be reached from occupied cells of the same box.
#pragma once

#include <cstdint>

#include "optim/vertex_blocks.h"

namespace voxelfield {

struct CellRange {
  int32_t first[3], count[3];

  // Rows of cells along z.
  VOXELFIELD_HOST_DEVICE int32_t rows() const { return count[0] * count[1]; }
};

struct OccupiedCells {
  const bool* occupied;  // (X, Y, Z)
  int32_t cells[3];
  int32_t vertices[3];  // of the grid
  int32_t blocks[3];    // that cover it

  // The cells from which samples touch a vertex of a block.
  VOXELFIELD_HOST_DEVICE CellRange range_of(const int32_t (&block)[3]) const {
    CellRange range;
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t intervals = vertices[axis] > 1 ? vertices[axis] - 1 : 1;
      const int64_t first = static_cast<int64_t>(block[axis]) << block_shift(axis);
      const int64_t next = first + (int64_t{1} << block_shift(axis));
      // Cell i spans the grid's coordinates i * intervals / cells to (i + 1) * intervals / cells, and a vertex is
      // touched from one below it to one above. In integers, with faces on both sides: a sample whose position was
      // rounded may lie in the cell next door.
      const int64_t low = first > 1 ? ((first - 1) * cells[axis] + intervals - 1) / intervals - 1 : 0;
      const int64_t high = (next < vertices[axis] ? next : vertices[axis]) * cells[axis] / intervals;
      range.first[axis] = static_cast<int32_t>(low < 0 ? 0 : low);
      range.count[axis] = static_cast<int32_t>(high < cells[axis] ? high : cells[axis] - 1) - range.first[axis] + 1;
    }
    return range;
  }

  // Whether any cell of a range's row is occupied.
  VOXELFIELD_HOST_DEVICE bool any_in_row(const CellRange& range, int32_t row) const {
    const int32_t x = row / range.count[1], y = row - x * range.count[1];
    const bool* cell = occupied +
                       (static_cast<int64_t>(range.first[0] + x) * cells[1] + range.first[1] + y) * cells[2] +
                       range.first[2];
    bool any = false;
    for (int32_t z = 0; z < range.count[2]; ++z) any |= cell[z];
    return any;
  }

  VOXELFIELD_HOST_DEVICE int64_t block_total() const { return static_cast<int64_t>(blocks[0]) * blocks[1] * blocks[2]; }

  VOXELFIELD_HOST_DEVICE void block_of(int64_t number, int32_t (&block)[3]) const {
    const int32_t row = static_cast<int32_t>(number / blocks[2]);
    block[2] = static_cast<int32_t>(number - static_cast<int64_t>(row) * blocks[2]);
    block[0] = row / blocks[1];
    block[1] = row - block[0] * blocks[1];
  }
};

}  // namespace voxelfield
