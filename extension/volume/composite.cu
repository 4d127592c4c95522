// Compositing on CUDA: a group of threads walks a ray.
#include "common/backend.cuh"
#include "volume/composite_ops.h"
#include "volume/walk_samples.cuh"

namespace voxelfield {
namespace {

constexpr int64_t kClearedRows = 16 * kThreads;  // for each block that has no ray
constexpr int64_t kClearingBlocks = 512;         // at most

// Blocks that walk rays, and behind them blocks that clear the rows of no ray.
struct CompositeGrid {
  int64_t walking, clearing;

  template <typename T>
  CompositeGrid(const PackedSamples<T>& samples, int64_t rays_per_block)
      : walking((samples.rays.count + rays_per_block - 1) / rays_per_block),
        clearing((samples.rays.samples + kClearedRows - 1) / kClearedRows) {
    if (clearing > kClearingBlocks) clearing = kClearingBlocks;
  }
};

// Does the work of a block that has no ray, and says whether it is one.
template <typename T, typename Clear>
__device__ __forceinline__ bool cleared(const PackedSamples<T>& samples, const CompositeGrid& grid,
                                        const Clear& clear) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) - grid.walking;
  if (block < 0) return false;
  const int64_t thread = block * kThreads + threadIdx.x, threads = grid.clearing * kThreads;
  const RaySpan before = samples.rays.before(), behind = samples.rays.behind();
  for (int64_t i = before.begin + thread; i < before.end; i += threads) clear(i);
  for (int64_t i = behind.begin + thread; i < behind.end; i += threads) clear(i);
  return true;
}

template <int Group>
__device__ __forceinline__ int64_t own_ray() {
  return static_cast<int64_t>(blockIdx.x) * (kThreads / Group) + threadIdx.x / Group;
}

template <int Group, typename T>
__global__ void __launch_bounds__(kThreads)
    weights_kernel(PackedSamples<T> samples, CompositeGrid grid, T* __restrict__ weights) {
  const auto clear = [&](int64_t i) { weights[i] = 0; };
  if (cleared(samples, grid, clear)) return;
  const RaySpan span = samples.rays[own_ray<Group>()];
  const int lane = threadIdx.x % Group;
  int64_t i = walk_samples<Group>(samples, span, lane, [&](int64_t i, bool valid, T /*transmittance*/, T weight) {
    if (valid) weights[i] = weight;
  });
  for (i += lane; i < span.end; i += Group) clear(i);
}

template <int Group, bool Distortion, typename T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(PackedSamples<T> samples, CompositeGrid grid, CompositeOutputs<T> out) {
  const auto clear = [&](int64_t i) { out.weights[i] = 0; };
  if (cleared(samples, grid, clear)) return;
  const int64_t ray = own_ray<Group>();
  const RaySpan span = samples.rays[ray];
  const int lane = threadIdx.x % Group;
  const T origin = Distortion && span.begin < span.end ? samples.t[span.begin] : T(0);
  RayResult<T> result;
  Matter<T> matter;  // before the samples at hand
  int64_t i = walk_samples<Group>(samples, span, lane, [&](int64_t i, bool valid, T /*transmittance*/, T weight) {
    if (valid) {
      out.weights[i] = weight;
      result.add(samples, i, weight);
    }
    if constexpr (Distortion) {
      const T distance = valid ? samples.t[i] - origin : T(0);
      const Matter<T> through{group_inclusive_sum<Group>(weight, lane),
                              group_inclusive_sum<Group>(weight * distance, lane)};
      const Matter<T> before{matter.weight + through.weight - weight,
                             matter.moment + through.moment - weight * distance};
      if (valid) result.distortion += distortion_of(before, weight, distance, samples.dt[i]);
      matter.weight += __shfl_sync(kFullWarp, through.weight, Group - 1, Group);
      matter.moment += __shfl_sync(kFullWarp, through.moment, Group - 1, Group);
    }
  });
  for (i += lane; i < span.end; i += Group) clear(i);
#pragma unroll
  for (int channel = 0; channel < 3; ++channel) result.rgb[channel] = group_sum<Group>(result.rgb[channel]);
  result.opacity = group_sum<Group>(result.opacity);
  result.depth = group_sum<Group>(result.depth);
  if constexpr (Distortion) result.distortion = group_sum<Group>(result.distortion);
  if (lane == 0 && ray < samples.rays.count) out.write(ray, result);
}

