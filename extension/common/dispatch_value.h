// From a number known when the program runs to one that a template can take; the widths of vectors among them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace voxelfield {

// Calls f with the first of ascending Values that is no less than `value`, or with the last, as an integral_constant.
template <int First, int... Values, typename F>
void dispatch_value(int64_t value, const F& f) {
  if constexpr (sizeof...(Values) > 0) {
    if (value > First) return dispatch_value<Values...>(value, f);
  }
  f(std::integral_constant<int, First>{});
}

template <typename F>
void dispatch_flag(bool flag, const F& f) {
  flag ? f(std::true_type{}) : f(std::false_type{});
}

// Returns the width, a power of two up to `widest`, of the widest vectors into which data can be cut: it divides every
// count (a length, stride or offset in elements), and every array is aligned to it. Null pointers suit any width.
template <typename... Elements>
int vector_width(int widest, std::initializer_list<int64_t> counts, const Elements*... arrays) {
  uint64_t bits = static_cast<uint64_t>(widest);
  for (const int64_t count : counts) bits |= static_cast<uint64_t>(count);
  ((bits |= reinterpret_cast<uintptr_t>(arrays) / sizeof(Elements)), ...);
  return static_cast<int>(bits & (~bits + 1));  // the lowest set bit
}

// Calls f with the first of `Width, Narrower...`, given in falling order, that is at most `width`; the last one must
// be.
template <int Width, int... Narrower, typename F>
void dispatch_vector_width(int width, const F& f) {
  if constexpr (sizeof...(Narrower) > 0) {
    if (width < Width) return dispatch_vector_width<Narrower...>(width, f);
  }
  f(std::integral_constant<int, Width>{});
}

}  // namespace voxelfield
