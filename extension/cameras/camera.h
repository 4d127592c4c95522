// Rays cast by a camera (voxelfield.rendering.cameras), and a camera in memory, for every op that renders an image.
#pragma once

#include "cameras/lens.h"
#include "common/checks.h"
#include "rays/ray.h"

namespace voxelfield {

// The point in a pixel, from 0 to 1, through which one of side x side rays goes. All x differ and are equally spaced,
// and so are all y (Chiu, Shirley and Wang 1994, without their random order); four rays form a rotated grid.
struct PixelPoint {
  float x, y;

  VOXELFIELD_HOST_DEVICE PixelPoint(float right, float down, float side)
      : x((right + (down + 0.5f) / side) / side), y((down + (side - right - 0.5f) / side) / side) {}
};

struct CameraView {
  const float* c2w;         // (4, 4), camera axes x right, y up, looking along -z
  const float* intrinsics;  // fx, fy, cx, cy in pixels
  Lens lens;
  int64_t width, height;
  const float* aabb;   // if not null, rays are clipped to this box
  int32_t across = 1;  // rays along each side of a pixel; the image here has one pixel per ray

  // Returns the ray of a pixel: through its centre, or through the point of its square.
  VOXELFIELD_HOST_DEVICE Ray operator()(int32_t x, int32_t y) const {
    const int32_t left = x / across, top = y / across;
    const auto side = static_cast<float>(across);
    const PixelPoint point(static_cast<float>(x - left * across), static_cast<float>(y - top * across), side);
    return through((static_cast<float>(left) + point.x) * side, (static_cast<float>(top) + point.y) * side);
  }

  // The same for a pixel in the order of rows.
  VOXELFIELD_HOST_DEVICE Ray operator[](int64_t pixel) const {
    const int64_t y = pixel / width;
    return (*this)(static_cast<int32_t>(pixel - y * width), static_cast<int32_t>(y));
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

// A camera, the size of its image, and the colour of the background.
struct CameraInputs {
  Tensor c2w, intrinsics, background;
  OptionalTensor lens;
  int64_t width, height;
  int32_t across;

  CameraInputs(const Tensor& c2w, const Tensor& intrinsics, const OptionalTensor& lens, int64_t width, int64_t height,
               int64_t across, const Tensor& background)
      : c2w(checked("c2w", c2w, {4, 4}, ScalarType::Float, c2w)),
        intrinsics(checked("intrinsics", intrinsics, {4}, ScalarType::Float, c2w)),
        background(checked("background", background, {3}, ScalarType::Float, c2w)),
        lens(checked("lens", lens, {kLensNumbers}, ScalarType::Float, c2w)),
        width(width),
        height(height),
        across(static_cast<int32_t>(across)) {
    STD_TORCH_CHECK(width > 0 && height > 0, "width and height must be positive, got ", width, " and ", height);
    STD_TORCH_CHECK(across > 0 && width % across == 0 && height % across == 0,
                    "across must be positive and divide width and height, ", width, " and ", height, ", got ", across);
  }

  CameraView view(const float* aabb) const {
    return {data_of(c2w), data_of(intrinsics), {data_of(lens)}, width, height, aabb, across};
  }
};

}  // namespace voxelfield
