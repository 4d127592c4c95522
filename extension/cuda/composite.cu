// Compositing on CUDA: a warp walks a ray, 32 samples at a time, with a scan of the optical depth.
#include "../composite_ops.h"
#include "backend.cuh"
#include "warp.cuh"

namespace voxelfield {
namespace {

constexpr int kRaysPerBlock = kThreads / kWarp;

// Calls visit(i, valid, transmittance, weight) on all lanes of the warp for each group of 32 samples of the ray; behind
// min_transmittance both are zero, as they are for the lanes past the ray's end.
template <typename T, typename Visit>
__device__ __forceinline__ void walk_ray(const PackedSamples<T>& samples, int64_t ray, int lane, const Visit& visit) {
  const int64_t end = samples.ray_offsets[ray + 1];
  T optical_depth = 0;
  for (int64_t first = samples.ray_offsets[ray]; first < end; first += kWarp) {
    const int64_t i = first + lane;
    const bool valid = i < end;
    const T thickness = valid ? samples.density[i] * samples.dt[i] : T(0);
    const T through = warp_inclusive_sum(thickness, lane);
    // Not `through - thickness`: beside a dense sample that difference has lost the depth before it, or is NaN.
    const T above = __shfl_up_sync(kFullWarp, through, 1);
    T transmittance = transmittance_at(optical_depth + (lane > 0 ? above : T(0)));
    if (!valid || transmittance < samples.min_transmittance) transmittance = 0;
    visit(i, valid, transmittance, transmittance * opacity_of(thickness));
    optical_depth += __shfl_sync(kFullWarp, through, kWarp - 1);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) weights_kernel(PackedSamples<T> samples, T* __restrict__ weights) {
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * kRaysPerBlock + threadIdx.x / kWarp;
  if (ray >= samples.rays) return;
  walk_ray(samples, ray, threadIdx.x % kWarp, [&](int64_t i, bool valid, T /*transmittance*/, T weight) {
    if (valid) weights[i] = weight;
  });
}

template <typename T>
__global__ void __launch_bounds__(kThreads) forward_kernel(PackedSamples<T> samples, CompositeOutputs<T> out) {
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * kRaysPerBlock + threadIdx.x / kWarp;
  if (ray >= samples.rays) return;
  const int lane = threadIdx.x % kWarp;
  RayColor<T> color;
  walk_ray(samples, ray, lane, [&](int64_t i, bool valid, T /*transmittance*/, T weight) {
    if (valid) {
      out.weights[i] = weight;
      color.add(samples, i, weight);
    }
  });
#pragma unroll
  for (int channel = 0; channel < 3; ++channel) color.rgb[channel] = warp_sum(color.rgb[channel]);
  color.opacity = warp_sum(color.opacity);
  color.depth = warp_sum(color.depth);
  if (lane == 0) {
    for (int channel = 0; channel < 3; ++channel) out.rgb[3 * ray + channel] = color.rgb[channel];
    out.opacity[ray] = color.opacity;
    out.depth[ray] = color.depth;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) backward_kernel(PackedSamples<T> samples, CompositeGradients<T> gradients,
                                                            T* __restrict__ d_density, T* __restrict__ d_rgb) {
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * kRaysPerBlock + threadIdx.x / kWarp;
  if (ray >= samples.rays) return;
  const int lane = threadIdx.x % kWarp;
  const RayGradient<T> gradient = gradients.of_ray(ray);
  T behind = 0;
  walk_ray(samples, ray, lane, [&](int64_t i, bool valid, T /*transmittance*/, T weight) {
    if (valid) behind += weight * gradient.at_weight(samples, i);
  });
  behind = warp_sum(behind);
  walk_ray(samples, ray, lane, [&](int64_t i, bool valid, T transmittance, T weight) {
    const T at_weight = valid ? gradient.at_weight(samples, i) : T(0);
    const T passed = warp_inclusive_sum(weight * at_weight, lane);
    if (valid) {
      d_density[i] = transmittance > T(0)
                         ? density_gradient(samples.dt[i], transmittance, weight, at_weight, behind - passed)
                         : T(0);
      for (int channel = 0; channel < 3; ++channel) d_rgb[3 * i + channel] = weight * gradient.rgb[channel];
    }
    behind -= __shfl_sync(kFullWarp, passed, kWarp - 1);
  });
}

struct Cuda : CudaBackend {
  template <typename T>
  static void weights(const PackedSamples<T>& samples, T* weights) {
    weights_kernel<T><<<blocks(samples.rays, kRaysPerBlock), kThreads, 0, stream()>>>(samples, weights);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename T>
  static void forward(const PackedSamples<T>& samples, const CompositeOutputs<T>& out) {
    forward_kernel<T><<<blocks(samples.rays, kRaysPerBlock), kThreads, 0, stream()>>>(samples, out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename T>
  static void backward(const PackedSamples<T>& samples, const CompositeGradients<T>& gradients, T* d_density,
                       T* d_rgb) {
    backward_kernel<T>
        <<<blocks(samples.rays, kRaysPerBlock), kThreads, 0, stream()>>>(samples, gradients, d_density, d_rgb);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("ray_weights", TORCH_BOX(&CompositeOps<Cuda>::ray_weights));
  m.impl("composite", TORCH_BOX(&CompositeOps<Cuda>::composite));
  m.impl("composite_backward", TORCH_BOX(&CompositeOps<Cuda>::composite_backward));
}

}  // namespace voxelfield
