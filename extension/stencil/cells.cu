// Splatting onto the points' own cells on CUDA.
#include "common/backend.cuh"
#include "stencil/cells.cuh"
#include "stencil/levels.cuh"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

struct Cuda : CudaBackend {
  template <typename scalar_t, typename Weights, typename T>
  static void write_cells(const Levels<CellLocator<T>, scalar_t>& levels, const scalar_t* values, const T* points,
                          const T* directions, int64_t n) {
    dispatch_level_width<Weights>(levels, values, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const int64_t vectors = levels.columns / kWidth;
      const unsigned x = static_cast<unsigned>(std::min<int64_t>(vectors, kThreads));
      const dim3 threads(x, kThreads / x);
      write_cells_kernel<scalar_t, kWidth, Weights>
          <<<blocks(n, threads.y), threads, 0, stream()>>>(levels, values, points, directions, n);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { m.impl("splat_cells", TORCH_BOX(&StencilOps<Cuda>::splat_cells)); }

}  // namespace voxelfield
