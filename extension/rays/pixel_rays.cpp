// Rays through pixels of photographs, on the CPU.
#include "common/backend.h"
#include "rays/pixel_rays_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kPixelsPerTask = 1024;

struct Cpu : CpuBackend {
  static void pixel_rays(const ImagesView& images, const int64_t* index, int64_t pixels, const PixelRayPointers& out) {
    const int64_t each = images.rays_per_pixel();
    for_each_range(pixels, kPixelsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t chosen = begin; chosen < end; ++chosen) {
        const int64_t pixel = images.pixel(index[chosen]);
        images.color(pixel, out.rgba + 4 * chosen);
        for (int64_t square = 0; square < each; ++square) {
          const Ray ray = images.ray(pixel, square);
          const int64_t row = chosen * each + square;
          std::copy_n(ray.origin, 3, out.origins + 3 * row);
          std::copy_n(ray.direction, 3, out.directions + 3 * row);
          out.near[row] = ray.near;
          out.far[row] = ray.far;
        }
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { m.impl("pixel_rays", TORCH_BOX(&PixelRaysOps<Cpu>::pixel_rays)); }

}  // namespace voxelfield
