// Sampling on CUDA.
#include "../stencil_ops.h"
#include "backend.cuh"
#include "gather.cuh"
#include "levels.cuh"

namespace voxelfield {
namespace {

constexpr int kWideRow = 4;  // vectors
constexpr int64_t kMostRowBytes = 24 << 10;

struct Cuda : CudaBackend {
  template <typename scalar_t, typename Weights, typename Locator, typename T>
  static void gather(const Levels<Locator, const scalar_t>& levels, const T* points, const T* directions, scalar_t* out,
                     int64_t n) {
    dispatch_level_width<16 / sizeof(scalar_t), scalar_t>(levels, out, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const LaneLayout layout(most_vectors(levels, kWidth));
      dispatch_plain<Weights>(levels, [&](const auto& located) {
        using Located = std::decay_t<decltype(located.level[0].locator)>;
        constexpr bool kPlain = kSpecialised<Weights> && std::is_same_v<typename Located::offset_t, int32_t>;
        const unsigned count = blocks(n, layout.points * (kThreads / kWarp));
        if constexpr (kPlain) {
          if (levels.count == 1 && layout.most_vectors == layout.vectors) {
            if constexpr (sizeof(scalar_t) == 2) {
              // A wide row of 16-bit channels moves so few bytes that working out stencils would take longer.
              if (layout.vectors >= kWideRow) {
                gather_staged_kernel<scalar_t, kWidth, Weights>
                    <<<blocks(n, 128), 128, 0, stream()>>>(located.level[0], points, directions, out, n, layout);
                return;
              }
            }
            gather_kernel<scalar_t, kWidth, Weights, true>
                <<<count, kThreads, 0, stream()>>>(located, points, directions, out, n, layout, false);
            return;
          }
        }
        const int64_t rows = layout.points * (kThreads / kWarp) * levels.columns * sizeof(scalar_t);
        const bool row_buffer = levels.count > 1 && !levels.sum && Weights::kSets == 1 &&
                                layout.most_vectors == layout.vectors && rows <= kMostRowBytes;
        gather_kernel<scalar_t, kWidth, Weights, false><<<count, kThreads, row_buffer ? rows : 0, stream()>>>(
            located, points, directions, out, n, layout, row_buffer);
      });
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("sample_trilinear", TORCH_BOX(&StencilOps<Cuda>::sample_trilinear));
  m.impl("interpolate_cells", TORCH_BOX(&StencilOps<Cuda>::interpolate_cells));
}

}  // namespace voxelfield
