// Which tiles of a grid's vertices samples in occupied cells of the same box can touch, and the host side of
// active_tiles_, written once: check the tensors and call Backend::active_tiles(cells, ids, count).
#pragma once

#include "optim/vertex_grid.h"

namespace voxelfield {

// A tile, and the cells in which samples touch a vertex of it.
struct TileCells {
  int32_t id;
  int32_t first[3], count[3];

  // Rows of cells along z.
  VOXELFIELD_HOST_DEVICE int32_t rows() const { return count[0] * count[1]; }
};

struct OccupiedCells {
  const bool* occupied;  // (X, Y, Z)
  int32_t cells[3];
  int32_t vertices[3];  // of the grid
  int32_t tiles[3];     // that cover it

  VOXELFIELD_HOST_DEVICE int64_t tile_total() const { return static_cast<int64_t>(tiles[0]) * tiles[1] * tiles[2]; }

  // Tiles are numbered row by row along z.
  VOXELFIELD_HOST_DEVICE TileCells operator[](int64_t number) const {
    const int32_t column = static_cast<int32_t>(number / tiles[2]), x = column / tiles[1];
    const int32_t tile[3] = {x, column - x * tiles[1],
                             static_cast<int32_t>(number - static_cast<int64_t>(column) * tiles[2])};
    TileCells range{tile_id(tile[0], tile[1], tile[2]), {}, {}};
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

  // Whether any cell is occupied in every `step`th row of a tile's cells, from row `row` on.
  VOXELFIELD_HOST_DEVICE bool any(const TileCells& range, int32_t row, int32_t step) const {
    bool found = false;
    for (; row < range.rows() && !found; row += step) {
      const int32_t x = row / range.count[1], y = row - x * range.count[1];
      const bool* cell = occupied +
                         (static_cast<int64_t>(range.first[0] + x) * cells[1] + range.first[1] + y) * cells[2] +
                         range.first[2];
      for (int32_t z = 0; z < range.count[2]; ++z) found |= cell[z];
    }
    return found;
  }
};

template <typename Backend>
struct ActiveTilesOps {
  static void active_tiles_(const Tensor& occupied, std::vector<int64_t> resolution, Tensor ids, Tensor count) {
    const Tensor cells = checked("occupied", occupied, {kAny, kAny, kAny}, ScalarType::Bool, occupied);
    STD_TORCH_CHECK(occupied.numel() > 0 && occupied.numel() <= 0x7fffffff,
                    "occupied must have 1 to 2^31 - 1 cells, got ", occupied.numel());
    STD_TORCH_CHECK(resolution.size() == 3, "resolution must be three sizes, got ", resolution.size());
    const typename Backend::Guard guard(occupied);
    OccupiedCells grid{data_of(cells), {}, {}, {}};
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t max_size = int64_t{kMaxTilesAlong} << tile_shift(axis);
      STD_TORCH_CHECK(resolution[axis] >= 1 && resolution[axis] <= max_size, "resolution[", axis, "] must be 1 to ",
                      max_size, ", got ", resolution[axis]);
      grid.cells[axis] = static_cast<int32_t>(cells.size(axis));
      grid.vertices[axis] = static_cast<int32_t>(resolution[axis]);
      grid.tiles[axis] = tiles_along(grid.vertices[axis], axis);
    }
    Backend::active_tiles(grid, check_contiguous("ids", ids, {grid.tile_total()}, ScalarType::Int, cells),
                          check_contiguous("count", count, {1}, ScalarType::Int, cells));
  }

  static void implement(Library& m) { m.impl("active_tiles_", TORCH_BOX(&ActiveTilesOps::active_tiles_)); }
};

}  // namespace voxelfield
