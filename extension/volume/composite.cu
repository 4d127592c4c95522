// Compositing on CUDA: a group of threads walks a ray.
#include "common/backend.cuh"
#include "volume/composite_ops.h"
#include "volume/walk_samples.cuh"

namespace voxelfield {
namespace {

constexpr int64_t kClearedRows = 16 * kThreads;  // for each block that has no ray
constexpr int64_t kClearingBlocks = 512;         // at most

// The blocks that walk rays come first, then those that clear the rows which belong to no ray.
struct CompositeGrid {
  int64_t walking, clearing;

  template <typename T>
  CompositeGrid(const PackedSamples<T>& samples, int64_t rays_per_block)
      : walking((samples.rays.count + rays_per_block - 1) / rays_per_block),
        clearing((samples.rays.samples + kClearedRows - 1) / kClearedRows) {
    if (clearing > kClearingBlocks) clearing = kClearingBlocks;
  }
};

// Clears rows if the block has no rays to walk, and returns whether that is so.
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
    light_kernel(PackedSamples<T> samples, LightValue value, CompositeGrid grid, T* __restrict__ values) {
  const auto clear = [&](int64_t i) { values[i] = 0; };
  if (cleared(samples, grid, clear)) return;
  const RaySpan span = samples.rays[own_ray<Group>()];
  const int lane = threadIdx.x % Group;
  int64_t i = walk_samples<Group>(samples, span, lane, [&](const GroupSample<T>& sample) {
    if (sample.exists) values[sample.index] = value == LightValue::kWeight ? sample.weight : sample.transmittance;
  });
  for (i += lane; i < span.end; i += Group) clear(i);
}

template <int Group, typename T>
__global__ void __launch_bounds__(kThreads)
    light_backward_kernel(PackedSamples<T> samples, LightValue value, CompositeGrid grid, const T* __restrict__ grad,
                          T* __restrict__ grad_density) {
  const auto clear = [&](int64_t i) { grad_density[i] = 0; };
  if (cleared(samples, grid, clear)) return;
  const RaySpan span = samples.rays[own_ray<Group>()];
  const int lane = threadIdx.x % Group;
  const auto weighted = [&](const GroupSample<T>& sample) {
    if (!sample.reached) return T(0);
    return (value == LightValue::kWeight ? sample.weight : sample.transmittance) * grad[sample.index];
  };
  T sum = 0;
  walk_samples<Group>(samples, span, lane, [&](const GroupSample<T>& sample) { sum += weighted(sample); });
  T suffix_grad = group_sum<Group>(sum);
  int64_t i = walk_samples<Group>(samples, span, lane, [&](const GroupSample<T>& sample) {
    const TeamScan<T> passed = team_scan<Group>(weighted(sample), lane);
    if (sample.reached) {
      const T at_weight = value == LightValue::kWeight ? grad[sample.index] : T(0);
      grad_density[sample.index] =
          samples.gradient(sample.index, sample.transmittance, sample.weight, at_weight, suffix_grad - passed.through);
    } else if (sample.exists) {
      clear(sample.index);
    }
    suffix_grad -= passed.total;
  });
  for (i += lane; i < span.end; i += Group) clear(i);
}

// The moments of the samples ahead of each of a group's samples; `ahead` are those of earlier groups, and moves on.
template <int Group, typename T>
__device__ __forceinline__ WeightMoments<T> scan_moments(WeightMoments<T>& ahead, T weight, T distance, int lane) {
  const TeamScan<T> weights = team_scan<Group>(weight, lane), moments = team_scan<Group>(weight * distance, lane);
  const WeightMoments<T> before{ahead.weight + weights.before, ahead.moment + moments.before};
  ahead.weight += weights.total;
  ahead.moment += moments.total;
  return before;
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
  RayTotals<T> totals;
  WeightMoments<T> ahead;
  T distortion = 0;
  int64_t i = walk_samples<Group>(samples, span, lane, [&](const GroupSample<T>& sample) {
    if (sample.exists) out.weights[sample.index] = sample.weight;
    if (sample.reached) totals.add(sample.weight, samples.rgb + 3 * sample.index, samples.t[sample.index]);
    if constexpr (Distortion) {
      const T distance = sample.reached ? samples.t[sample.index] - origin : T(0);
      const WeightMoments<T> before = scan_moments<Group>(ahead, sample.weight, distance, lane);
      if (sample.reached) distortion += distortion_of(before, sample.weight, distance, samples.dt[sample.index]);
    }
  });
  for (i += lane; i < span.end; i += Group) clear(i);
#pragma unroll
  for (int channel = 0; channel < 3; ++channel) totals.rgb[channel] = group_sum<Group>(totals.rgb[channel]);
  totals.opacity = group_sum<Group>(totals.opacity);
  totals.depth_sum = group_sum<Group>(totals.depth_sum);
  if constexpr (Distortion) distortion = group_sum<Group>(distortion);
  if (lane == 0 && ray < samples.rays.count) out.write(ray, totals, distortion);
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
  RayTotals<T> gradient, totals;
  T at_distortion = 0, origin = 0, suffix_grad = 0;
  if (span.begin < span.end) {
    gradient = gradients.totals(ray);
    totals = results.totals(ray);
    suffix_grad = gradient.of_ray(totals);
    origin = samples.t[span.begin];
    if constexpr (Distortion) {
      at_distortion = gradients.distortion_of_ray(ray);
      // Distortion is a sum of products of two weights, so that each of its terms counts twice.
      suffix_grad += 2 * at_distortion * results.distortion_of_ray(ray);
    }
  }
  if (gradients.weights != nullptr) {
    T sum = 0;
    walk_samples<Group>(samples, span, lane, [&](const GroupSample<T>& sample) {
      if (sample.reached) sum += sample.weight * gradients.weights[sample.index];
    });
    suffix_grad += group_sum<Group>(sum);
  }
  const WeightMoments<T> all{totals.opacity, totals.depth_sum - totals.opacity * origin};
  WeightMoments<T> ahead;
  int64_t i = walk_samples<Group>(samples, span, lane, [&](const GroupSample<T>& sample) {
    const int64_t index = sample.index;
    T at_weight = 0;
    if (sample.reached) {
      at_weight = gradient.at_weight(samples.rgb + 3 * index, samples.t[index]) + gradients.at_weight(index);
    }
    if constexpr (Distortion) {
      const T distance = sample.reached ? samples.t[index] - origin : T(0);
      const WeightMoments<T> before = scan_moments<Group>(ahead, sample.weight, distance, lane);
      if (sample.reached) {
        at_weight += at_distortion * distortion_slope(before, all, sample.weight, distance, samples.dt[index]);
      }
    }
    const TeamScan<T> passed = team_scan<Group>(sample.weight * at_weight, lane);
    if (sample.reached) {
      out.density[index] =
          samples.gradient(index, sample.transmittance, sample.weight, at_weight, suffix_grad - passed.through);
      for (int channel = 0; channel < 3; ++channel)
        out.rgb[3 * index + channel] = sample.weight * gradient.rgb[channel];
    } else if (sample.exists) {
      clear(index);
    }
    suffix_grad -= passed.total;
  });
  for (i += lane; i < span.end; i += Group) clear(i);
}

struct Cuda : CudaBackend {
  template <typename T>
  static void light(const PackedSamples<T>& samples, LightValue value, T* values) {
    launch(samples, [&](auto group, const CompositeGrid& grid, unsigned blocks) {
      light_kernel<group.value, T><<<blocks, kThreads, 0, stream()>>>(samples, value, grid, values);
    });
  }

  template <typename T>
  static void light_backward(const PackedSamples<T>& samples, LightValue value, const T* grad, T* grad_density) {
    launch(samples, [&](auto group, const CompositeGrid& grid, unsigned blocks) {
      light_backward_kernel<group.value, T>
          <<<blocks, kThreads, 0, stream()>>>(samples, value, grid, grad, grad_density);
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
  m.impl("ray_light", TORCH_BOX(&CompositeOps<Cuda>::ray_light));
  m.impl("ray_light_backward", TORCH_BOX(&CompositeOps<Cuda>::ray_light_backward));
  m.impl("composite", TORCH_BOX(&CompositeOps<Cuda>::composite));
  m.impl("composite_backward", TORCH_BOX(&CompositeOps<Cuda>::composite_backward));
}

}  // namespace voxelfield
