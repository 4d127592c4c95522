// Building blocks of colour: the basis of view-dependent colour, the sigmoid that maps outputs to colours, and the
// transfer function by which image values encode light.
#pragma once

#include <cmath>

#include "common/constants.h"
#include "common/platform.h"

namespace voxelfield {

constexpr int kMaxShBasis = (kMaxDegree + 1) * (kMaxDegree + 1);

VOXELFIELD_HOST_DEVICE constexpr int sh_basis_size(int degree) { return (degree + 1) * (degree + 1); }

// Writes the (degree + 1)^2 basis functions of a unit direction: the real spherical harmonics up to degree 3 (Sloan,
// "Stupid Spherical Harmonics Tricks", 2008, appendix A2), orthonormal over the sphere, with the Condon-Shortley phase,
// in the order l = 0..degree, m = -l..l.
template <typename T>
VOXELFIELD_HOST_DEVICE void spherical_harmonics(const T* direction, int degree, T* basis) {
  const T x = direction[0], y = direction[1], z = direction[2];
  basis[0] = T(0.28209479177387814);  // 1 / (2 sqrt(pi))
  if (degree < 1) return;
  constexpr T c1 = T(0.4886025119029199);  // sqrt(3 / (4 pi))
  basis[1] = -c1 * y;
  basis[2] = c1 * z;
  basis[3] = -c1 * x;
  if (degree < 2) return;
  constexpr T c2 = T(1.0925484305920792);  // sqrt(15 / pi) / 2
  const T xx = x * x, yy = y * y, zz = z * z;
  basis[4] = c2 * x * y;
  basis[5] = -c2 * y * z;
  basis[6] = T(0.31539156525252005) * (T(3) * zz - T(1));  // sqrt(5 / pi) / 4
  basis[7] = -c2 * x * z;
  basis[8] = T(0.5) * c2 * (xx - yy);
  if (degree < 3) return;
  constexpr T c30 = T(0.5900435899266435);  // sqrt(35 / (2 pi)) / 4
  constexpr T c31 = T(2.890611442640554);   // sqrt(105 / pi) / 2
  constexpr T c32 = T(0.4570457994644658);  // sqrt(21 / (2 pi)) / 4
  basis[9] = -c30 * y * (T(3) * xx - yy);
  basis[10] = c31 * x * y * z;
  basis[11] = -c32 * y * (T(5) * zz - T(1));
  basis[12] = T(0.3731763325901154) * z * (T(5) * zz - T(3));  // sqrt(7 / pi) / 4
  basis[13] = -c32 * x * (T(5) * zz - T(1));
  basis[14] = T(0.5) * c31 * z * (xx - yy);
  basis[15] = -c30 * x * (xx - T(3) * yy);
}

VOXELFIELD_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The transfer function of sRGB (IEC 61966-2-1) in both directions, with its slope. Its linear part extends below zero,
// and its power law extends above one.
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
