// The occupied cells of a box, one bit each. A word holds a brick of 4 x 4 x 4 cells, so that a walk learns about the
// space around it with one load and crosses an empty brick in one stride.
#pragma once

#include "common/constants.h"
#include "common/whole_numbers.h"
#include "rays/cell_box.h"

namespace voxelfield {

constexpr int32_t kBrickCells = 1 << kBrickShift;  // along each axis
constexpr int32_t kWithinBrick = kBrickCells - 1;

VOXELFIELD_HOST_DEVICE int32_t bricks_for(int64_t cells) {
  return static_cast<int32_t>((cells + kBrickCells - 1) / kBrickCells);
}

VOXELFIELD_HOST_DEVICE int bit_of(int32_t x, int32_t y, int32_t z) {
  return (x & kWithinBrick) << 2 * kBrickShift | (y & kWithinBrick) << kBrickShift | (z & kWithinBrick);
}

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

// The word of one brick of a grid (X, Y, Z) of bools; cells beyond the grid are empty.
VOXELFIELD_HOST_DEVICE int64_t pack_brick(const bool* occupied, const int32_t resolution[3], int64_t brick) {
  const int32_t bricks_y = bricks_for(resolution[1]), bricks_z = bricks_for(resolution[2]);
  const int32_t first[3] = {static_cast<int32_t>(brick / bricks_z / bricks_y) * kBrickCells,
                            static_cast<int32_t>(brick / bricks_z % bricks_y) * kBrickCells,
                            static_cast<int32_t>(brick % bricks_z) * kBrickCells};
  uint64_t word = 0;
  for (int32_t x = first[0]; x < first[0] + kBrickCells && x < resolution[0]; ++x) {
    for (int32_t y = first[1]; y < first[1] + kBrickCells && y < resolution[1]; ++y) {
      const bool* row = occupied + (static_cast<int64_t>(x) * resolution[1] + y) * resolution[2];
      for (int32_t z = first[2]; z < first[2] + kBrickCells && z < resolution[2]; ++z) {
        word |= static_cast<uint64_t>(row[z]) << bit_of(x, y, z);
      }
    }
  }
  return static_cast<int64_t>(word);
}

}  // namespace voxelfield
