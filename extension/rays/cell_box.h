// Cells of one kind, as a walk along a ray strides over them.
#pragma once

namespace voxelfield {

// A cube of cells that are all occupied, or all empty; it may reach beyond the grid.
struct CellBox {
  bool occupied;
  float low[3];  // lower faces, in cells
  float width;   // in cells
};

}  // namespace voxelfield
