// Hands the vertices of a grid out to the CPU's threads, as spans that follow one another in memory.
#pragma once

#include <algorithm>

#include "common/backend.h"
#include "optim/vertex_blocks.h"

namespace voxelfield {

// Calls f(first, count) for spans of vertices that together are all that the grid's visits reach.
template <typename F>
void for_each_span(const VertexGrid& grid, const F& f) {
  constexpr int64_t kValuesPerTask = 1 << 15;
  const int64_t visits_per_task = (kValuesPerTask / std::max(grid.channels, 1) / kBlockVertices + 1) * kBlockVertices;
  for_each_range(grid.visits(), visits_per_task, [&](int64_t begin, int64_t end) {
    if (grid.blocks == nullptr) return f(begin, end - begin);
    // Visits go through the rows of a block; only the first vertex of each is looked up.
    constexpr int64_t kRow = int64_t{1} << block_shift(2);
    for (int64_t visit = begin; visit < end; visit += kRow) {
      int32_t vertex[3];
      if (grid.find(visit, grid.id_of(visit), vertex)) {
        f(grid.index_of(vertex), std::min<int64_t>(kRow, grid.size[2] - vertex[2]));
      }
    }
  });
}

}  // namespace voxelfield
