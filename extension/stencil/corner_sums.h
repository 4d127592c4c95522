// Arithmetic with the eight corners of one point's cell on the CPU, channel by channel.
#pragma once

#include "common/narrow.h"
#include "common/platform.h"
#include "common/tensors.h"
#include "stencil/batches.h"

namespace voxelfield {

// The weighted sum of the corners: into a row of the result, or with kAdd onto what the row holds.
template <bool kAdd, typename scalar_t, typename Result, typename T>
struct CornerSum {
  const scalar_t* corner[kCorners];
  const T* weight;
  Result* row;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t first) const {
    Result* out = row + first;
    VOXELFIELD_VECTORIZE
    for (int c = 0; c < kWidth; ++c) {
      T sum = kAdd ? widen(out[c]) : T(0);
      for (int k = 0; k < kCorners; ++k) sum += weight[k] * widen(corner[k][first + c]);
      out[c] = Narrow<Result>::from(sum);
    }
  }
};

// How that sum changes as the point moves, times the value that belongs to it, added up over channels.
template <typename scalar_t, typename T>
struct CornerSlope {
  const scalar_t* corner[kCorners];
  T slope[3][kCorners];  // of the corners' weights along each axis
  const scalar_t* value;
  T* gradient;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t first) const {
    T x = 0, y = 0, z = 0;
    VOXELFIELD_VECTORIZE_SUM(x, y, z)
    for (int c = 0; c < kWidth; ++c) {
      T along_x = 0, along_y = 0, along_z = 0;
      for (int k = 0; k < kCorners; ++k) {
        const T feature = widen(corner[k][first + c]);
        along_x += slope[0][k] * feature;
        along_y += slope[1][k] * feature;
        along_z += slope[2][k] * feature;
      }
      const T back = widen(value[first + c]);
      x += back * along_x;
      y += back * along_y;
      z += back * along_z;
    }
    gradient[0] += x;
    gradient[1] += y;
    gradient[2] += z;
  }
};

// The product of two rows.
template <typename scalar_t, typename T = opmath_t<scalar_t>>
VOXELFIELD_HOST_DEVICE T dot(const scalar_t* a, const scalar_t* b, int64_t channels) {
  T product = 0;
  VOXELFIELD_VECTORIZE_SUM(product)
  for (int64_t c = 0; c < channels; ++c) product += widen(a[c]) * widen(b[c]);
  return product;
}

// Sums with `sets` of eight weights each, in rows `stride` apart: written, or with kAdd added to what the rows hold.
template <bool kAdd, typename scalar_t, typename T, typename Result>
VOXELFIELD_HOST_DEVICE void sum_corners(const scalar_t* const* corner, const T* weight, int sets, int64_t channels,
                                        Result* row, int64_t stride) {
  CornerSum<kAdd, scalar_t, Result, T> sum;
  std::copy_n(corner, kCorners, sum.corner);
  for (int set = 0; set < sets; ++set) {
    sum.weight = weight + set * kCorners;
    sum.row = row + set * stride;
    for_each_block(channels, sum);
  }
}

// From here on one product per corner, summed over all channels first, is less work than three sums per channel.
constexpr int64_t kManyChannels = 64;

template <typename scalar_t, typename T>
VOXELFIELD_HOST_DEVICE void add_gradient(const CornerSlope<scalar_t, T>& sum, int64_t channels) {
  if (channels < kManyChannels) return for_each_block(channels, sum);
  for (int k = 0; k < kCorners; ++k) {
    const T product = dot(sum.value, sum.corner[k], channels);
    for (int axis = 0; axis < 3; ++axis) sum.gradient[axis] += sum.slope[axis][k] * product;
  }
}

// The same for float16, in functions of their own; see float16_rows.h.
struct Float16Corners {
  void (*sum)(const Half* const* corner, const float* weight, int sets, int64_t channels, float* row, int64_t stride);
  void (*add)(const Half* const* corner, const float* weight, int sets, int64_t channels, float* row, int64_t stride);
  void (*add_gradient)(const CornerSlope<Half, float>& sum, int64_t channels);
};

// Chosen when the library is loaded.
extern const Float16Corners float16_corners;

}  // namespace voxelfield
