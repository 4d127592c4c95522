// Host side of pixel_rays, written once: check, allocate, and hand over to a backend's kernel.
//   Backend::pixel_rays(images, index, n, out)
#pragma once

#include "check_tensor.h"
#include "pinhole.h"

namespace voxelfield {

// Photographs (cameras, height, width, 4) and how they were taken.
struct ImagesView {
  const uint8_t* pixels;
  const float* c2w;         // (cameras, 4, 4)
  const float* intrinsics;  // (cameras, 4)
  const float* aabb;
  int64_t width, height;
  int64_t count;  // of pixels, at least 1

  // The nearest one that there is.
  VOXELFIELD_HOST_DEVICE int64_t pixel(int64_t index) const {
    return index < 0 ? 0 : (index < count ? index : count - 1);
  }
};

struct PixelRayPointers {
  float *origins, *directions, *near, *far, *rgba;

  // The ray of one pixel, counted through all images, and its colour.
  VOXELFIELD_HOST_DEVICE void write(const ImagesView& images, int64_t index, int64_t row) const {
    const int64_t pixel = images.pixel(index), size = images.width * images.height, camera = pixel / size,
                  at = pixel - camera * size;
    const PinholeView view{images.c2w + 16 * camera, images.intrinsics + 4 * camera, images.width, images.height,
                           images.aabb};
    const Ray ray = view(at % images.width, at / images.width);
    for (int axis = 0; axis < 3; ++axis) {
      origins[3 * row + axis] = ray.origin[axis];
      directions[3 * row + axis] = ray.direction[axis];
    }
    near[row] = ray.near;
    far[row] = ray.far;
    for (int k = 0; k < 4; ++k) rgba[4 * row + k] = static_cast<float>(images.pixels[4 * pixel + k]) / 255.0f;
  }
};

template <typename Backend>
struct PixelRaysOps {
  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> pixel_rays(const Tensor& images, const Tensor& index,
                                                                       const Tensor& c2w, const Tensor& intrinsics,
                                                                       const Tensor& aabb) {
    check_contiguous("images", images, {kAny, kAny, kAny, 4}, ScalarType::Byte, images);
    check_tensor("index", index, {kAny}, ScalarType::Long, images);
    check_tensor("c2w", c2w, {images.size(0), 4, 4}, ScalarType::Float, images);
    check_tensor("intrinsics", intrinsics, {images.size(0), 4}, ScalarType::Float, images);
    check_tensor("aabb", aabb, {2, 3}, ScalarType::Float, images);
    STD_TORCH_CHECK(images.numel() > 0 || index.size(0) == 0, "images must have at least one pixel, got none");
    const typename Backend::Guard guard(images);
    const Tensor poses = as_contiguous(c2w), lenses = as_contiguous(intrinsics), box = as_contiguous(aabb);
    const Tensor chosen = as_contiguous(index);
    const int64_t n = chosen.size(0);
    Tensor origins = new_empty(poses, {n, 3}, ScalarType::Float),
           directions = new_empty(poses, {n, 3}, ScalarType::Float);
    Tensor near = new_empty(poses, {n}, ScalarType::Float), far = new_empty(poses, {n}, ScalarType::Float);
    Tensor rgba = new_empty(poses, {n, 4}, ScalarType::Float);
    if (n > 0) {
      Backend::pixel_rays(
          {images.const_data_ptr<uint8_t>(), poses.const_data_ptr<float>(), lenses.const_data_ptr<float>(),
           box.const_data_ptr<float>(), images.size(2), images.size(1), images.numel() / 4},
          chosen.const_data_ptr<int64_t>(), n,
          {origins.mutable_data_ptr<float>(), directions.mutable_data_ptr<float>(), near.mutable_data_ptr<float>(),
           far.mutable_data_ptr<float>(), rgba.mutable_data_ptr<float>()});
    }
    return {origins, directions, near, far, rgba};
  }
};

}  // namespace voxelfield
