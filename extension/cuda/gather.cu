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
      dispatch_plain<Weights>(levels, [&](const auto& located) {
        using Located = std::decay_t<decltype(located.level[0].locator)>;
        // Offsets of 32 bits count the elements of so many points at a time.
        const int64_t most = kNarrow<Located> ? 0x7fffffff / std::max<int64_t>(3, levels.columns) : n;
        for (int64_t begin = 0; begin < n; begin += most) {
          launch<scalar_t, kWidth, Weights>(located, points + 3 * begin, directions, out + begin * levels.columns,
                                            std::min(most, n - begin));
        }
      });
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  template <typename Locator>
  static constexpr bool kNarrow = std::is_same_v<typename Locator::offset_t, int32_t>;

  template <typename scalar_t, int Width, typename Weights, typename Locator, typename T>
  static void launch(const Levels<Locator, const scalar_t>& levels, const T* points, const T* directions, scalar_t* out,
                     int64_t n) {
    const LaneLayout layout(most_vectors(levels, Width));
    const bool at_once = layout.most_vectors == layout.vectors;
    const unsigned count = blocks(n, layout.points * (kGatherThreads / kWarp));
    if constexpr (kNarrow<Locator>) {
      if (levels.count == 1 && at_once) {
        if constexpr (sizeof(scalar_t) == 2) {
          // A wide row of 16-bit channels moves so few bytes that working out stencils would take longer.
          if (layout.vectors >= kWideRow) {
            gather_staged_kernel<scalar_t, Width, Weights>
                <<<blocks(n, 128), 128, 0, stream()>>>(levels.level[0], points, directions, out, n, layout);
            return;
          }
        }
        gather_kernel<scalar_t, Width, Weights, true>
            <<<count, kGatherThreads, 0, stream()>>>(levels, points, directions, out, n, layout, false);
        return;
      }
    }
    const int64_t rows = layout.points * (kGatherThreads / kWarp) * levels.columns * sizeof(scalar_t);
    const bool row_buffer = levels.count > 1 && !levels.sum && Weights::kSets == 1 && at_once && rows <= kMostRowBytes;
    gather_kernel<scalar_t, Width, Weights, false><<<count, kGatherThreads, row_buffer ? rows : 0, stream()>>>(
        levels, points, directions, out, n, layout, row_buffer);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("sample_trilinear", TORCH_BOX(&StencilOps<Cuda>::sample_trilinear));
  m.impl("interpolate_cells", TORCH_BOX(&StencilOps<Cuda>::interpolate_cells));
}

}  // namespace voxelfield
