// Lists active tiles on the CPU: tiles are tested in parallel and listed in order.
#include <vector>

#include "common/backend.h"
#include "optim/active_tiles_ops.h"

namespace voxelfield {
namespace {

struct Cpu : CpuBackend {
  static void active_tiles(const OccupiedCells& cells, int32_t* ids, int32_t* count) {
    const int64_t total = cells.tile_total();
    std::vector<char> active(total);
    for_each_range(total, 256, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number) {
        int32_t tile[3];
        cells.tile_of(number, tile);
        const CellRange range = cells.range_of(tile);
        for (int32_t row = 0; row < range.rows() && !active[number]; ++row)
          active[number] = cells.any_in_row(range, row);
      }
    });
    *count = 0;
    for (int64_t number = 0; number < total; ++number) {
      int32_t tile[3];
      cells.tile_of(number, tile);
      if (active[number]) ids[(*count)++] = tile_id(tile[0], tile[1], tile[2]);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("active_blocks_", TORCH_BOX(&ActiveTilesOps<Cpu>::active_tiles_));
}

}  // namespace voxelfield
