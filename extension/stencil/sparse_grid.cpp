#include "common/backend.h"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

namespace {

struct CpuSparseGrid : CpuBackend {
  // By one thread, because vertices share the words of the table.
  static void sum_touched(const SumTouchedDuplicates& all) {
    for (int64_t vertex = 0; vertex < all.vertices; ++vertex) {
      if (!all.any(vertex)) continue;
      for (int32_t channel = 0; channel < all.channels; ++channel) all(vertex * all.channels + channel);
      all.add_copies(vertex);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { SparseGridOps<CpuSparseGrid>::implement(m); }

}  // namespace voxelfield
