// The ops of this folder on CUDA, with one team of threads per ray. Short rays get smaller teams, so that few threads
// are idle.
#include <algorithm>
#include <type_traits>

#include "rays/packing.cuh"
#include "volume/composite_ops.h"
#include "volume/keep_rule.cuh"
#include "volume/ray_sums_ops.h"
#include "volume/select_ops.h"

namespace voxelfield {

constexpr int kShortRayTeam = 8;
constexpr int64_t kShortRay = 24;                // average number of samples
constexpr int64_t kClearedRows = 64 * kThreads;  // per clearing block, which processes no rays
constexpr int64_t kClearingBlocks = 64;          // maximum number

template <typename F>
void dispatch_team(const PackedRays& rays, const F& f) {
  const bool are_short = rays.samples <= kShortRay * rays.count;
  are_short ? f(std::integral_constant<int, kShortRayTeam>{}) : f(std::integral_constant<int, kWarp>{});
}

// The minimum number of blocks of a walk that must be resident on a multiprocessor; 0 if there is no such requirement.
template <typename Walk>
constexpr int kWalkBlocks = 0;

// The first `walking` blocks walk rays, and the others clear the rows that belong to no ray.
template <int Size, typename Walk>
__global__ void __launch_bounds__(kThreads, kWalkBlocks<Walk>)
    walk_kernel(PackedRays rays, unsigned walking, Walk walk) {
  if (blockIdx.x >= walking) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x - walking) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x - walking) * kThreads;
    const RaySpan before = rays.before(), behind = rays.behind();
    for (int64_t i = before.begin + thread; i < before.end; i += threads) walk.clear(i);
    for (int64_t i = behind.begin + thread; i < behind.end; i += threads) walk.clear(i);
    return;
  }
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * (kThreads / Size) + threadIdx.x / Size;
  const RaySpan span = rays[ray];
  const int seat = threadIdx.x % Size;
  const ThreadTeam<Size> team{seat, seat == 0 && ray < rays.count};
  for (int64_t i = walk(ray, span, team) + seat; i < span.end; i += Size) walk.clear(i);
}

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

struct CudaVolume : CudaPacking {
  template <typename Walk>
  static void for_each_ray(const PackedRays& rays, const Walk& walk) {
    dispatch_team(rays, [&](auto size) {
      const unsigned walking = blocks(rays.count, kThreads / size.value);
      const int64_t clearing = std::min((rays.samples + kClearedRows - 1) / kClearedRows, kClearingBlocks);
      if (walking + clearing == 0) return;
      launch(walk_kernel<size.value, Walk>, blocks(walking + clearing, 1), kThreads, 0, rays, walking, walk);
    });
  }

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
