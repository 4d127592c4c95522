// Rays by value: clipped to a box, and in the coordinates of a box.
#pragma once

#include "rays/ray_walk.h"

namespace voxelfield {

struct Ray {
  float origin[3];
  float direction[3];
  float near;
  float far;
  float offset;

  VOXELFIELD_HOST_DEVICE RayView view(float step, float steps_per_length) const {
    return {origin, direction, near, far, offset, step, steps_per_length};
  }

  static VOXELFIELD_HOST_DEVICE Ray copy(const RayView& ray) {
    return {{ray.origin[0], ray.origin[1], ray.origin[2]},
            {ray.direction[0], ray.direction[1], ray.direction[2]},
            ray.near,
            ray.far,
            ray.offset};
  }
};

// Sets near and far to the part of a ray inside a box, or both to 0 if the ray misses the box (the slab method, Kay and
// Kajiya 1986).
VOXELFIELD_HOST_DEVICE void clip_to_box(const float* aabb, Ray& ray) {
  float enter = 0.0f, leave = INFINITY;
  VOXELFIELD_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    const float low = (aabb[axis] - ray.origin[axis]) / ray.direction[axis];
    const float high = (aabb[3 + axis] - ray.origin[axis]) / ray.direction[axis];
    // 0 / 0 occurs if the origin lies on a face of the slab and the ray is parallel to it. Such a slab does not bound
    // the ray.
    if (low == low && high == high) {
      enter = fmaxf(enter, fminf(low, high));
      leave = fminf(leave, fmaxf(low, high));
    }
  }
  const bool hit = leave > enter && leave < INFINITY;
  ray.near = hit ? enter : 0.0f;
  ray.far = hit ? leave : 0.0f;
}

// A ray in the coordinates of a box whose corners are at 0 and 1.
struct CubeRay {
  float start[3], slope[3];

  VOXELFIELD_HOST_DEVICE CubeRay(const RayView& ray, const float* aabb) {
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
};

}  // namespace voxelfield
