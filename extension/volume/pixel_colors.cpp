// Colours of pixels on the CPU: parallel over pixels.
#include "common/backend.h"
#include "volume/pixel_colors_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kPixelsPerTask = 1024;

template <typename F>
void for_each_pixel(int64_t pixels, const F& f) {
  for_each_range(pixels, kPixelsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t pixel = begin; pixel < end; ++pixel) f(pixel);
  });
}

struct Cpu : CpuBackend {
  template <bool Srgb, typename T>
  static void pixel_colors(const RayColors<T>& rays, T* colors) {
    for_each_pixel(rays.pixels, [&](int64_t pixel) { pixel_color<Srgb>(rays, pixel, colors); });
  }

  template <bool Srgb, typename T>
  static void pixel_colors_backward(const RayColors<T>& rays, const T* grad, T* grad_rgb, T* grad_opacity) {
    for_each_pixel(rays.pixels,
                   [&](int64_t pixel) { pixel_color_gradient<Srgb>(rays, pixel, grad, grad_rgb, grad_opacity); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("pixel_colors", TORCH_BOX(&PixelColorsOps<Cpu>::pixel_colors));
  m.impl("pixel_colors_backward", TORCH_BOX(&PixelColorsOps<Cpu>::pixel_colors_backward));
}

}  // namespace voxelfield
