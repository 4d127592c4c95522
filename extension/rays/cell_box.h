// Cells that are all alike, as a walk along a ray steps over them.
#pragma once

namespace voxelfield {

// A cube of cells that are all occupied, or all empty; it may reach beyond the grid.
struct CellBox {
  bool occupied;
  float low[3];  // its lower faces, in cells
  float width;
};

}  // namespace voxelfield
