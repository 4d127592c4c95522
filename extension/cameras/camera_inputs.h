// Host side: a camera in memory, for every op that renders an image.
#pragma once

#include "cameras/camera.h"
#include "common/checks.h"

namespace voxelfield {

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
