// The last step to a colour, and how image values encode light.
#pragma once

#include <cmath>

#include "common/platform.h"

namespace voxelfield {

// From the output of a network or of basis functions.
VOXELFIELD_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The transfer function of sRGB (IEC 61966-2-1), in both directions and with its slope. Its linear part extends below
// zero, its power law above one.
template <typename T>
struct Transferred {
  T value, slope;
};

template <typename T>
VOXELFIELD_HOST_DEVICE Transferred<T> srgb_decode(T encoded) {
  if (encoded <= T(0.04045)) return {encoded / T(12.92), T(1) / T(12.92)};
  const T light = std::pow((encoded + T(0.055)) / T(1.055), T(2.4));
  return {light, T(2.4) * light / (encoded + T(0.055))};
}

template <typename T>
VOXELFIELD_HOST_DEVICE Transferred<T> srgb_encode(T light) {
  if (light <= T(0.0031308)) return {T(12.92) * light, T(12.92)};
  const T scaled = T(1.055) * std::pow(light, T(1) / T(2.4));
  return {scaled - T(0.055), scaled / (T(2.4) * light)};
}

}  // namespace voxelfield
