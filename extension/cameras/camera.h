// Rays cast by a camera (voxelfield.rendering.cameras), and a camera in memory, for every op that renders an image.
#pragma once

#include "cameras/lens.h"
#include "common/checks.h"
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

  // The same for a pixel in the order of rows.
  VOXELFIELD_HOST_DEVICE Ray operator[](int64_t pixel) const {
    const int64_t y = pixel / width;
    return (*this)(pixel - y * width, y);
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

// A camera, the size of its image, and the colour of the background, if the op needs one.
struct CameraInputs {
  Tensor c2w, intrinsics;
  OptionalTensor background, lens;
  int64_t width, height;

  CameraInputs(const Tensor& c2w, const Tensor& intrinsics, const OptionalTensor& lens, int64_t width, int64_t height,
               const OptionalTensor& background)
      : c2w(checked("c2w", c2w, {4, 4}, ScalarType::Float, c2w)),
        intrinsics(checked("intrinsics", intrinsics, {4}, ScalarType::Float, c2w)),
        background(checked("background", background, {3}, ScalarType::Float, c2w)),
        lens(checked("lens", lens, {kLensNumbers}, ScalarType::Float, c2w)),
        width(width),
        height(height) {
    STD_TORCH_CHECK(width > 0 && height > 0, "width and height must be positive, got ", width, " and ", height);
  }

  CameraView view(const float* aabb) const {
    return {data_of(c2w), data_of(intrinsics), {data_of(lens)}, width, height, aabb};
  }
};

}  // namespace voxelfield
