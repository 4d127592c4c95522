// Division by a number known on the host, without a division on the device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace voxelfield {

// Granlund and Montgomery, "Division by invariant integers using multiplication" (PLDI 1994), figure 4.1, for numbers
// below 2^31.
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

}  // namespace voxelfield
