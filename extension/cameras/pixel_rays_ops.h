// Rays through pixels of photographs, for both backends.
#pragma once

#include "cameras/camera.h"
#include "common/checks.h"

namespace voxelfield {

// Casts rays through selected pixels of photographs (cameras, height, width, 4).
struct PixelRays {
  const uint8_t* pixels;
  const float* c2w;         // (cameras, 4, 4)
  const float* intrinsics;  // (cameras, 4)
  Lens lenses;              // one per camera
  const float* aabb;
  int64_t width, height;
  int64_t count;  // number of pixels, at least 1
  int64_t side;   // rays along each side of a pixel
  const int64_t* index;
  float *origins, *directions, *near, *far;  // for each ray; the rays of a pixel are adjacent
  float* rgba;                               // for each pixel

  VOXELFIELD_HOST_DEVICE void operator()(int64_t row) const { cast(row, origins + 3 * row, directions + 3 * row); }

  // Writes all results of a ray. Its origin and direction are written to the given addresses.
  VOXELFIELD_HOST_DEVICE void cast(int64_t row, float* origin, float* direction) const {
    const int64_t each = side * side, chosen = row / each, square = row - chosen * each, at = pixel(index[chosen]);
    const Ray cast = ray(at, square);
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      origin[axis] = cast.origin[axis];
      direction[axis] = cast.direction[axis];
    }
    near[row] = cast.near;
    far[row] = cast.far;
    if (square > 0) return;
    Rgba color;
    VOXELFIELD_UNROLL
    for (int k = 0; k < 4; ++k) color.channel[k] = static_cast<float>(pixels[4 * at + k]) / 255.0f;
    reinterpret_cast<Rgba*>(rgba)[chosen] = color;
  }

 private:
  // Aligned so that it is written in one access.
  struct alignas(16) Rgba {
    float channel[4];
  };

  VOXELFIELD_HOST_DEVICE int64_t pixel(int64_t index) const {
    return index < 0 ? 0 : (index < count ? index : count - 1);
  }

  // Returns one of the rays that are spread over a pixel. They are numbered row by row within a pixel, and pixels are
  // numbered row by row through all images.
  VOXELFIELD_HOST_DEVICE Ray ray(int64_t pixel, int64_t square) const {
    const int64_t size = width * height, camera = pixel / size, at = pixel - camera * size;
    const int64_t y = at / width, x = at - y * width, down = square / side, right = square - down * side;
    const PixelPoint point(static_cast<float>(right), static_cast<float>(down), static_cast<float>(side));
    const CameraView view{c2w + 16 * camera, intrinsics + 4 * camera, lenses.at(camera), width, height, aabb};
    return view.through(static_cast<float>(x) + point.x, static_cast<float>(y) + point.y);
  }
};

template <typename Backend>
struct PixelRaysOps {
  static TensorTuple<5> pixel_rays(const Tensor& images, const Tensor& index, const Tensor& c2w,
                                   const Tensor& intrinsics, const OptionalTensor& lens, const Tensor& aabb,
                                   int64_t supersampling) {
    contiguous_data("images", images, {kAny, kAny, kAny, 4}, ScalarType::Byte, images);
    const Tensor chosen = checked("index", index, {kAny}, ScalarType::Long, images);
    const Tensor poses = checked("c2w", c2w, {images.size(0), 4, 4}, ScalarType::Float, images);
    const Tensor pinholes = checked("intrinsics", intrinsics, {images.size(0), 4}, ScalarType::Float, images);
    const OptionalTensor lenses = checked("lens", lens, {images.size(0), kLensNumbers}, ScalarType::Float, images);
    const Tensor box = checked("aabb", aabb, {2, 3}, ScalarType::Float, images);
    STD_TORCH_CHECK(images.numel() > 0 || index.size(0) == 0, "images must have at least one pixel, got none");
    const int64_t pixels = index.size(0);
    constexpr int64_t kRayBytes = 3 * sizeof(float);  // per ray, in origins and in directions
    STD_TORCH_CHECK(supersampling > 0 && pixels <= INT64_MAX / kRayBytes / supersampling / supersampling,
                    "supersampling must be at least 1 and the bytes of all rays fit 64 bits, got ", supersampling);
    const typename Backend::Guard guard(images);
    const int64_t rays = pixels * supersampling * supersampling;
    Tensor origins = new_like(poses, {rays, 3}), directions = new_like(poses, {rays, 3});
    Tensor near = new_like(poses, {rays}), far = new_like(poses, {rays}), rgba = new_like(poses, {pixels, 4});
    Backend::for_each(rays,
                      PixelRays{data_of(images), data_of(poses), data_of(pinholes), Lens{data_of(lenses)}, data_of(box),
                                images.size(2), images.size(1), images.numel() / 4, supersampling, data_of(chosen),
                                data_of(origins), data_of(directions), data_of(near), data_of(far), data_of(rgba)});
    return {origins, directions, near, far, rgba};
  }

  static void implement(Library& m) { m.impl("pixel_rays", TORCH_BOX(&PixelRaysOps::pixel_rays)); }
};

}  // namespace voxelfield
