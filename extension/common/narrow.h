// Conversions between 16-bit numbers and float32 on the CPU. Single numbers are converted without branches or calls, so
// that compilers vectorise the loops for any instruction set. Rows of float16 use the conversion instructions of the
// processor (F16C) if it has them. Rounding is to nearest even. Infinities, NaN and subnormals are converted to the
// same bits as in torch.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/platform.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define VOXELFIELD_HAS_F16C
// Every processor with AVX2 has FMA and F16C.
#define VOXELFIELD_F16C __attribute__((target("avx2,fma,f16c")))
#endif

namespace voxelfield {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

VOXELFIELD_HOST_DEVICE uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

VOXELFIELD_HOST_DEVICE float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Converts to the type of arithmetic. The conversions of torch are vectorised in this direction, but not in the other.
template <typename scalar_t>
VOXELFIELD_HOST_DEVICE auto widen(scalar_t x) {
  return static_cast<std::conditional_t<std::is_same_v<scalar_t, double>, double, float>>(x);
}

// Converts from the type of arithmetic back to the storage type, with rounding.
template <typename scalar_t, typename T>
VOXELFIELD_HOST_DEVICE scalar_t narrow_to(T x) {
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t result = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
    return BFloat16(static_cast<unsigned short>(result), BFloat16::from_bits());
  } else if constexpr (std::is_same_v<scalar_t, Half>) {
    const uint32_t sign = (float_to_bits(x) >> 16) & 0x8000, bits = float_to_bits(x) & 0x7fffffff;
    // The bias of the exponent changes from 127 to 15, and 13 bits of the fraction are rounded off. A carry increments
    // the exponent and turns the largest number into infinity.
    const uint32_t rounded = (bits - 0x38000000 + 0x0fff + ((bits >> 13) & 1)) >> 13;
    const uint32_t number = bits >= 0x47800000 ? 0x7c00 : rounded;
    // A subnormal is a multiple of 2^-24; adding 0.5 rounds to such a multiple.
    const uint32_t subnormal = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000;
    const uint32_t finite = bits < 0x38800000 ? subnormal : number;
    return Half(static_cast<unsigned short>(sign | (bits > 0x7f800000 ? 0x7e00 : finite)), Half::from_bits());
  } else {
    return static_cast<scalar_t>(x);
  }
}

// Whether functions marked VOXELFIELD_F16C can run on this machine. False if the environment sets
// ATEN_CPU_CAPABILITY=default, which also restricts the kernels of torch to the baseline.
bool runs_f16c();

// Only functions compiled for F16C may contain its instructions, and compilers do not inline such functions into code
// that also runs on other processors. Hot loops therefore call functions that process whole rows, through pointers that
// are set at run time.
struct Float16Rows {
  // Converts `count` rows of `length` numbers and stores the results contiguously.
  void (*widen)(const Half* const* rows, int count, int64_t length, float* out);
  void (*narrow)(const float* values, int64_t count, Half* out);
};

// Set when the library is loaded.
extern const Float16Rows float16_rows;

}  // namespace voxelfield
