// Float16 grids of several resolutions over one box, 4 channels each, read at one point by one thread.
#pragma once

#include <cuda_fp16.h>

#include "common/constants.h"
#include "common/vector.cuh"
#include "stencil/trilinear.h"

namespace voxelfield {

struct PyramidLevel {
  const __half* features;  // (X, Y, Z, 4)
  int32_t resolution[3];

  // The features at a point of the unit cube, beyond it those of its nearest face.
  __device__ __forceinline__ uint2 operator()(const float* point) const {
    const GridLocator<float, true> locator{
        {resolution[0], resolution[1], resolution[2]}, Padding::kBorder, kLevelChannels, 0, true, false};
    const Stencil<float, int32_t> s = locator(point, 0);
    uint2 corner[kCorners];
#pragma unroll
    for (int k = 0; k < kCorners; ++k) corner[k] = __ldg(reinterpret_cast<const uint2*>(features + s.offset(k)));
    float sum[kLevelChannels] = {};
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      const float weight = s.value(k);
      const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&corner[k].x));
      const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&corner[k].y));
      sum[0] += weight * low.x;
      sum[1] += weight * low.y;
      sum[2] += weight * high.x;
      sum[3] += weight * high.y;
    }
    // What an empty stencil has read is not to be trusted: NaN times zero is NaN.
    if (s.empty) return make_uint2(0, 0);
    const __half2 low = __floats2half2_rn(sum[0], sum[1]), high = __floats2half2_rn(sum[2], sum[3]);
    return make_uint2(*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high));
  }
};

struct PyramidView {
  PyramidLevel level[kMaxPyramidLevels];
  int levels;
  const float* aabb;

  // Writes the features of all levels side by side, into shared memory.
  __device__ __forceinline__ void gather(const float* point, uint2* row) const {
#pragma unroll 2
    for (int l = 0; l < levels; ++l) row[l] = level[l](point);
  }
};

}  // namespace voxelfield
