// Integer arithmetic: conversions between float and int32_t for numbers from 0 to 2^22, and division.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/platform.h"

namespace voxelfield {

// On CUDA, conversion instructions have a fraction of the throughput of additions. Adding 2^23 to an integer n below
// 2^23 gives a float whose bits are those of 2^23 plus n, so one addition converts in either direction.

// Truncates a non-negative number.
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

// Sums and differences of untrusted numbers that wrap around, because signed overflow would be undefined behaviour.
VOXELFIELD_HOST_DEVICE int32_t wrapping_add(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

VOXELFIELD_HOST_DEVICE int32_t wrapping_subtract(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
}

#if defined(__CUDACC__)
// Divides by a number that is known on the host, without a division on the device, for numbers below 2^31 (Granlund and
// Montgomery, "Division by invariant integers using multiplication", PLDI 1994, figure 4.1).
struct Divisor {
  int32_t value;
  uint32_t multiplier;
  uint32_t shift;

  Divisor() = default;
  explicit Divisor(int32_t divisor) : value(divisor), multiplier(0), shift(0) {
    while ((uint64_t{1} << shift) < static_cast<uint64_t>(divisor)) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }

  __device__ __forceinline__ int32_t divide(int32_t number, int32_t& rest) const {
    const uint32_t quotient = (__umulhi(static_cast<uint32_t>(number), multiplier) + number) >> shift;
    rest = number - static_cast<int32_t>(quotient) * value;
    return static_cast<int32_t>(quotient);
  }
};
#endif

}  // namespace voxelfield
