// A ray in the coordinates of a grid's unit cube.
#pragma once

#include "rays/ray_walk.h"
#include "stencil/trilinear.h"

namespace voxelfield {

struct UnitRay {
  float start[3], slope[3];

  VOXELFIELD_HOST_DEVICE UnitRay(const RayView& ray, const float* aabb) {
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float extent = aabb[3 + axis] - aabb[axis];
      start[axis] = (ray.origin[axis] - aabb[axis]) / extent;
      slope[axis] = ray.direction[axis] / extent;
    }
  }

  VOXELFIELD_HOST_DEVICE void point(float t, float* at) const {
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) at[axis] = fmaf(t, slope[axis], start[axis]);
  }

  VOXELFIELD_HOST_DEVICE Stencil<float, int32_t> at(float t, const GridLocator<float, true>& locator) const {
    float where[3];
    point(t, where);
    return locator(where, 0);
  }
};

}  // namespace voxelfield
