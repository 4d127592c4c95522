// Distributes the vertices of a grid over the CPU's threads, as spans that are contiguous in memory.
#pragma once

#include <algorithm>

#include "common/backend.h"
#include "optim/vertex_tiles.h"

namespace voxelfield {

// Calls f(first, count) for spans that together cover all vertices to visit.
template <typename F>
void for_each_span(const VertexGrid& grid, const F& f) {
  constexpr int64_t kValuesPerTask = 1 << 15;
  const int64_t visits_per_task = (kValuesPerTask / std::max(grid.channels, 1) / kTileVertices + 1) * kTileVertices;
  for_each_range(grid.visits(), visits_per_task, [&](int64_t begin, int64_t end) {
    if (grid.tiles == nullptr) return f(begin, end - begin);
    // Visits follow the rows of a tile along z, so only the first vertex of each row is looked up.
    constexpr int64_t kRow = int64_t{1} << tile_shift(2);
    for (int64_t visit = begin; visit < end; visit += kRow) {
      int32_t vertex[3];
      if (grid.find(visit, grid.id_of(visit), vertex)) {
        f(grid.index_of(vertex), std::min<int64_t>(kRow, grid.size[2] - vertex[2]));
      }
    }
  });
}

}  // namespace voxelfield
