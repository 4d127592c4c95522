// Whether numbers are finite, for host and device.
#pragma once

#include "common/platform.h"

namespace voxelfield {

// Whether three numbers are finite. A sum of products with zero is zero unless a term is infinite or NaN.
template <typename T>
VOXELFIELD_HOST_DEVICE bool all_finite(const T* three) {
  const T zero = three[0] * T(0) + three[1] * T(0) + three[2] * T(0);
  return zero == T(0);
}

}  // namespace voxelfield
