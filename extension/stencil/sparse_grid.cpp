// The ops on sparse grids on the CPU.
#include "common/backend.h"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

namespace {

struct CpuSparseGrid : CpuBackend {
  // By one thread, because vertices share the words of the table.
  static void share_touched(const ShareTouched& share) {
    for (int64_t vertex = 0; vertex < share.vertices; ++vertex) {
      if (!share.any(vertex)) continue;
      for (int32_t channel = 0; channel < share.channels; ++channel) share(vertex * share.channels + channel);
      share.add_copies(vertex);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { SparseGridOps<CpuSparseGrid>::implement(m); }

}  // namespace voxelfield
