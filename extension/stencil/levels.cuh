// Selects the compiled version of a kernel that is suitable for given levels, and defines how the threads of a warp
// share points.
#pragma once

#include <algorithm>

#include "common/tensors.h"
#include "common/vector.cuh"
#include "stencil/trilinear.h"

namespace voxelfield {

template <typename Locator, typename scalar_t>
int max_vectors(const Levels<Locator, scalar_t>& levels, int width) {
  int64_t vectors = 0;
  for (const auto& level : levels) vectors = std::max(vectors, level.locator.channels / width);
  return static_cast<int>(vectors);
}

// Kernels that run in every training step are compiled in all versions that are faster. Derivatives and float64 have
// only vectors of four or one, because each further version takes time in every build.
template <typename T, int Sets>
constexpr bool kSpecialised = std::is_same_v<T, float> && Sets == 1;

// Whether levels with such locators have a compiled version with plain ones.
template <typename Locator>
constexpr bool kMayBePlain = std::is_same_v<Locator, GridLocator<float>> || std::is_same_v<Locator, SlabLocator<float>>;

// Calls f with the widest vector that is compiled for this number of sets of weights, has at most `Bytes` bytes of
// elements of the levels, and is suitable for every level and the rows. Also passes the levels, unchanged or with plain
// locators if all of them are plain.
template <int Sets, int Bytes = 16, typename scalar_t, typename Locator, typename element_t, typename F>
void dispatch_levels(const Levels<Locator, element_t>& levels, const scalar_t* rows, const F& f) {
  using T = opmath_t<scalar_t>;
  constexpr int kWidest = std::is_same_v<T, double> ? 1 : Bytes / sizeof(element_t);
  int width = vector_width(kWidest, {levels.columns}, rows);
  for (const auto& level : levels) width = vector_width(width, {level.locator.channels, level.column}, level.data);
  constexpr int kFour = std::min(kWidest, 4), kTwo = std::min(kWidest, 2);
  if constexpr (!kSpecialised<T, Sets>) {
    dispatch_vector_width<kFour, 1>(width, [&](auto chosen) { f(chosen, levels); });
  } else {
    dispatch_vector_width<kWidest, kFour, kTwo, 1>(width, [&](auto chosen) {
      if constexpr (kMayBePlain<Locator>) {
        Levels<decltype(levels.level[0].locator.plain()), element_t> plain(levels.columns, levels.sum);
        bool all_plain = levels.columns < 0x7fffffff;
        for (const auto& level : levels) {
          all_plain = all_plain && level.locator.is_plain();
          plain.add({level.locator.plain(), level.data, level.column});
        }
        if (all_plain) return f(chosen, plain);
      }
      f(chosen, levels);
    });
  }
}

// 2 * vectors neighbouring threads process a point: one thread for each channel vector of the lower and of the upper
// vertex along z. These vertices are adjacent in memory, so an access of the warp touches half as many cache lines as
// with one thread for both. The number of cache lines limits the throughput of the L1 cache and of the atomic units of
// the L2 cache.
constexpr int kMaxVectors = kWarp / 2;

struct LaneLayout {
  int vectors;          // vectors of a point that are processed at once
  int points;           // points per warp
  int max_vectors;      // maximum over all levels
  unsigned reciprocal;  // 2^16 / (2 * vectors), rounded up

  explicit LaneLayout(int max_vectors)
      : vectors(std::clamp(max_vectors, 1, kMaxVectors)),
        points(kWarp / (2 * vectors)),
        max_vectors(max_vectors),
        reciprocal((65536 + 2 * vectors - 1) / (2 * vectors)) {}
};

struct Lane {
  int point;    // index within the warp
  int vector;   // index among the vectors processed at once
  bool upper;   // whether this thread processes the upper vertex along z
  bool active;  // false for the last threads of a warp if no point is left for them
  int partner;  // the thread that processes the other vertex; any thread, modulo a warp, for threads without a point

  __device__ __forceinline__ explicit Lane(const LaneLayout& layout) {
    const int lane = threadIdx.x % kWarp;
    point = static_cast<int>(lane * layout.reciprocal >> 16);
    const int rest = lane - point * 2 * layout.vectors;
    upper = rest >= layout.vectors;
    vector = upper ? rest - layout.vectors : rest;
    active = point < layout.points;
    partner = upper ? lane - layout.vectors : lane + layout.vectors;
  }
};

}  // namespace voxelfield
