// Rays held by value: rays clipped to a box, rays in the coordinates of a box, and rays cast by a camera
// (voxelfield.rendering.cameras).
#pragma once

#include "rays/lens.h"
#include "rays/ray_walk.h"

namespace voxelfield {

// A ray held by value.
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
};

struct CameraView {
  const float* c2w;         // (4, 4), camera axes x right, y up, looking along -z
  const float* intrinsics;  // fx, fy, cx, cy in pixels
  Lens lens;
  int64_t width, height;
  const float* aabb;  // if not null, rays are clipped to this box

  // Returns the ray through the centre of a pixel.
  VOXELFIELD_HOST_DEVICE Ray operator()(int64_t x, int64_t y) const {
    return through(static_cast<float>(x) + 0.5f, static_cast<float>(y) + 0.5f);
  }

  // Returns the ray through a point of the image, in pixels from the corner of the image. The ray is sampled at the
  // middle of each step.
  VOXELFIELD_HOST_DEVICE Ray through(float x, float y) const {
    const CameraRay at = lens.ray_through((x - intrinsics[2]) / intrinsics[0], (y - intrinsics[3]) / intrinsics[1]);
    Ray ray;
    float squares = 0.0f;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float* row = c2w + 4 * axis;
      ray.origin[axis] = row[3];
      ray.direction[axis] = at.right * row[0] - at.down * row[1] - at.forward * row[2];
      squares += ray.direction[axis] * ray.direction[axis];
    }
    const float length = std::sqrt(squares);
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) ray.direction[axis] /= length;
    ray.offset = 0.5f;
    ray.near = 0.0f;
    ray.far = INFINITY;
    if (aabb != nullptr) clip_to_box(aabb, ray);
    return ray;
  }
};

}  // namespace voxelfield
