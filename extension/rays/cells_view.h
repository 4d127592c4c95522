// Which cells of a box are occupied, in either of two forms, for kernels that take both: bits, or clearances, which
// show the way over far more empty space at once but take a byte a cell, and passes over all cells to find.
#pragma once

#include "rays/occupancy_bits.h"

namespace voxelfield {

struct CellsView : OccupancyView {
  // (X, Y, Z), or null for bits: 0 in an occupied cell; otherwise all cells that are less than this number of cells
  // away along each axis are empty.
  const uint8_t* clearances;

  VOXELFIELD_HOST_DEVICE CellBox around(const int32_t cell[3]) const {
    if (clearances == nullptr) return OccupancyView::around(cell);
    const int32_t clearance = clearances[(cell[0] * resolution[1] + cell[1]) * resolution[2] + cell[2]];
    const float reach = int_to_float(clearance > 1 ? clearance - 1 : 0);
    return {clearance == 0,
            {int_to_float(cell[0]) - reach, int_to_float(cell[1]) - reach, int_to_float(cell[2]) - reach},
            fmaf(2.0f, reach, 1.0f)};
  }
};

}  // namespace voxelfield
