// The ops of this folder on CUDA, with one team of threads per ray.
#include "volume/composite_ops.h"
#include "volume/ray_sums_ops.h"
#include "volume/select_ops.h"
#include "volume/walk_rays.cuh"

namespace voxelfield {

// With slightly fewer registers than the compiler would use by default, all 2048 threads of these multiprocessors can
// be resident.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
template <>
constexpr int kWalkBlocks<CompositeWalk<CompositeRows<float>, std::true_type, std::false_type>> = 2048 / kThreads;
template <>
constexpr int kWalkBlocks<CompositeGradientWalk<CompositeRows<float>, std::false_type, std::false_type>> =
    2048 / kThreads;
#endif

namespace {

constexpr int kJudgeThreads = 512;

template <int Size>
__global__ void __launch_bounds__(kJudgeThreads)
    count_visible_kernel(CompositeRows<float> samples, KeepRule<float> rule, SegmentParts parts,
                         int32_t* __restrict__ kept, int32_t* __restrict__ counts, int64_t* __restrict__ sums) {
  __shared__ int64_t scratch[kJudgeThreads / kWarp];
  constexpr int64_t kRays = kJudgeThreads / Size;
  static_assert(kPartSegments % kRays == 0, "a warp has rays of one part only, so it stays together");
  const int lane = threadIdx.x % Size;
  const unsigned below = (1u << threadIdx.x % kWarp) - 1, group = Size == kWarp ? kFullWarp : (1u << Size) - 1;
  const int shift = threadIdx.x % kWarp / Size * Size;
  int64_t sum = 0;
  const int64_t end = parts.end(blockIdx.x);
  for (int64_t first = parts.begin(blockIdx.x); first < end; first += kRays) {
    const int64_t ray = first + threadIdx.x / Size;
    const RaySpan span = samples.rays[ray];
    int32_t count = 0;
    walk_samples(samples, span, ThreadTeam<Size>{lane}, [&](const TeamSample<float>& sample) {
      const bool visible = sample.reached && rule.keeps(sample.weight);
      const unsigned votes = __ballot_sync(kFullWarp, visible) & group << shift;
      if (visible) kept[span.begin + count + __popc(votes & below)] = static_cast<int32_t>(sample.index);
      count += __popc(votes);
    });
    if (lane == 0 && ray < end) {
      counts[ray] = count;
      sum += count;
    }
  }
  sum = block_sum<kJudgeThreads>(sum, scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

struct CudaVolume : CudaRays {
  template <typename Walk>
  static void composite_rays(const PackedRays& rays, const Walk& walk) {
    for_each_ray(rays, walk);
  }

  static void count_visible(const CompositeRows<float>& samples, const KeepRule<float>& rule, const SegmentParts& parts,
                            int32_t* kept, int32_t* counts, int64_t* sums) {
    dispatch_team(samples.rays, [&](auto size) {
      launch(count_visible_kernel<size.value>, static_cast<unsigned>(parts.count), kJudgeThreads, 0, samples, rule,
             parts, kept, counts, sums);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  CompositeOps<CudaVolume>::implement(m);
  RaySumsOps<CudaVolume>::implement(m);
  SelectOps<CudaVolume>::implement(m);
}

}  // namespace voxelfield
