// The vertices of a grid (X, Y, Z, C) that a kernel visits: all of them, or those of tiles listed in device memory.
#pragma once

#include "common/checks.h"
#include "common/constants.h"
#include "common/touched.h"

namespace voxelfield {

// A tile is 4 x 4 x 8 vertices. In a float32 grid of four channels, eight vertices along z are 128 contiguous bytes.
// The smaller size along x and y follows a surface more closely.
VOXELFIELD_HOST_DEVICE constexpr int optimizer_tile_shift(int axis) {
  return axis < 2 ? kOptimizerTileShiftXY : kOptimizerTileShiftZ;
}

VOXELFIELD_HOST_DEVICE constexpr int32_t tiles_along(int32_t vertices, int axis) {
  return ((vertices - 1) >> optimizer_tile_shift(axis)) + 1;
}

// A tile id contains the position of the tile along each axis in ten bits, with x highest, so that decoding it needs no
// division.
constexpr int32_t kMaxTilesAlong = 1 << kTileBits;

VOXELFIELD_HOST_DEVICE constexpr int32_t tile_id(int32_t x, int32_t y, int32_t z) {
  return (x << kTileBits | y) << kTileBits | z;
}

VOXELFIELD_HOST_DEVICE constexpr int32_t tile_along(int32_t id, int axis) {
  return id >> kTileBits * (2 - axis) & (kMaxTilesAlong - 1);
}

struct VertexGrid {
  int32_t size[3];
  int32_t channels;
  int64_t vertices;
  const int32_t* tiles;       // ids; null: every vertex is visited
  const int32_t* tile_count;  // the number of listed tiles to visit; unused by kernels that visit the whole list
  int32_t capacity;           // length of the list

  // The number of visits. Some visits of listed tiles lie outside the grid, where its upper faces cut a tile.
  VOXELFIELD_HOST_DEVICE int64_t visits() const {
    if (tiles == nullptr) return vertices;
    const int32_t count = *tile_count;
    return static_cast<int64_t>(count < 0 ? 0 : (count < capacity ? count : capacity)) * kOptimizerTileVertices;
  }

  int64_t max_visits() const {
    return tiles == nullptr ? vertices : static_cast<int64_t>(capacity) * kOptimizerTileVertices;
  }

  // The id of the listed tile that contains a visit.
  VOXELFIELD_HOST_DEVICE int32_t id_of(int64_t visit) const { return tiles[visit / kOptimizerTileVertices]; }

  // Finds the vertex of a visit, which lies in tile `id` if tiles are listed. Returns false if it lies outside the
  // grid.
  VOXELFIELD_HOST_DEVICE bool find(int64_t visit, int32_t id, int32_t (&vertex)[3]) const {
    if (tiles == nullptr) {
      const int64_t row = visit / size[2];
      vertex[2] = static_cast<int32_t>(visit - row * size[2]);
      vertex[0] = static_cast<int32_t>(row / size[1]);
      vertex[1] = static_cast<int32_t>(row - static_cast<int64_t>(vertex[0]) * size[1]);
      return true;
    }
    int32_t within = static_cast<int32_t>(visit % kOptimizerTileVertices);
    bool inside = id >= 0;
    VOXELFIELD_UNROLL
    for (int axis = 2; axis >= 0; --axis) {
      const int32_t tile = axis > 0 ? id & (kMaxTilesAlong - 1) : id;
      vertex[axis] = tile << optimizer_tile_shift(axis) | (within & ((1 << optimizer_tile_shift(axis)) - 1));
      inside = inside && vertex[axis] < size[axis];
      id >>= kTileBits;
      within >>= optimizer_tile_shift(axis);
    }
    return inside;
  }

  VOXELFIELD_HOST_DEVICE int64_t index_of(const int32_t (&vertex)[3]) const {
    return (static_cast<int64_t>(vertex[0]) * size[1] + vertex[1]) * size[2] + vertex[2];
  }

  // The index of the vertex of a visit, or -1 if it lies outside the grid.
  VOXELFIELD_HOST_DEVICE int64_t index_of_visit(int64_t visit, int32_t id) const {
    if (tiles == nullptr) return visit;
    int32_t vertex[3];
    return find(visit, id, vertex) ? index_of(vertex) : -1;
  }
};

// Host side: creates a VertexGrid of all vertices of a checked tensor (X, Y, Z, C).
inline VertexGrid vertex_grid(const char* name, const Tensor& like, ScalarType dtype) {
  contiguous_data(name, like, {kAny, kAny, kAny, kAny}, dtype, like);
  VertexGrid grid{};
  for (int axis = 0; axis < 4; ++axis) {
    STD_TORCH_CHECK(like.size(axis) <= 0x7fffffff, name, " must have sizes below 2^31, got ", like.size(axis));
    (axis < 3 ? grid.size[axis] : grid.channels) = static_cast<int32_t>(like.size(axis));
  }
  grid.vertices = int64_t{grid.size[0]} * grid.size[1] * grid.size[2];
  return grid;
}

// Restricts a VertexGrid to the tiles listed in `tiles`.
inline void list_tiles(const char* name, VertexGrid& grid, const char* tiles_name, const Tensor& tiles,
                       const Tensor& like) {
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(tiles_along(grid.size[axis], axis) <= kMaxTilesAlong, name, " must have at most ",
                    kMaxTilesAlong << optimizer_tile_shift(axis), " vertices along axis ", axis,
                    " if tiles are listed, got ", grid.size[axis]);
  }
  grid.tiles = contiguous_data(tiles_name, tiles, {kAny}, ScalarType::Int, like);
  STD_TORCH_CHECK(tiles.size(0) <= 0x7fffffff, tiles_name, " must be fewer than 2^31, got ", tiles.size(0));
  grid.capacity = static_cast<int32_t>(tiles.size(0));
}

// Creates a VertexGrid of all vertices of a float32 grid, or of those of the first `tile_count` tiles in `tiles`.
inline VertexGrid vertex_grid(const char* name, const Tensor& like, const OptionalTensor& tiles,
                              const OptionalTensor& tile_count) {
  VertexGrid grid = vertex_grid(name, like, ScalarType::Float);
  STD_TORCH_CHECK(tiles.has_value() == tile_count.has_value(),
                  "tiles and tile_count must be given together, got only one of them");
  if (!tiles.has_value()) return grid;
  list_tiles(name, grid, "tiles", *tiles, like);
  grid.tile_count = contiguous_data("tile_count", *tile_count, {1}, ScalarType::Int, like);
  return grid;
}

}  // namespace voxelfield
