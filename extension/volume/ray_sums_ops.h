// Sums over the samples of each ray and their adjoint, for both backends. The order of summation is fixed, so every run
// returns the same bits.
#pragma once

#include "rays/packing.h"

namespace voxelfield {

// Computes the sum of the rows of each ray, or for each sample the sum of the rows before it.
template <bool Ahead, typename T>
struct RaySums {
  const T* values;
  int64_t channels;
  T* sums;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    for (int64_t c = 0; Ahead && c < channels; ++c) sums[i * channels + c] = 0;
  }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Team& team) const {
    // A single thread sums several channels per pass, because they are adjacent in memory.
    constexpr int kColumns = Team::kSize > 1 ? 1 : Ahead ? 8 : 16;
    for (int64_t c = 0; c < channels; c += kColumns) {
      T sum[kColumns] = {};
      for (int64_t i = span.begin + team.seat; Ahead ? team.any(i < span.end) : i < span.end; i += Team::kSize) {
        for (int k = 0; k < kColumns && c + k < channels; ++k) {
          const T value = !Ahead || i < span.end ? values[i * channels + c + k] : T(0);
          if constexpr (Ahead) {
            const auto scan = team(value);
            const T before = scan.before();
            if (i < span.end) sums[i * channels + c + k] = sum[k] + before;
            sum[k] += scan.total();
          } else {
            sum[k] += value;
          }
        }
      }
      for (int k = 0; !Ahead && k < kColumns && c + k < channels; ++k) {
        const T total = team.sum(sum[k]);
        if (team.leads) sums[ray * channels + c + k] = total;
      }
    }
    return span.end;
  }
};

template <typename T>
using TotalSums = RaySums<false, T>;

template <typename T>
using SumsAhead = RaySums<true, T>;

// Copies the row of a ray to each of its samples.
template <typename T>
struct RaySpread {
  const T* sums;
  int64_t channels;
  T* values;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    for (int64_t c = 0; c < channels; ++c) values[i * channels + c] = 0;
  }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Team& team) const {
    if constexpr (Team::kSize == 1) {
      for (int64_t i = span.begin; i < span.end; ++i) {
        for (int64_t c = 0; c < channels; ++c) values[i * channels + c] = sums[ray * channels + c];
      }
    } else {
      const int64_t step = Team::kSize % channels;
      int64_t c = team.seat % channels;
      for (int64_t k = span.begin * channels + team.seat; k < span.end * channels; k += Team::kSize) {
        values[k] = sums[ray * channels + c];
        c += step;
        if (c >= channels) c -= channels;
      }
    }
    return span.end;
  }
};

template <typename Backend>
struct RaySumsOps {
  // (M, C) -> (R, C): the sum of the rows of each ray, in order.
  static Tensor sum_along_rays(const Tensor& values, const Tensor& ray_offsets) {
    return walk<TotalSums>(values, ray_offsets, std::nullopt, false);
  }

  // (M, C) -> (M, C): for each sample, the sum of the rows before it on its ray. Samples of no ray get zeros.
  static Tensor exclusive_sum_along_rays(const Tensor& values, const Tensor& ray_offsets) {
    return walk<SumsAhead>(values, ray_offsets, std::nullopt, true);
  }

  // (R, C) -> (M, C): for each sample, the row of its ray. Samples of no ray get zeros.
  static Tensor spread_along_rays(const Tensor& values, const Tensor& ray_offsets, int64_t samples) {
    STD_TORCH_CHECK(samples >= 0, "samples must not be negative, got ", samples);
    return walk<RaySpread>(values, ray_offsets, samples, true);
  }

  static void implement(Library& m) {
    m.impl("sum_along_rays", TORCH_BOX(&RaySumsOps::sum_along_rays));
    m.impl("exclusive_sum_along_rays", TORCH_BOX(&RaySumsOps::exclusive_sum_along_rays));
    m.impl("spread_along_rays", TORCH_BOX(&RaySumsOps::spread_along_rays));
  }

 private:
  // Returns the results of Walk, one row per sample or per ray. `values` has one row per sample, or one row per ray if
  // `samples` is given.
  template <template <typename> class Walk>
  static Tensor walk(const Tensor& values, const Tensor& ray_offsets, std::optional<int64_t> samples, bool of_samples) {
    const Tensor offsets = checked_ray_offsets(ray_offsets, values);
    const int64_t rays = offsets.size(0) - 1;
    const Tensor from =
        checked("values", values, {samples.has_value() ? rays : kAny, kAny}, opmath_type(values), values);
    const typename Backend::Guard guard(values);
    const PackedRays packed = packed_rays(offsets, samples.value_or(from.size(0)));
    Tensor results = new_like(values, {of_samples ? packed.samples : rays, values.size(1)});
    if (results.numel() == 0) return results;
    dispatch_opmath(values, [&](auto zero) {
      Backend::for_each_ray(packed, Walk<decltype(zero)>{data_of(from), values.size(1), data_of(results)});
    });
    return results;
  }
};

}  // namespace voxelfield
