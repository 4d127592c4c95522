// Which cells of a box are occupied, a bit each: a word holds a block of 4 x 4 x 4 cells, so that a walk learns with
// one load about all the space around it, and crosses an empty block in one stride.
#pragma once

#include "common/constants.h"
#include "common/whole_numbers.h"
#include "rays/cell_box.h"

namespace voxelfield {

constexpr int32_t kBlockCells = 1 << kBlockShift;  // along each axis
constexpr int32_t kWithinBlock = kBlockCells - 1;

VOXELFIELD_HOST_DEVICE int32_t blocks_for(int64_t cells) {
  return static_cast<int32_t>((cells + kBlockCells - 1) / kBlockCells);
}

VOXELFIELD_HOST_DEVICE int bit_of(int32_t x, int32_t y, int32_t z) {
  return (x & kWithinBlock) << 2 * kBlockShift | (y & kWithinBlock) << kBlockShift | (z & kWithinBlock);
}

struct OccupancyView {
  const int64_t* words;   // (blocks[0], blocks[1], blocks[2])
  int32_t resolution[3];  // cells
  int32_t blocks[3];
  const float* aabb;  // lower corner, upper corner

  VOXELFIELD_HOST_DEVICE CellBox around(const int32_t cell[3]) const {
    const int64_t word =
        words[((cell[0] >> kBlockShift) * blocks[1] + (cell[1] >> kBlockShift)) * blocks[2] + (cell[2] >> kBlockShift)];
    const int32_t width = word == 0 || word == -1 ? kBlockCells : 1;
    return {(static_cast<uint64_t>(word) >> bit_of(cell[0], cell[1], cell[2]) & 1) != 0,
            {int_to_float(cell[0] & -width), int_to_float(cell[1] & -width), int_to_float(cell[2] & -width)},
            int_to_float(width)};
  }
};

// The word of one block of a grid (X, Y, Z) of bools; cells beyond the grid are empty.
VOXELFIELD_HOST_DEVICE int64_t pack_block(const bool* occupied, const int32_t resolution[3], int64_t block) {
  const int32_t blocks_y = blocks_for(resolution[1]), blocks_z = blocks_for(resolution[2]);
  const int32_t first[3] = {static_cast<int32_t>(block / blocks_z / blocks_y) * kBlockCells,
                            static_cast<int32_t>(block / blocks_z % blocks_y) * kBlockCells,
                            static_cast<int32_t>(block % blocks_z) * kBlockCells};
  uint64_t word = 0;
  for (int32_t x = first[0]; x < first[0] + kBlockCells && x < resolution[0]; ++x) {
    for (int32_t y = first[1]; y < first[1] + kBlockCells && y < resolution[1]; ++y) {
      const bool* row = occupied + (static_cast<int64_t>(x) * resolution[1] + y) * resolution[2];
      for (int32_t z = first[2]; z < first[2] + kBlockCells && z < resolution[2]; ++z) {
        word |= static_cast<uint64_t>(row[z]) << bit_of(x, y, z);
      }
    }
  }
  return static_cast<int64_t>(word);
}

}  // namespace voxelfield
