// Checks of tensors that say which samples lie along which ray.
#pragma once

#include "common/check_tensor.h"
#include "rays/packed_rays.h"

namespace voxelfield {

// Offsets are bounded where they are read, by PackedRays.
inline void check_ray_offsets(const Tensor& ray_offsets, const Tensor& like) {
  check_tensor("ray_offsets", ray_offsets, {kAny}, ScalarType::Long, like);
  STD_TORCH_CHECK(ray_offsets.size(0) > 0, "ray_offsets must have R + 1 entries, at least one, got none");
}

inline PackedRays packed_rays(const Tensor& ray_offsets, int64_t samples) {
  return {ray_offsets.const_data_ptr<int64_t>(), ray_offsets.size(0) - 1, samples};
}

}  // namespace voxelfield
