// Renders baked fields on CUDA, one thread per pixel. The pixels of a warp form a rectangle, because their rays stay
// close together.
#include "common/backend.cuh"
#include "fields/baked_render_ops.h"

namespace voxelfield {
namespace {

constexpr int kAcross = 8, kDown = 4;  // pixels of a warp
constexpr int kWarps = 4;              // of a block, below each other

template <bool Pieces, int Values>
__global__ void __launch_bounds__(kWarp* kWarps)
    render_kernel(const __grid_constant__ BakedScene scene, const __grid_constant__ BakedPixels<Values, Half> pixels,
                  unsigned blocks_across) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned row = blockIdx.x / blocks_across, column = blockIdx.x - row * blocks_across;
  const int64_t x = static_cast<int64_t>(column) * kAcross + lane % kAcross;
  const int64_t y = static_cast<int64_t>(row) * kDown * kWarps + warp * kDown + lane / kAcross;
  if (x >= pixels.camera.width || y >= pixels.camera.height) return;
  pixels.template render<Pieces>(scene, x, y);
}

struct Cuda : CudaBackend {
  using ShadingInput = Half;  // as ops.mlp takes it

  template <bool Pieces, int Values>
  static void render(const BakedScene& scene, const BakedPixels<Values, Half>& pixels) {
    // In one dimension, because a grid may have only 65535 blocks along its others.
    const unsigned across = blocks(pixels.camera.width, kAcross), down = blocks(pixels.camera.height, kDown * kWarps);
    launch(render_kernel<Pieces, Values>, blocks(int64_t{across} * down, 1), kWarp * kWarps, 0, scene, pixels, across);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { BakedImageOps<Cuda>::implement(m); }

}  // namespace voxelfield
