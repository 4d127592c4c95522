// Host side of active_blocks_, written once: check and hand over to Backend::active_blocks(cells, ids, count).
#pragma once

#include "common/tensors.h"
#include "optim/active_blocks.h"

namespace voxelfield {

template <typename Backend>
struct ActiveBlocksOps {
  static void active_blocks_(const Tensor& occupied, std::vector<int64_t> resolution, Tensor ids, Tensor count) {
    STD_TORCH_CHECK(occupied.dim() == 3 && occupied.scalar_type() == ScalarType::Bool && occupied.numel() > 0 &&
                        occupied.numel() <= 0x7fffffff && resolution.size() == 3,
                    "occupied must be bool (X, Y, Z) of 1 to 2^31 - 1 cells, resolution three sizes");
    const typename Backend::Guard guard(occupied);
    const Tensor cells = as_contiguous(occupied);
    OccupiedCells grid{cells.const_data_ptr<bool>(), {}, {}, {}};
    for (int axis = 0; axis < 3; ++axis) {
      STD_TORCH_CHECK(resolution[axis] >= 1 && resolution[axis] <= int64_t{kMaxBlocksAlong} << block_shift(axis),
                      "a grid of ", resolution[axis], " vertices along an axis has no blocks, or too many for an id");
      grid.cells[axis] = static_cast<int32_t>(cells.size(axis));
      grid.vertices[axis] = static_cast<int32_t>(resolution[axis]);
      grid.blocks[axis] = blocks_along(grid.vertices[axis], axis);
    }
    for (const Tensor& x : {ids, count}) {
      STD_TORCH_CHECK(x.dim() == 1 && x.is_contiguous() && x.scalar_type() == ScalarType::Int && same_device(x, cells),
                      "ids (K,) and count (1,) must be contiguous int32 on the device of occupied");
    }
    STD_TORCH_CHECK(ids.size(0) == grid.block_total() && count.size(0) == 1, "ids must be (", grid.block_total(),
                    ",) and count (1,)");
    Backend::active_blocks(grid, ids.mutable_data_ptr<int32_t>(), count.mutable_data_ptr<int32_t>());
  }
};

}  // namespace voxelfield
