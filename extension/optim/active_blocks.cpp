// Listing active blocks on the CPU: blocks are looked at in parallel, and listed one after the other.
#include <vector>

#include "common/backend.h"
#include "optim/active_blocks_ops.h"

namespace voxelfield {
namespace {

struct Cpu : CpuBackend {
  static void active_blocks(const OccupiedCells& cells, int32_t* ids, int32_t* count) {
    const int64_t total = cells.block_total();
    std::vector<char> active(total);
    for_each_range(total, 256, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number) {
        int32_t block[3];
        cells.block_of(number, block);
        const CellRange range = cells.range_of(block);
        for (int32_t row = 0; row < range.rows() && !active[number]; ++row)
          active[number] = cells.any_in_row(range, row);
      }
    });
    *count = 0;
    for (int64_t number = 0; number < total; ++number) {
      int32_t block[3];
      cells.block_of(number, block);
      if (active[number]) ids[(*count)++] = block_id(block[0], block[1], block[2]);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("active_blocks_", TORCH_BOX(&ActiveBlocksOps<Cpu>::active_blocks_));
}

}  // namespace voxelfield
