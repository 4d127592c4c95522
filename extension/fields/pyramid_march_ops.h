// Host side of packing the samples that were found to show on each ray: allocate and hand over to a backend's kernel.
#pragma once

#include "rays/packing.h"
#include "rays/ray_walk.h"

namespace voxelfield {

// Finds samples whose distances lie in a row for each ray.
struct SlottedSamples {
  const float *origins, *directions;
  const float* slots;  // (R, max_samples_per_ray)
  int64_t max_samples_per_ray;
  float step;
  SamplePointers out;

  // What all samples of a ray need.
  struct Staged {
    float origin[3], direction[3];
  };

  VOXELFIELD_HOST_DEVICE Staged stage(int64_t ray) const {
    const float *o = origins + 3 * ray, *d = directions + 3 * ray;
    return {{o[0], o[1], o[2]}, {d[0], d[1], d[2]}};
  }

  VOXELFIELD_HOST_DEVICE SampleRow sample(const Staged& staged, int64_t ray, int32_t number) const {
    SampleRow row{{}, slots[ray * max_samples_per_ray + number], step, ray, true};
    for (int axis = 0; axis < 3; ++axis) row.position[axis] = fmaf(row.t, staged.direction[axis], staged.origin[axis]);
    return row;
  }

  // All are remembered.
  VOXELFIELD_HOST_DEVICE void write_rest(int64_t /*row*/, int64_t /*ray*/, int32_t /*count*/) const {}
};

template <typename Backend>
struct VisibleOps {
  static PackedTensors pack_slots(const Tensor& origins, const Tensor& directions, const Tensor& slots,
                                  const Tensor& counts, const Tensor& sums, double step, int64_t capacity) {
    const int64_t rays = origins.size(0), max_samples_per_ray = slots.size(1);
    check_tensor("origins", origins, {rays, 3}, ScalarType::Float, origins);
    check_tensor("directions", directions, {rays, 3}, ScalarType::Float, origins);
    check_tensor("slots", slots, {rays, max_samples_per_ray}, ScalarType::Float, origins);
    const typename Backend::Guard guard(origins);
    const Tensor starts = as_contiguous(origins), ways = as_contiguous(directions), distances = as_contiguous(slots);
    const PackedTensors out = new_packed(starts, rays, capacity);
    Backend::place_segments(
        packing_of(counts, sums, 1, std::min<int64_t>(max_samples_per_ray, kMaxSteps), out),
        SlottedSamples{starts.const_data_ptr<float>(), ways.const_data_ptr<float>(), distances.const_data_ptr<float>(),
                       max_samples_per_ray, static_cast<float>(step), SamplePointers(out)});
    return out;
  }
};

}  // namespace voxelfield
