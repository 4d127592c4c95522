// Ray marching on the CPU: rays in parallel.
#include "common/backend.h"
#include "rays/march_ops.h"
#include "rays/pack_rays.h"

namespace voxelfield {
namespace {

constexpr int64_t kBlocksPerTask = 1 << 10;

struct Cpu : CpuBackend {
  static void pack_blocks(const bool* occupied, const OccupancyView& grid, int64_t* words, int64_t blocks) {
    torch::stable::parallel_for(0, blocks, kBlocksPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) words[block] = pack_block(occupied, grid.resolution, block);
    });
  }

  static void count_samples(const RaySegments& rays, const SegmentParts& parts, int32_t* counts, Stretch* stretches,
                            int64_t* sums) {
    count_segments(parts, counts, sums, [&](int64_t segment) { return count_on_segment(rays, segment, stretches); });
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
