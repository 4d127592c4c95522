// A table of the vertices of a grid that a step has changed.
#pragma once

#include <cstdint>

#include "common/constants.h"
#include "common/platform.h"

namespace voxelfield {

constexpr int kOptimizerTileVertices = 1 << (2 * kOptimizerTileShiftXY + kOptimizerTileShiftZ);

// A row is a tile of vertices: a bit for each of them, then the number of these bits. Tiles are listed, or are vertices
// that follow each other in memory. `visit` is the number of a vertex, counted through the tiles.
struct TouchedTable {
  static constexpr int kWords = kOptimizerTileVertices / 32;
  static constexpr int kColumns = kWords + 1;

  int32_t* rows;

  static constexpr int64_t rows_for(int64_t vertices) {
    return (vertices + kOptimizerTileVertices - 1) / kOptimizerTileVertices;
  }

  VOXELFIELD_HOST_DEVICE int32_t* row(int64_t tile) const { return rows + tile * kColumns; }

  VOXELFIELD_HOST_DEVICE bool has(int64_t visit) const {
    const int32_t word = row(visit / kOptimizerTileVertices)[visit % kOptimizerTileVertices / 32];
    return (static_cast<uint32_t>(word) >> visit % 32 & 1) != 0;
  }

  // Adds a vertex that the table does not have yet. On CUDA, other threads may add others of the same row.
  VOXELFIELD_HOST_DEVICE void add(int64_t visit) const {
    int32_t* const words = row(visit / kOptimizerTileVertices);
    int32_t* const word = words + visit % kOptimizerTileVertices / 32;
    const int32_t bit = static_cast<int32_t>(1u << visit % 32);
#if defined(__CUDA_ARCH__)
    atomicOr(word, bit);
    atomicAdd(words + kWords, 1);
#else
    *word |= bit;
    ++words[kWords];
#endif
  }
};

}  // namespace voxelfield
