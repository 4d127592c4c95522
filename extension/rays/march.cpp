// Ray marching on the CPU: rays in parallel.
#include "common/backend.h"
#include "rays/march_ops.h"
#include "rays/pack_rays.h"

namespace voxelfield {
namespace {

constexpr int64_t kBricksPerTask = 1 << 10;

struct Cpu : CpuBackend {
  static void pack_bricks(const bool* occupied, const OccupancyView& grid, int64_t* words, int64_t bricks) {
    torch::stable::parallel_for(0, bricks, kBricksPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t brick = begin; brick < end; ++brick) words[brick] = pack_brick(occupied, grid.resolution, brick);
    });
  }

  static void count_samples(const RaySegments& rays, const SegmentParts& parts, int32_t* counts, StepRange* step_ranges,
                            int64_t* sums) {
    count_segments(parts, counts, sums, [&](int64_t segment) { return count_on_segment(rays, segment, step_ranges); });
  }

  static void place_samples(const Packing& packing, const MarchedSamples& samples) { place_segments(packing, samples); }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("pack_occupancy", TORCH_BOX(&MarchOps<Cpu>::pack_occupancy));
  m.impl("count_ray_samples", TORCH_BOX(&MarchOps<Cpu>::count_ray_samples));
  m.impl("place_ray_samples", TORCH_BOX(&MarchOps<Cpu>::place_ray_samples));
}

}  // namespace voxelfield
