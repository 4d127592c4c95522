// The occupied cells of a box in either of two forms: a bit for each cell, or a byte with the distance to the nearest
// occupied cell.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/constants.h"
#include "common/platform.h"
#include "common/whole_numbers.h"

namespace voxelfield {

// A cube of cells that are all occupied, or all empty; it may reach beyond the grid.
struct CellBox {
  bool occupied;
  float low[3];  // lower faces, in cells
  float width;   // in cells
};

constexpr int32_t kBrickCells = 1 << kBrickShift;  // along each axis
constexpr int32_t kWithinBrick = kBrickCells - 1;

VOXELFIELD_HOST_DEVICE int32_t bricks_for(int64_t cells) {
  return static_cast<int32_t>((cells + kBrickCells - 1) / kBrickCells);
}

VOXELFIELD_HOST_DEVICE int bit_of(int32_t x, int32_t y, int32_t z) {
  return (x & kWithinBrick) << 2 * kBrickShift | (y & kWithinBrick) << kBrickShift | (z & kWithinBrick);
}

// A bit for each cell. A word holds a brick of 4 x 4 x 4 cells, so that a walk learns about the space around it with
// one load and crosses an empty brick in one stride.
struct OccupancyView {
  const int64_t* words;   // (bricks[0], bricks[1], bricks[2])
  int32_t resolution[3];  // cells
  int32_t bricks[3];
  const float* aabb;  // lower corner, upper corner

  VOXELFIELD_HOST_DEVICE CellBox around(const int32_t cell[3]) const {
    const int64_t word =
        words[((cell[0] >> kBrickShift) * bricks[1] + (cell[1] >> kBrickShift)) * bricks[2] + (cell[2] >> kBrickShift)];
    const int32_t width = word == 0 || word == -1 ? kBrickCells : 1;
    return {(static_cast<uint64_t>(word) >> bit_of(cell[0], cell[1], cell[2]) & 1) != 0,
            {int_to_float(cell[0] & -width), int_to_float(cell[1] & -width), int_to_float(cell[2] & -width)},
            int_to_float(width)};
  }
};

// Packs the bricks of a grid (X, Y, Z) of bools; cells beyond the grid are empty.
struct PackBricks {
  const bool* occupied;
  OccupancyView grid;
  int64_t* words;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t brick) const {
    const int32_t* size = grid.resolution;
    const int32_t first[3] = {static_cast<int32_t>(brick / grid.bricks[2] / grid.bricks[1]) * kBrickCells,
                              static_cast<int32_t>(brick / grid.bricks[2] % grid.bricks[1]) * kBrickCells,
                              static_cast<int32_t>(brick % grid.bricks[2]) * kBrickCells};
    uint64_t word = 0;
    for (int32_t x = first[0]; x < first[0] + kBrickCells && x < size[0]; ++x) {
      for (int32_t y = first[1]; y < first[1] + kBrickCells && y < size[1]; ++y) {
        const bool* row = occupied + (static_cast<int64_t>(x) * size[1] + y) * size[2];
        for (int32_t z = first[2]; z < first[2] + kBrickCells && z < size[2]; ++z) {
          word |= static_cast<uint64_t>(row[z]) << bit_of(x, y, z);
        }
      }
    }
    words[brick] = static_cast<int64_t>(word);
  }
};

// Either form, for kernels that accept both. Distances take eight times the memory and passes over all cells to
// compute, but let a ray cross empty space in longer strides.
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
