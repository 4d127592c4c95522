// Colours of pixels on CUDA: each thread computes a pixel, whose rays lie side by side in memory.
#include "common/backend.cuh"
#include "volume/pixel_colors_ops.h"

namespace voxelfield {
namespace {

template <bool Srgb, typename T>
__global__ void __launch_bounds__(kThreads) pixel_colors_kernel(RayColors<T> rays, T* __restrict__ colors) {
  const int64_t pixel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pixel < rays.pixels) pixel_color<Srgb>(rays, pixel, colors);
}

template <bool Srgb, typename T>
__global__ void __launch_bounds__(kThreads)
    pixel_colors_backward_kernel(RayColors<T> rays, const T* __restrict__ grad, T* __restrict__ grad_rgb,
                                 T* __restrict__ grad_opacity) {
  const int64_t pixel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (pixel < rays.pixels) pixel_color_gradient<Srgb>(rays, pixel, grad, grad_rgb, grad_opacity);
}

struct Cuda : CudaBackend {
  template <bool Srgb, typename T>
  static void pixel_colors(const RayColors<T>& rays, T* colors) {
    pixel_colors_kernel<Srgb><<<blocks(rays.pixels, kThreads), kThreads, 0, stream()>>>(rays, colors);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <bool Srgb, typename T>
  static void pixel_colors_backward(const RayColors<T>& rays, const T* grad, T* grad_rgb, T* grad_opacity) {
    pixel_colors_backward_kernel<Srgb>
        <<<blocks(rays.pixels, kThreads), kThreads, 0, stream()>>>(rays, grad, grad_rgb, grad_opacity);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("pixel_colors", TORCH_BOX(&PixelColorsOps<Cuda>::pixel_colors));
  m.impl("pixel_colors_backward", TORCH_BOX(&PixelColorsOps<Cuda>::pixel_colors_backward));
}

}  // namespace voxelfield
