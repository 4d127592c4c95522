// Chooses the compiled form of a kernel that suits the levels at hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/tensors.h"
#include "common/vector.cuh"
#include "stencil/trilinear.h"

namespace voxelfield {

template <typename Locator, typename scalar_t>
int most_vectors(const Levels<Locator, scalar_t>& levels, int width) {
  int64_t most = 0;
  for (int l = 0; l < levels.count; ++l) most = std::max(most, levels.level[l].locator.channels / width);
  return static_cast<int>(most);
}

// Compiled in every form that is faster: what each training step runs. Derivatives and float64 have one form, in
// vectors of four or one, because each further form takes time in every build.
template <typename Weights>
constexpr bool kSpecialised = std::is_same_v<Weights, ValueWeights<float>>;

// Calls f with the widest vector compiled for these weights, of at most `Bytes` bytes of the levels' elements, that
// suits every level and the rows.
template <typename Weights, int Bytes = 16, typename scalar_t, typename Locator, typename element_t, typename F>
void dispatch_level_width(const Levels<Locator, element_t>& levels, const scalar_t* rows, const F& f) {
  constexpr int kWidest = std::is_same_v<opmath_t<scalar_t>, double> ? 1 : Bytes / sizeof(element_t);
  int width = vector_width(kWidest, {levels.columns}, rows);
  for (int l = 0; l < levels.count; ++l) {
    const auto& level = levels.level[l];
    width = vector_width(width, {level.locator.channels, level.column}, level.data);
  }
  if constexpr (kWidest == 1) {
    dispatch_vector_width<1>(width, f);
  } else if constexpr (!kSpecialised<Weights>) {
    dispatch_vector_width<4, 1>(width, f);
  } else if constexpr (kWidest == 4) {
    dispatch_vector_width<4, 2, 1>(width, f);
  } else {
    dispatch_vector_width<kWidest, 4, 2, 1>(width, f);
  }
}

// Calls f with the levels as they are, or with plain locators if all of them are plain.
template <typename Weights, typename T, typename element_t, typename F>
void dispatch_plain(const Levels<GridLocator<T>, element_t>& levels, const F& f) {
  if constexpr (kSpecialised<Weights>) {
    Levels<GridLocator<T, true>, element_t> plain{};
    plain.count = levels.count;
    plain.sum = levels.sum;
    plain.columns = levels.columns;
    bool all_plain = levels.columns < 0x7fffffff;
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      all_plain = all_plain && level.locator.is_plain();
      plain.level[l] = {level.locator.plain(), level.data, level.column};
    }
    if (all_plain) return f(plain);
  }
  f(levels);
}

template <typename Weights, typename T, typename element_t, typename F>
void dispatch_plain(const Levels<CellLocator<T>, element_t>& levels, const F& f) {
  f(levels);
}

}  // namespace voxelfield
