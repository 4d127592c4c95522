// Choosing a kernel's variant for the levels at hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/tensors.h"
#include "stencil/trilinear.h"

namespace voxelfield {

template <typename Locator, typename scalar_t>
int most_vectors(const Levels<Locator, scalar_t>& levels, int width) {
  int64_t most = 0;
  for (int l = 0; l < levels.count; ++l) most = std::max(most, levels.level[l].locator.channels / width);
  return static_cast<int>(most);
}

// Calls f with the widest vector, of at most `Widest` elements, that suits every level and every pointer.
template <int Widest, typename scalar_t, typename Locator, typename element_t, typename F>
void dispatch_level_width(const Levels<Locator, element_t>& levels, const void* rows, const F& f) {
  int64_t divisor = levels.columns;
  const auto row_address = reinterpret_cast<uintptr_t>(rows);
  uintptr_t addresses = 0;
  for (int l = 0; l < levels.count; ++l) {
    divisor |= levels.level[l].locator.channels | levels.level[l].column;
    addresses |= reinterpret_cast<uintptr_t>(levels.level[l].data);
  }
  const auto fits = [&](int width) {
    return divisor % width == 0 && row_address % (width * sizeof(scalar_t)) == 0 &&
           addresses % (width * sizeof(element_t)) == 0;
  };
  if constexpr (Widest >= 8) {
    if (fits(8)) return f(std::integral_constant<int, 8>{});
  }
  if constexpr (Widest >= 4) {
    if (fits(4)) return f(std::integral_constant<int, 4>{});
  }
  if (fits(2)) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

// Only what every training step runs is compiled in specialised forms: each costs time in every build.
template <typename Weights>
constexpr bool kSpecialised = std::is_same_v<Weights, ValueWeights<float>>;

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
