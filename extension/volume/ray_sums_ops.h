// Host side of sums over the samples of each ray and of their adjoint, written once: check, allocate, and hand over to
// a backend's kernels.
//   Backend::sum(values, rays, channels, sums)
//   Backend::spread(sums, rays, channels, values)
#pragma once

#include "rays/packed_rays.h"

namespace voxelfield {

template <typename Backend>
struct RaySumsOps {
  // (M, C) -> (R, C): the sum of each ray's rows, in order.
  static Tensor sum_along_rays(const Tensor& values, const Tensor& ray_offsets) {
    check_tensor("values", values, {kAny, kAny}, opmath_type(values), values);
    check_ray_offsets(ray_offsets, values);
    const typename Backend::Guard guard(values);
    const Tensor rows = as_contiguous(values), offsets = as_contiguous(ray_offsets);
    const PackedRays rays = packed_rays(offsets, rows.size(0));
    Tensor sums = new_empty(rows, {rays.count, rows.size(1)}, rows.scalar_type());
    if (sums.numel() > 0) {
      dispatch(rows, [&](auto zero) {
        using T = decltype(zero);
        Backend::sum(rows.const_data_ptr<T>(), rays, rows.size(1), sums.mutable_data_ptr<T>());
      });
    }
    return sums;
  }

  // (M, C) -> (M, C): the sum of the rows ahead of each, along its ray; samples of no ray get zeros.
  static Tensor exclusive_sum_along_rays(const Tensor& values, const Tensor& ray_offsets) {
    check_tensor("values", values, {kAny, kAny}, opmath_type(values), values);
    check_ray_offsets(ray_offsets, values);
    const typename Backend::Guard guard(values);
    const Tensor rows = as_contiguous(values), offsets = as_contiguous(ray_offsets);
    const PackedRays rays = packed_rays(offsets, rows.size(0));
    Tensor sums = new_zeros(rows, {rows.size(0), rows.size(1)}, rows.scalar_type());
    if (sums.numel() > 0 && rays.count > 0) {
      dispatch(rows, [&](auto zero) {
        using T = decltype(zero);
        Backend::exclusive_sum(rows.const_data_ptr<T>(), rays, rows.size(1), sums.mutable_data_ptr<T>());
      });
    }
    return sums;
  }

  // (R, C) -> (M, C): each sample's row is that of its ray; samples of no ray get zeros.
  static Tensor spread_along_rays(const Tensor& values, const Tensor& ray_offsets, int64_t samples) {
    check_ray_offsets(ray_offsets, values);
    check_tensor("values", values, {ray_offsets.size(0) - 1, kAny}, opmath_type(values), values);
    STD_TORCH_CHECK(samples >= 0, "samples must not be negative, got ", samples);
    const typename Backend::Guard guard(values);
    const Tensor rows = as_contiguous(values), offsets = as_contiguous(ray_offsets);
    const PackedRays rays = packed_rays(offsets, samples);
    Tensor spread = new_empty(rows, {samples, rows.size(1)}, rows.scalar_type());
    if (spread.numel() > 0) {
      dispatch(rows, [&](auto zero) {
        using T = decltype(zero);
        Backend::spread(rows.const_data_ptr<T>(), rays, rows.size(1), spread.mutable_data_ptr<T>());
      });
    }
    return spread;
  }

 private:
  template <typename F>
  static void dispatch(const Tensor& like, const F& f) {
    like.scalar_type() == ScalarType::Double ? f(double{}) : f(float{});
  }
};

}  // namespace voxelfield
