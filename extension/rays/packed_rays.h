// The rows of packed samples that a ray has. The caller's offsets are not checked on CUDA, because that would
// synchronise; whatever they are, no ray reaches beyond the samples.
#pragma once

#include "common/checks.h"

namespace voxelfield {

struct RaySpan {
  int64_t begin = 0, end = 0;
};

struct PackedRays {
  const int64_t* offsets;  // (count + 1,)
  int64_t count;
  int64_t samples;

  // A ray whose end lies before its begin has no samples, and neither has one past the last.
  VOXELFIELD_HOST_DEVICE RaySpan operator[](int64_t ray) const {
    if (ray >= count) return {};
    const int64_t begin = offset(ray), end = offset(ray + 1);
    return {begin, end > begin ? end : begin};
  }

  // Rows that belong to no ray.
  VOXELFIELD_HOST_DEVICE RaySpan before() const { return {0, offset(0)}; }
  VOXELFIELD_HOST_DEVICE RaySpan behind() const { return {offset(count), samples}; }

 private:
  VOXELFIELD_HOST_DEVICE int64_t offset(int64_t i) const {
    const int64_t given = offsets[i];
    return given < 0 ? 0 : (given < samples ? given : samples);
  }
};

// Offsets are bounded where they are read, by PackedRays.
inline Tensor checked_ray_offsets(const Tensor& ray_offsets, const Tensor& like) {
  const Tensor offsets = checked("ray_offsets", ray_offsets, {kAny}, ScalarType::Long, like);
  STD_TORCH_CHECK(offsets.size(0) > 0, "ray_offsets must have R + 1 entries, at least one, got none");
  return offsets;
}

inline PackedRays packed_rays(const Tensor& ray_offsets, int64_t samples) {
  return {data_of(ray_offsets), ray_offsets.size(0) - 1, samples};
}

}  // namespace voxelfield
