// Splatting with atomics on CUDA.
#include "stencil/splat_atomic.cuh"
#include "stencil/splat_methods.cuh"

namespace voxelfield {

template <typename Weights, typename scalar_t>
void splat_atomic(const Levels<GridLocator<opmath_t<scalar_t>>, opmath_t<scalar_t>>& levels,
                  const SplatInput<scalar_t>& input, bool dense) {
  dispatch_level_width<Weights>(levels, input.values, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const LaneLayout layout(most_vectors(levels, kWidth));
    dispatch_plain<Weights>(levels, [&](const auto& located) {
      const auto launch = [&](auto walk) {
        constexpr int kPoints = decltype(walk)::value;
        const unsigned count = CudaBackend::blocks(input.n, layout.points * (kThreads / kWarp) * kPoints);
        splat_kernel<scalar_t, kWidth, Weights, kPoints><<<count, kThreads, 0, CudaBackend::stream()>>>(
            located, input.values, input.points, input.directions, input.n, layout);
      };
      if constexpr (kSpecialised<Weights>) {
        if (!dense) return launch(std::integral_constant<int, 1>{});
      }
      launch(std::integral_constant<int, kWalk>{});
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

#define VOXELFIELD_INSTANTIATE_WEIGHTS(scalar_t, Weights)  \
  template void splat_atomic<Weights<opmath_t<scalar_t>>>( \
      const Levels<GridLocator<opmath_t<scalar_t>>, opmath_t<scalar_t>>&, const SplatInput<scalar_t>&, bool);
#define VOXELFIELD_INSTANTIATE(scalar_t)                       \
  VOXELFIELD_INSTANTIATE_WEIGHTS(scalar_t, ValueWeights)       \
  VOXELFIELD_INSTANTIATE_WEIGHTS(scalar_t, DirectionalWeights) \
  VOXELFIELD_INSTANTIATE_WEIGHTS(scalar_t, JetWeights)
VOXELFIELD_FOR_EACH_FLOATING(VOXELFIELD_INSTANTIATE)

}  // namespace voxelfield
