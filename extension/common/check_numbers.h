// Checks of the numbers that raw ops take. The Python wrappers check them first; a direct call of a raw op must not be
// able to write outside of its results, or to keep a kernel from ending.
#pragma once

#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>

namespace voxelfield {

// Comparisons are written so that NaN fails them.
inline void check_fraction(const char* name, double value) {
  STD_TORCH_CHECK(value >= 0.0 && value <= 1.0, name, " must lie in [0, 1], got ", value);
}

// Kernels march in float32.
inline void check_step(double step) {
  using Limits = std::numeric_limits<float>;
  STD_TORCH_CHECK(step >= static_cast<double>(Limits::min()) && step <= static_cast<double>(Limits::max()),
                  "step must be a positive, finite distance, got ", step);
}

inline void check_finite(const char* name, double value) {
  const double limit = static_cast<double>(std::numeric_limits<float>::max());
  STD_TORCH_CHECK(value >= -limit && value <= limit, name, " must be finite, got ", value);
}

inline void check_finite_not_negative(const char* name, double value) {
  check_finite(name, value);
  STD_TORCH_CHECK(value >= 0.0, name, " must not be negative, got ", value);
}

}  // namespace voxelfield
