// Host side of sums over the samples of each ray and of their adjoint, written once for both backends: check, allocate,
// and walk the rays.
#pragma once

#include "rays/check_rays.h"
#include "volume/ray_sums.h"

namespace voxelfield {

template <typename Backend>
struct RaySumsOps {
  // (M, C) -> (R, C): the sum of each ray's rows, in order.
  static Tensor sum_along_rays(const Tensor& values, const Tensor& ray_offsets) {
    check(values, ray_offsets, false);
    return walk<TotalSums>(values, ray_offsets, values.size(0), ray_offsets.size(0) - 1);
  }

  // (M, C) -> (M, C): the sum of the rows ahead of each, along its ray; samples of no ray get zeros.
  static Tensor exclusive_sum_along_rays(const Tensor& values, const Tensor& ray_offsets) {
    check(values, ray_offsets, false);
    return walk<SumsAhead>(values, ray_offsets, values.size(0), values.size(0));
  }

  // (R, C) -> (M, C): each sample's row is that of its ray; samples of no ray get zeros.
  static Tensor spread_along_rays(const Tensor& values, const Tensor& ray_offsets, int64_t samples) {
    check(values, ray_offsets, true);
    STD_TORCH_CHECK(samples >= 0, "samples must not be negative, got ", samples);
    return walk<RaySpread>(values, ray_offsets, samples, samples);
  }

  static void implement(Library& m) {
    m.impl("sum_along_rays", TORCH_BOX(&RaySumsOps::sum_along_rays));
    m.impl("exclusive_sum_along_rays", TORCH_BOX(&RaySumsOps::exclusive_sum_along_rays));
    m.impl("spread_along_rays", TORCH_BOX(&RaySumsOps::spread_along_rays));
  }

 private:
  static void check(const Tensor& values, const Tensor& ray_offsets, bool of_rays) {
    check_ray_offsets(ray_offsets, values);
    check_tensor("values", values, {of_rays ? ray_offsets.size(0) - 1 : kAny, kAny}, opmath_type(values), values);
  }

  // Returns the results of Walk, so many rows of them.
  template <template <typename> class Walk>
  static Tensor walk(const Tensor& values, const Tensor& ray_offsets, int64_t samples, int64_t rows) {
    const typename Backend::Guard guard(values);
    const Tensor from = as_contiguous(values), offsets = as_contiguous(ray_offsets);
    Tensor results = new_empty(values, {rows, values.size(1)}, values.scalar_type());
    if (results.numel() == 0) return results;
    dispatch_opmath(values, [&](auto zero) {
      using T = decltype(zero);
      Backend::for_each_ray(packed_rays(offsets, samples),
                            Walk<T>{from.const_data_ptr<T>(), values.size(1), results.mutable_data_ptr<T>()});
    });
    return results;
  }
};

}  // namespace voxelfield
