// Which tiles of a grid's vertices samples in occupied cells of the same box can touch.
#pragma once

#include <cstdint>

#include "optim/vertex_tiles.h"

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
  int32_t tiles[3];     // that cover it

  // The cells in which samples touch a vertex of a tile.
  VOXELFIELD_HOST_DEVICE CellRange range_of(const int32_t (&tile)[3]) const {
    CellRange range;
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t intervals = vertices[axis] > 1 ? vertices[axis] - 1 : 1;
      const int64_t first = static_cast<int64_t>(tile[axis]) << tile_shift(axis);
      const int64_t next = first + (int64_t{1} << tile_shift(axis));
      // Cell i spans the grid's coordinates i * intervals / cells to (i + 1) * intervals / cells, and samples touch a
      // vertex up to one interval below and above it. The bounds are computed in integers and include cells that only
      // share a face, because rounding may move a sample into the neighbouring cell.
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

  VOXELFIELD_HOST_DEVICE int64_t tile_total() const { return static_cast<int64_t>(tiles[0]) * tiles[1] * tiles[2]; }

  VOXELFIELD_HOST_DEVICE void tile_of(int64_t number, int32_t (&tile)[3]) const {
    const int32_t row = static_cast<int32_t>(number / tiles[2]);
    tile[2] = static_cast<int32_t>(number - static_cast<int64_t>(row) * tiles[2]);
    tile[0] = row / tiles[1];
    tile[1] = row - tile[0] * tiles[1];
  }
};

}  // namespace voxelfield
