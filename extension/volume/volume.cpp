// The ops of this folder on the CPU. One thread per ray processes the samples of the ray in order.
#include "volume/composite_blocks.h"
#include "volume/ray_sums_ops.h"
#include "volume/select_ops.h"
#include "volume/walk_rays.h"

namespace voxelfield {
namespace {

struct CpuVolume : CpuRays {
  // Composites, or computes a gradient, as composite_blocks.h does, whatever the flags of the walk.
  template <typename Samples>
  static void composite_rays(const PackedRays& rays, const LightWalk<Samples>& job) {
    process_all<Samples>(rays, job);
  }
  template <typename Samples>
  static void composite_rays(const PackedRays& rays, const LightGradientWalk<Samples>& job) {
    process_all<Samples>(rays, job);
  }
  template <typename Samples>
  static void composite_rays(const PackedRays& rays, const CompositeJob<Samples>& job) {
    process_all<Samples>(rays, job);
  }
  template <typename Samples>
  static void composite_rays(const PackedRays& rays, const CompositeGradientJob<Samples>& job) {
    process_all<Samples>(rays, job);
  }

  static void count_visible(const CompositeRows<float>& samples, const KeepRule<float>& rule, const SegmentParts& parts,
                            int32_t* kept, int32_t* counts, int64_t* sums) {
    count_segments(parts, counts, sums, [&](int64_t ray) {
      const RaySpan span = samples.rays[ray];
      return find_visible(samples, span, rule, kept + span.begin);
    });
  }

 private:
  template <typename Samples, template <typename> class Job>
  static void process_all(const PackedRays& rays, const Job<Samples>& job) {
    for_each_range(rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) { process_rays(job, begin, end); });
    clear_rows(job, rays.before());
    clear_rows(job, rays.behind());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  CompositeOps<CpuVolume>::implement(m);
  RaySumsOps<CpuVolume>::implement(m);
  SelectOps<CpuVolume>::implement(m);
}

}  // namespace voxelfield
