// 16-bit numbers to and from float32, without branches or calls, so that compilers vectorise them for any instruction
// set. Rounding is to nearest even. Infinities, NaN and subnormals are converted too, to the same bits as by torch.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

#include "common/platform.h"

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

VOXELFIELD_HOST_DEVICE float widen(float x) { return x; }
VOXELFIELD_HOST_DEVICE double widen(double x) { return x; }
VOXELFIELD_HOST_DEVICE float widen(BFloat16 x) { return bits_to_float(static_cast<uint32_t>(x.x) << 16); }

VOXELFIELD_HOST_DEVICE float widen(Half x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) & 0x7fff;
  const uint32_t sign = (static_cast<uint32_t>(x.x) & 0x8000) << 16;
  // The exponent moves from a bias of 15 to one of 127, and on to 255 for infinities and NaN.
  const uint32_t moved = (bits << 13) + (bits >= 0x7c00 ? 0x70000000u : 0x38000000u);
  // A subnormal is a multiple of 2^-24, the distance between floats above 0.5: its bits become the fraction of 0.5.
  const uint32_t subnormal = float_to_bits(bits_to_float(bits | 0x3f000000) - 0.5f);
  return bits_to_float(sign | (bits < 0x0400 ? subnormal : moved));
}

template <typename scalar_t>
struct Narrow {
  VOXELFIELD_HOST_DEVICE static scalar_t from(scalar_t x) { return x; }
};

template <>
struct Narrow<BFloat16> {
  VOXELFIELD_HOST_DEVICE static BFloat16 from(float x) {
    const uint32_t bits = float_to_bits(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t result = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
    return BFloat16(static_cast<unsigned short>(result), BFloat16::from_bits());
  }
};

template <>
struct Narrow<Half> {
  VOXELFIELD_HOST_DEVICE static Half from(float x) {
    const uint32_t sign = (float_to_bits(x) >> 16) & 0x8000, bits = float_to_bits(x) & 0x7fffffff;
    // The exponent's bias moves from 127 to 15, and 13 bits of the fraction are rounded off. A carry increments the
    // exponent, and turns the largest number into infinity.
    const uint32_t rounded = (bits - 0x38000000 + 0x0fff + ((bits >> 13) & 1)) >> 13;
    const uint32_t number = bits >= 0x47800000 ? 0x7c00 : rounded;
    // A subnormal is a multiple of 2^-24; adding 0.5 rounds to such a multiple.
    const uint32_t subnormal = float_to_bits(bits_to_float(bits) + 0.5f) - 0x3f000000;
    const uint32_t finite = bits < 0x38800000 ? subnormal : number;
    return Half(static_cast<unsigned short>(sign | (bits > 0x7f800000 ? 0x7e00 : finite)), Half::from_bits());
  }
};

}  // namespace voxelfield
