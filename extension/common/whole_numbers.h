// Whole numbers from 0 to 2^22 as floats, and back.
#pragma once

#include "common/platform.h"

namespace voxelfield {

// Conversions between float and int take several times as long as sums on CUDA. For whole numbers n below 2^23,
// however, the bits of n + 2^23 are those of 2^23 with n in the fraction.

// Rounds a number from 0 to 2^22 towards zero.
VOXELFIELD_HOST_DEVICE int32_t trunc_small(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(__fadd_rd(value, 8388608.0f)) & 0x7fffff;
#else
  return static_cast<int32_t>(value);
#endif
}

VOXELFIELD_HOST_DEVICE float int_to_float(int32_t n) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(n | 0x4b000000) - 8388608.0f;
#else
  return static_cast<float>(n);
#endif
}

// Rounds a number up to 2^22 up. Negative input stays negative; it is not rounded up.
VOXELFIELD_HOST_DEVICE float ceil_small(float value) {
#if defined(__CUDA_ARCH__)
  return __fadd_ru(value, 8388608.0f) - 8388608.0f;
#else
  return ceilf(value);
#endif
}

}  // namespace voxelfield
