// Packing the samples that show on the CPU: rays in parallel. (They are found by other ops, in Python.)
#include "common/backend.h"
#include "fields/pyramid_march_ops.h"
#include "rays/packing.h"

namespace voxelfield {
STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { m.impl("pack_slots", TORCH_BOX(&VisibleOps<CpuPacking>::pack_slots)); }

}  // namespace voxelfield
