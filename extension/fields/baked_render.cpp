// Renders baked fields on the CPU: tasks of pixels in parallel, the samples of a ray in order.
#include "common/backend.h"
#include "fields/baked_render_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kPixelsPerTask = 256;

template <bool Pieces, int Values>
VOXELFIELD_MULTIVERSION void render_range(const BakedScene& scene, const BakedPixels<Values, float>& pixels,
                                          int64_t begin, int64_t end) {
  for (int64_t pixel = begin; pixel < end; ++pixel) {
    const int64_t y = pixel / pixels.camera.width;
    pixels.template render<Pieces>(scene, pixel - y * pixels.camera.width, y);
  }
}

struct Cpu : CpuBackend {
  using ShadingInput = float;

  template <bool Pieces, int Values>
  static void render(const BakedScene& scene, const BakedPixels<Values, float>& pixels) {
    for_each_range(pixels.camera.width * pixels.camera.height, kPixelsPerTask,
                   [&](int64_t begin, int64_t end) { render_range<Pieces>(scene, pixels, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { BakedImageOps<Cpu>::implement(m); }

}  // namespace voxelfield
