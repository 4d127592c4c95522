// The rows of packed samples that belong to each ray.
#pragma once

#include "common/checks.h"

namespace voxelfield {

// Callers of the raw ops may pass arbitrary offsets and counts. They are not checked on CUDA, because that would
// synchronise, so they are clamped when they are read.
VOXELFIELD_HOST_DEVICE int64_t bounded(int64_t value, int64_t max_value) {
  return value < 0 ? 0 : (value < max_value ? value : max_value);
}

// The rows of packed samples that belong to a ray. They never exceed the samples, whatever the offsets are.
struct RaySpan {
  int64_t begin = 0, end = 0;
};

struct PackedRays {
  const int64_t* offsets;  // (count + 1,)
  int64_t count;
  int64_t samples;

  // A ray has no samples if its end lies before its begin, or if it lies after the last ray.
  VOXELFIELD_HOST_DEVICE RaySpan operator[](int64_t ray) const {
    if (ray >= count) return {};
    const int64_t begin = bounded(offsets[ray], samples), end = bounded(offsets[ray + 1], samples);
    return {begin, end > begin ? end : begin};
  }

  // Rows that belong to no ray.
  VOXELFIELD_HOST_DEVICE RaySpan before() const { return {0, bounded(offsets[0], samples)}; }
  VOXELFIELD_HOST_DEVICE RaySpan behind() const { return {bounded(offsets[count], samples), samples}; }
};

inline Tensor checked_ray_offsets(const Tensor& ray_offsets, const Tensor& like) {
  const Tensor offsets = checked("ray_offsets", ray_offsets, {kAny}, ScalarType::Long, like);
  STD_TORCH_CHECK(offsets.size(0) > 0, "ray_offsets must have R + 1 entries, at least one, got none");
  return offsets;
}

inline PackedRays packed_rays(const Tensor& ray_offsets, int64_t samples) {
  return {data_of(ray_offsets), ray_offsets.size(0) - 1, samples};
}

}  // namespace voxelfield
