// Sampling on CUDA.
#include "common/backend.cuh"
#include "stencil/gather.cuh"
#include "stencil/levels.cuh"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// 16-bit rows of at least this many channels, or vectors, are read in words by a kernel of their own.
constexpr int kWideRow = 12;
constexpr int kWideVectors = 4;
constexpr int kWord = 8;  // 16-bit channels that are moved in one access

template <typename Locator>
constexpr bool kNarrow = std::is_same_v<typename Locator::offset_t, int32_t>;

struct Cuda : CudaBackend {
  template <typename scalar_t, typename Weights, typename Locator, typename T>
  static void gather(const Levels<Locator, const scalar_t>& levels, const T* points, const T* directions, scalar_t* out,
                     int64_t n) {
    dispatch_level_width<Weights>(levels, out, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      dispatch_plain<Weights>(levels, [&](const auto& located) {
        using Located = std::decay_t<decltype(located.level[0].locator)>;
        // The most points whose elements 32-bit offsets can count; further points take further launches. Value weights
        // have no directions and one set of rows, so only points and rows advance from launch to launch.
        static_assert(!kNarrow<Located> || std::is_same_v<Weights, ValueWeights<T>>);
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
  template <typename scalar_t, int Width, typename Weights, typename Locator, typename T>
  static void launch(const Levels<Locator, const scalar_t>& levels, const T* points, const T* directions, scalar_t* out,
                     int64_t n) {
    const LaneLayout layout(most_vectors(levels, Width));
    const bool at_once = layout.most_vectors == layout.vectors;
    if constexpr (kNarrow<Locator> && sizeof(scalar_t) == 2) {
      // For a wide row of 16-bit channels every thread computing the stencil would take longer than moving the bytes.
      if (levels.count == 1 && (levels.columns >= kWideRow || layout.most_vectors >= kWideVectors)) {
        constexpr int kPiece = std::min(Width, 4);
        const auto& level = levels.level[0];
        const bool in_words = level.locator.resolution[2] * levels.columns % kWord == 0 &&
                              reinterpret_cast<uintptr_t>(level.data) % (kWord * sizeof(scalar_t)) == 0;
        const WordLayout words(levels.columns, in_words ? kWord : kPiece);
        if (words.points > 0) {
          return in_words ? launch_staged<kWord, kPiece>(level, points, out, n, words)
                          : launch_staged<kPiece, kPiece>(level, points, out, n, words);
        }
      }
    }
    const unsigned count = blocks(n, layout.points * (kGatherThreads / kWarp));
    if constexpr (kNarrow<Locator>) {
      if (levels.count == 1 && at_once) {
        gather_kernel<scalar_t, Width, Weights, true>
            <<<count, kGatherThreads, 0, stream()>>>(levels, points, directions, out, n, layout, false);
        return;
      }
    }
    const int64_t rows = layout.points * (kGatherThreads / kWarp) * levels.columns * sizeof(scalar_t);
    const bool row_buffer = levels.count > 1 && !levels.sum && Weights::kSets == 1 && at_once && rows <= kGatherShared;
    check_shared_memory(row_buffer ? rows : 0);
    gather_kernel<scalar_t, Width, Weights, false><<<count, kGatherThreads, row_buffer ? rows : 0, stream()>>>(
        levels, points, directions, out, n, layout, row_buffer);
  }

  template <int Width, int Piece, typename scalar_t, typename Locator, typename T>
  static void launch_staged(const Level<Locator, const scalar_t>& level, const T* points, scalar_t* out, int64_t n,
                            const WordLayout& layout) {
    gather_staged_kernel<scalar_t, Width, Piece>
        <<<blocks(n, kStagedThreads), kStagedThreads, 0, stream()>>>(level, points, out, n, layout);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("sample_trilinear", TORCH_BOX(&StencilOps<Cuda>::sample_trilinear));
  m.impl("interpolate_cells", TORCH_BOX(&StencilOps<Cuda>::interpolate_cells));
}

}  // namespace voxelfield
