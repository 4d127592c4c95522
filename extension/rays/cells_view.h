// The occupied cells of a box in either of two forms, for kernels that accept both: a bit for each cell, or a byte with
// the distance to the nearest occupied cell. Distances take eight times the memory and passes over all cells to
// compute, but let a ray cross empty space in longer strides.
#pragma once

#include "rays/occupancy_bits.h"

namespace voxelfield {

struct CellsView : OccupancyView {
  // (X, Y, Z), or null for bits: 0 in an occupied cell; otherwise all cells that are less than this number of cells
  // away along each axis are empty.
  const uint8_t* empty_distances;

  VOXELFIELD_HOST_DEVICE CellBox around(const int32_t cell[3]) const {
    if (empty_distances == nullptr) return OccupancyView::around(cell);
    const int32_t distance = empty_distances[(cell[0] * resolution[1] + cell[1]) * resolution[2] + cell[2]];
    const float reach = int_to_float(distance > 1 ? distance - 1 : 0);
    return {distance == 0,
            {int_to_float(cell[0]) - reach, int_to_float(cell[1]) - reach, int_to_float(cell[2]) - reach},
            fmaf(2.0f, reach, 1.0f)};
  }
};

}  // namespace voxelfield