template <int Group, bool Distortion, typename T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(PackedSamples<T> samples, CompositeGrid grid, CompositeValues<T> gradients,
                    CompositeValues<T> results, SampleGradients<T> out) {
  const auto clear = [&](int64_t i) {
    out.density[i] = 0;
    for (int channel = 0; channel < 3; ++channel) out.rgb[3 * i + channel] = 0;
  };
  if (cleared(samples, grid, clear)) return;
  const int64_t ray = own_ray<Group>();
  const RaySpan span = samples.rays[ray];
  const int lane = threadIdx.x % Group;
  RayGradient<T> gradient{{}, gradients.weights};
  RayResult<T> result;
  T origin = 0;
  if (span.begin < span.end) {
    gradient.at = gradients.of_ray(ray);
    result = results.of_ray(ray);
    origin = samples.t[span.begin];
  }
  T behind = gradient.of_all(result);
  if (gradient.weights != nullptr) {
    T sum = 0;
    walk_samples<Group>(samples, span, lane, [&](int64_t i, bool valid, T /*transmittance*/, T weight) {
      if (valid) sum += weight * gradient.weights[i];
    });
    behind += group_sum<Group>(sum);
  }
  const Matter<T> all{result.opacity, result.depth - result.opacity * origin};
  Matter<T> matter;
  int64_t i = walk_samples<Group>(samples, span, lane, [&](int64_t i, bool valid, T transmittance, T weight) {
    T at_weight = valid ? gradient.at_weight(samples, i) : T(0);
    if constexpr (Distortion) {
      const T distance = valid ? samples.t[i] - origin : T(0);
      const Matter<T> through{group_inclusive_sum<Group>(weight, lane),
                              group_inclusive_sum<Group>(weight * distance, lane)};
      const Matter<T> before{matter.weight + through.weight - weight,
                             matter.moment + through.moment - weight * distance};
      if (valid) at_weight += gradient.at.distortion * distortion_slope(before, all, weight, distance, samples.dt[i]);
      matter.weight += __shfl_sync(kFullWarp, through.weight, Group - 1, Group);
      matter.moment += __shfl_sync(kFullWarp, through.moment, Group - 1, Group);
    }
    const T passed = group_inclusive_sum<Group>(weight * at_weight, lane);
    if (valid) {
      out.density[i] = transmittance > T(0)
                           ? density_gradient(samples.dt[i], transmittance, weight, at_weight, behind - passed)
                           : T(0);
      for (int channel = 0; channel < 3; ++channel) out.rgb[3 * i + channel] = weight * gradient.at.rgb[channel];
    }
    behind -= __shfl_sync(kFullWarp, passed, Group - 1, Group);
  });
  for (i += lane; i < span.end; i += Group) clear(i);
}

struct Cuda : CudaBackend {
  template <typename T>
  static void weights(const PackedSamples<T>& samples, T* weights) {
    launch(samples, [&](auto group, const CompositeGrid& grid, unsigned blocks) {
      weights_kernel<group.value, T><<<blocks, kThreads, 0, stream()>>>(samples, grid, weights);
    });
  }

  template <typename T>
  static void forward(const PackedSamples<T>& samples, const CompositeOutputs<T>& out) {
    launch(samples, [&](auto group, const CompositeGrid& grid, unsigned blocks) {
      if (out.distortion != nullptr) {
        forward_kernel<group.value, true, T><<<blocks, kThreads, 0, stream()>>>(samples, grid, out);
      } else {
        forward_kernel<group.value, false, T><<<blocks, kThreads, 0, stream()>>>(samples, grid, out);
      }
    });
  }

  template <typename T>
  static void backward(const PackedSamples<T>& samples, const CompositeValues<T>& gradients,
                       const CompositeValues<T>& results, const SampleGradients<T>& out) {
    launch(samples, [&](auto group, const CompositeGrid& grid, unsigned blocks) {
      if (gradients.distortion != nullptr) {
        backward_kernel<group.value, true, T>
            <<<blocks, kThreads, 0, stream()>>>(samples, grid, gradients, results, out);
      } else {
        backward_kernel<group.value, false, T>
            <<<blocks, kThreads, 0, stream()>>>(samples, grid, gradients, results, out);
      }
    });
  }

 private:
  template <typename T, typename F>
  static void launch(const PackedSamples<T>& samples, const F& f) {
    dispatch_group(samples, [&](auto group) {
      const CompositeGrid grid(samples, kThreads / group.value);
      const int64_t blocks = grid.walking + grid.clearing;
      if (blocks == 0) return;
      f(group, grid, CudaBackend::blocks(blocks, 1));
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("ray_weights", TORCH_BOX(&CompositeOps<Cuda>::ray_weights));
  m.impl("composite", TORCH_BOX(&CompositeOps<Cuda>::composite));
  m.impl("composite_backward", TORCH_BOX(&CompositeOps<Cuda>::composite_backward));
}

}  // namespace voxelfield
