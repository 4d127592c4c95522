// Host side of ray marching, written once: allocate and hand over to a backend's two kernels.
#pragma once

#include "march_rays.h"
#include "tensors.h"

namespace voxelfield {

struct RayBatch {
  const float *origins, *directions, *near, *far, *offset;
  OccupancyView grid;
  float step;
  int64_t count;

  VOXELFIELD_HOST_DEVICE RayView operator[](int64_t ray) const {
    return {origins + 3 * ray, directions + 3 * ray, near[ray], far[ray], offset[ray]};
  }
};

struct RaySamplePointers {
  float* positions;
  float* t;
  int64_t* ray_index;
};

VOXELFIELD_HOST_DEVICE void place_on_ray(const RayBatch& rays, int64_t ray, int64_t first, int64_t last,
                                         const RaySamplePointers& out) {
  const RayView view = rays[ray];
  int64_t m = first;
  march_ray(rays.grid, view, rays.step, [&](float t) {
    if (m >= last) return false;
    out.t[m] = t;
    out.ray_index[m] = ray;
    for (int axis = 0; axis < 3; ++axis) out.positions[3 * m + axis] = fmaf(t, view.direction[axis], view.origin[axis]);
    ++m;
    return true;
  });
}

VOXELFIELD_HOST_DEVICE int64_t count_on_ray(const RayBatch& rays, int64_t ray) {
  int64_t samples = 0;
  march_ray(rays.grid, rays[ray], rays.step, [&](float) {
    ++samples;
    return true;
  });
  return samples;
}

template <typename Backend>
struct MarchOps {
  static Tensor count_ray_samples(const Tensor& origins, const Tensor& directions, const Tensor& near,
                                  const Tensor& far, const Tensor& offset, const Tensor& occupied, const Tensor& aabb,
                                  double step) {
    const typename Backend::Guard guard(origins);
    const Inputs in{origins, directions, near, far, offset, occupied, aabb};
    const RayBatch rays = in.batch(step);
    Tensor counts = new_empty(in.origins, {rays.count}, ScalarType::Long);
    if (rays.count > 0) Backend::count_samples(rays, counts.mutable_data_ptr<int64_t>());
    return counts;
  }

  static std::tuple<Tensor, Tensor, Tensor> place_ray_samples(const Tensor& origins, const Tensor& directions,
                                                              const Tensor& near, const Tensor& far,
                                                              const Tensor& offset, const Tensor& occupied,
                                                              const Tensor& aabb, double step,
                                                              const Tensor& ray_offsets, int64_t count) {
    const typename Backend::Guard guard(origins);
    const Inputs in{origins, directions, near, far, offset, occupied, aabb};
    const RayBatch rays = in.batch(step);
    const Tensor bounds = as_contiguous(ray_offsets);
    Tensor positions = new_empty(in.origins, {count, 3}, ScalarType::Float);
    Tensor t = new_empty(in.origins, {count}, ScalarType::Float);
    Tensor ray_index = new_empty(in.origins, {count}, ScalarType::Long);
    if (rays.count > 0 && count > 0) {
      Backend::place_samples(
          rays, bounds.const_data_ptr<int64_t>(),
          {positions.mutable_data_ptr<float>(), t.mutable_data_ptr<float>(), ray_index.mutable_data_ptr<int64_t>()});
    }
    return {positions, t, ray_index};
  }

 private:
  // Keeps contiguous copies alive for as long as raw pointers to them are in use.
  struct Inputs {
    Tensor origins, directions, near, far, offset, occupied, aabb;

    Inputs(const Tensor& origins, const Tensor& directions, const Tensor& near, const Tensor& far, const Tensor& offset,
           const Tensor& occupied, const Tensor& aabb)
        : origins(as_contiguous(origins)),
          directions(as_contiguous(directions)),
          near(as_contiguous(near)),
          far(as_contiguous(far)),
          offset(as_contiguous(offset)),
          occupied(as_contiguous(occupied)),
          aabb(as_contiguous(aabb)) {}

    RayBatch batch(double step) const {
      return {origins.const_data_ptr<float>(),
              directions.const_data_ptr<float>(),
              near.const_data_ptr<float>(),
              far.const_data_ptr<float>(),
              offset.const_data_ptr<float>(),
              {occupied.const_data_ptr<bool>(),
               {occupied.size(0), occupied.size(1), occupied.size(2)},
               aabb.const_data_ptr<float>()},
              static_cast<float>(step),
              origins.size(0)};
    }
  };
};

}  // namespace voxelfield
