// Whole numbers below 2^22 as floats, and back.
#pragma once

#include "common/platform.h"

namespace voxelfield {

// Conversions between float and int are several times as slow as sums on CUDA, but for whole numbers below 2^23 the
// bits of n + 2^23 are those of 2^23, and n.
VOXELFIELD_HOST_DEVICE int32_t floor_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(__fadd_rd(value, 8388608.0f)) & 0x7fffff;
#else
  return static_cast<int32_t>(value);
#endif
}

VOXELFIELD_HOST_DEVICE float float_of(int32_t n) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(n | 0x4b000000) - 8388608.0f;
#else
  return static_cast<float>(n);
#endif
}

// What is below 0 only stays so.
VOXELFIELD_HOST_DEVICE float ceil_of(float value) {
#if defined(__CUDA_ARCH__)
  return __fadd_ru(value, 8388608.0f) - 8388608.0f;
#else
  return ceilf(value);
#endif
}

}  // namespace voxelfield
