// Splatting with atomics onto a zeroed grid on CUDA.
#include "stencil/splat_methods.cuh"

namespace voxelfield {
namespace {

// Where points are dense, the threads of a point walk along this many consecutive points and add up those that share a
// cell, as samples of a ray often do, before they access memory. Where points are sparse, that would only reduce the
// number of threads.
constexpr int kWalk = 8;

template <typename scalar_t, int Width, typename Weights, int Walk, typename Locator, typename T>
__global__ void __launch_bounds__(kThreads)
    splat_kernel(const __grid_constant__ Levels<Locator, T> levels, const scalar_t* __restrict__ values,
                 const T* __restrict__ points, const T* __restrict__ directions, int64_t n, LaneLayout layout) {
  const Lane lane(layout);
  if (!lane.active) return;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const int64_t begin = (warp * layout.points + lane.point) * Walk;
  const int64_t end = begin + Walk < n ? begin + Walk : n;
  for (int l = 0; l < levels.count; ++l) {
    const auto& level = levels.level[l];
    for (int vector = lane.vector; vector * Width < level.locator.channels; vector += layout.vectors) {
      Vector<T, Width> sum[kCorners / 2] = {};
      Stencil<T, typename Locator::offset_t> held;
      held.empty = true;
      const auto flush = [&] {
        if (held.empty) return;
#pragma unroll
        for (int k = 0; k < kCorners / 2; ++k) {
          atomic_add<Width>(level.data + held.offset(2 * k) + vector * Width, sum[k]);
          sum[k] = {};
        }
      };
      for (int64_t index = begin; index < end; ++index) {
        auto s = level.locator(points, index);
        if (s.empty) continue;
        s.take_side(2, lane.upper);
        // The same origin and steps mean the same vertices.
        if (s.origin != held.origin || s.step[0] != held.step[0] || s.step[1] != held.step[1]) flush();
        held = s;
        const Weights weights(directions, index);
#pragma unroll
        for (int set = 0; set < Weights::kSets; ++set) {
          const Vector<scalar_t, Width> value =
              load_constant<Width>(values + (set * n + index) * levels.columns + level.column + vector * Width);
#pragma unroll
          for (int k = 0; k < kCorners / 2; ++k) {
            const T weight = weights(s, 2 * k, set);
            add_weighted(sum[k], weight, value);
          }
        }
        if (Walk == 1) break;
      }
      flush();
    }
  }
}

}  // namespace

template <typename Weights, typename scalar_t>
void splat_atomic(const SplatLevels<opmath_t<scalar_t>>& levels, const SplatInput<scalar_t>& input, bool dense) {
  using T = opmath_t<scalar_t>;
  const PointsView<T>& at = input.at;
  dispatch_level_width<Weights>(levels, input.values, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const LaneLayout layout(most_vectors(levels, kWidth));
    dispatch_plain<Weights>(levels, [&](const auto& located) {
      using Located = std::decay_t<decltype(located.level[0].locator)>;
      // Other weights always walk, which spares a compiled form.
      constexpr int kShortest = kSpecialised<Weights> ? 1 : kWalk;
      const int walk = dense ? kWalk : kShortest;
      const auto kernel = dense ? splat_kernel<scalar_t, kWidth, Weights, kWalk, Located, T>
                                : splat_kernel<scalar_t, kWidth, Weights, kShortest, Located, T>;
      const int64_t per_block = layout.points * (kThreads / kWarp) * walk;
      CudaBackend::launch(kernel, CudaBackend::blocks(at.count, per_block), kThreads, 0, located, input.values,
                          at.points, at.directions, at.count, layout);
    });
  });
}

#define VOXELFIELD_INSTANTIATE(scalar_t, Weights) \
  template void splat_atomic<Weights>(const SplatLevels<opmath_t<scalar_t>>&, const SplatInput<scalar_t>&, bool);
VOXELFIELD_FOR_EACH_SPLAT(VOXELFIELD_INSTANTIATE)

}  // namespace voxelfield
