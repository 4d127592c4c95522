// Host side of active_blocks_, written once: check the tensors and call Backend::active_tiles(cells, ids, count).
#pragma once

#include "common/check_tensor.h"
#include "optim/active_tiles.h"

namespace voxelfield {

template <typename Backend>
struct ActiveTilesOps {
  static void active_tiles_(const Tensor& occupied, std::vector<int64_t> resolution, Tensor ids, Tensor count) {
    check_tensor("occupied", occupied, {kAny, kAny, kAny}, ScalarType::Bool, occupied);
    STD_TORCH_CHECK(occupied.numel() > 0 && occupied.numel() <= 0x7fffffff,
                    "occupied must have 1 to 2^31 - 1 cells, got ", occupied.numel());
    STD_TORCH_CHECK(resolution.size() == 3, "resolution must be three sizes, got ", resolution.size());
    const typename Backend::Guard guard(occupied);
    const Tensor cells = as_contiguous(occupied);
    OccupiedCells grid{cells.const_data_ptr<bool>(), {}, {}, {}};
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t most = int64_t{kMaxTilesAlong} << tile_shift(axis);
      STD_TORCH_CHECK(resolution[axis] >= 1 && resolution[axis] <= most, "resolution[", axis, "] must be 1 to ", most,
                      ", got ", resolution[axis]);
      grid.cells[axis] = static_cast<int32_t>(cells.size(axis));
      grid.vertices[axis] = static_cast<int32_t>(resolution[axis]);
      grid.tiles[axis] = tiles_along(grid.vertices[axis], axis);
    }
    check_contiguous("ids", ids, {grid.tile_total()}, ScalarType::Int, cells);
    check_contiguous("count", count, {1}, ScalarType::Int, cells);
    Backend::active_tiles(grid, ids.mutable_data_ptr<int32_t>(), count.mutable_data_ptr<int32_t>());
  }
};

}  // namespace voxelfield
