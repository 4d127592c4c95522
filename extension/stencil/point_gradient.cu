// The gradient in the points on CUDA.
#include "common/backend.cuh"
#include "stencil/levels.cuh"
#include "stencil/point_gradient.cuh"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

struct Cuda : CudaBackend {
  template <typename scalar_t, typename Weights, typename Locator, typename T>
  static void point_gradient(const Levels<Locator, const scalar_t>& levels, const scalar_t* values, const T* points,
                             const T* directions, T* out, int64_t n) {
    dispatch_level_width<Weights>(levels, values, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      int lanes = 2;
      while (lanes < kWarp && lanes < 2 * most_vectors(levels, kWidth)) lanes *= 2;
      dispatch_plain<Weights>(levels, [&](const auto& located) {
        point_gradient_kernel<scalar_t, kWidth, Weights><<<blocks(n, kThreads / lanes), kThreads, 0, stream()>>>(
            located, values, points, directions, out, n, lanes);
      });
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("point_gradient_trilinear", TORCH_BOX(&StencilOps<Cuda>::point_gradient_trilinear));
  m.impl("point_gradient_cells", TORCH_BOX(&StencilOps<Cuda>::point_gradient_cells));
}

}  // namespace voxelfield
