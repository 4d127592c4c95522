// Host side of VertexGrid: made from checked tensors.
#pragma once

#include "common/check_tensor.h"
#include "optim/vertex_tiles.h"

namespace voxelfield {

// The vertices of a grid (X, Y, Z, C): all of them, or those of the first `block_count` of the tiles listed in
// `blocks`.
inline VertexGrid vertex_grid(const char* name, const Tensor& like, const std::optional<Tensor>& blocks,
                              const std::optional<Tensor>& block_count) {
  check_contiguous(name, like, {kAny, kAny, kAny, kAny}, ScalarType::Float, like);
  VertexGrid grid{};
  grid.vertices = 1;
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(like.size(axis) <= 0x7fffffff, name, " must have fewer than 2^31 vertices along an axis, got ",
                    like.size(axis));
    grid.size[axis] = static_cast<int32_t>(like.size(axis));
    grid.vertices *= grid.size[axis];
  }
  STD_TORCH_CHECK(like.size(3) <= 0x7fffffff, name, " must have fewer than 2^31 channels, got ", like.size(3));
  grid.channels = static_cast<int32_t>(like.size(3));
  STD_TORCH_CHECK(blocks.has_value() == block_count.has_value(),
                  "blocks and block_count must be given together, got only one of them");
  if (!blocks.has_value()) return grid;
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(tiles_along(grid.size[axis], axis) <= kMaxTilesAlong, name, " must have at most ",
                    kMaxTilesAlong << tile_shift(axis), " vertices along axis ", axis, " if blocks are listed, got ",
                    grid.size[axis]);
  }
  check_contiguous("blocks", *blocks, {kAny}, ScalarType::Int, like);
  check_contiguous("block_count", *block_count, {1}, ScalarType::Int, like);
  STD_TORCH_CHECK(blocks->size(0) <= 0x7fffffff, "blocks must be fewer than 2^31, got ", blocks->size(0));
  grid.capacity = static_cast<int32_t>(blocks->size(0));
  grid.tiles = blocks->const_data_ptr<int32_t>();
  grid.tile_count = block_count->const_data_ptr<int32_t>();
  return grid;
}

}  // namespace voxelfield
