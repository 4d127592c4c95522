// Conversions between float and int32_t for whole numbers from 0 to 2^22.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/platform.h"

namespace voxelfield {

// On CUDA, conversion instructions have a fraction of the throughput of additions. Adding 2^23 to a whole number n
// below it gives a float whose bits are those of 2^23 plus n, so that one addition converts in either direction.

// Drops the fraction of a number that is not negative.
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

// Rounds up. Negative input stays negative; it is not rounded up.
VOXELFIELD_HOST_DEVICE float ceil_small(float value) {
#if defined(__CUDA_ARCH__)
  return __fadd_ru(value, 8388608.0f) - 8388608.0f;
#else
  return ceilf(value);
#endif
}

}  // namespace voxelfield
