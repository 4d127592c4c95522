#include "rays/cut_rays_ops.h"
#include "rays/march_levels_ops.h"
#include "rays/march_ops.h"
#include "rays/packing.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  MarchLevelsOps<CpuPacking>::implement(m);
  MarchOps<CpuPacking>::implement(m);
  m.impl("pack_slots", TORCH_BOX(&MarchOps<CpuPacking>::pack_slots));
  CutRaysOps<CpuPacking>::implement(m);
}

}  // namespace voxelfield
