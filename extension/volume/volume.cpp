// The ops of this folder on the CPU. One thread per ray processes the samples of the ray in order.
#include "rays/packing.h"
#include "volume/composite_blocks.h"
#include "volume/ray_sums_ops.h"
#include "volume/select_ops.h"

namespace voxelfield {
namespace {

struct CpuVolume : CpuPacking {
  static constexpr int64_t kRaysPerTask = 64;

  // Calls walk(ray, span, team) for every ray. It returns the first sample that it did not process. Also calls
  // walk.clear(i) for all samples of the ray from that one on, and for all samples that belong to no ray.
  template <typename Walk>
  static void for_each_ray(const PackedRays& rays, const Walk& walk) {
    for_each_range(rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t ray = begin; ray < end; ++ray) {
        const RaySpan span = rays[ray];
        for (int64_t i = walk(ray, span, SingleThread{}); i < span.end; ++i) walk.clear(i);
      }
    });
    clear_rows(walk, rays.before());
    clear_rows(walk, rays.behind());
  }

  // A walk's Job is what all walks of a kind have in common. composite_blocks.h processes it, whatever their flags.
  template <typename Walk>
  static void composite_rays(const PackedRays& rays, const Walk& walk) {
    const typename Walk::Job& job = walk;
    for_each_range(rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) { process_rays(job, begin, end); });
    clear_rows(job, rays.before());
    clear_rows(job, rays.behind());
  }

  static void count_visible(const CompositeRows<float>& samples, const KeepRule<float>& rule, const SegmentParts& parts,
                            int32_t* kept, int32_t* counts, int64_t* sums) {
    count_segments(parts, counts, sums, [&](int64_t ray) {
      const RaySpan span = samples.rays[ray];
      return find_visible(samples, span, rule, kept + span.begin);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  CompositeOps<CpuVolume>::implement(m);
  RaySumsOps<CpuVolume>::implement(m);
  SelectOps<CpuVolume>::implement(m);
}

}  // namespace voxelfield
