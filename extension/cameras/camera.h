// Rays cast by a camera (voxelfield.rendering.cameras).
#pragma once

#include "cameras/lens.h"
#include "rays/ray.h"

namespace voxelfield {

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
