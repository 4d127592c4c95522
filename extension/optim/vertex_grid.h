// Host side of VertexGrid: from tensors, checked.
#pragma once

#include "common/tensors.h"
#include "optim/vertex_blocks.h"

namespace voxelfield {

// A grid's vertices, all or those of listed blocks. `like` is the grid (X, Y, Z, C).
inline VertexGrid vertex_grid(const Tensor& like, const std::optional<Tensor>& blocks,
                              const std::optional<Tensor>& block_count) {
  STD_TORCH_CHECK(like.dim() == 4, "a grid must be (X, Y, Z, C)");
  VertexGrid grid{};
  grid.vertices = 1;
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(like.size(axis) <= 0x7fffffff, "a grid of ", like.size(axis),
                    " vertices along an axis is too long");
    grid.size[axis] = static_cast<int32_t>(like.size(axis));
    grid.vertices *= grid.size[axis];
  }
  grid.channels = static_cast<int32_t>(like.size(3));
  STD_TORCH_CHECK(blocks.has_value() == block_count.has_value(), "blocks and block_count come together");
  if (!blocks.has_value()) return grid;
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(blocks_along(grid.size[axis], axis) <= kMaxBlocksAlong, "a grid of ", grid.size[axis],
                    " vertices along an axis has more blocks than an id can name");
  }
  for (const Tensor& x : {*blocks, *block_count}) {
    STD_TORCH_CHECK(x.dim() == 1 && x.is_contiguous() && x.scalar_type() == ScalarType::Int && same_device(x, like),
                    "blocks (K,) and block_count (1,) must be contiguous int32 on the grid's device");
  }
  STD_TORCH_CHECK(block_count->size(0) == 1 && blocks->size(0) <= 0x7fffffff, "block_count must be (1,)");
  grid.capacity = static_cast<int32_t>(blocks->size(0));
  grid.blocks = blocks->const_data_ptr<int32_t>();
  grid.block_count = block_count->const_data_ptr<int32_t>();
  return grid;
}

}  // namespace voxelfield
