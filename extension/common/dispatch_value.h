// From a number known when the program runs to one that a template can take.
#pragma once

#include <cstdint>
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

}  // namespace voxelfield
