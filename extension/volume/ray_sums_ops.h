// Sums and scans over the samples of each ray and their adjoints, for both backends. The order of summation is fixed,
// so every run returns the same bits.
#pragma once

#include "rays/packed_rays.h"

namespace voxelfield {

// The sum of the rows of each ray.
template <typename T>
struct RayTotal {
  const T* values;
  int64_t channels;
  T* sums;

  VOXELFIELD_HOST_DEVICE void clear(int64_t /*i*/) const {}

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Team& team) const {
    // A single thread sums several channels per pass, because they are adjacent in memory.
    constexpr int kColumns = Team::kSize > 1 ? 1 : 16;
    for (int64_t c = 0; c < channels; c += kColumns) {
      T sum[kColumns] = {};
      for (int64_t i = span.begin + team.seat; i < span.end; i += Team::kSize) {
        for (int k = 0; k < kColumns && c + k < channels; ++k) sum[k] += values[i * channels + c + k];
      }
      for (int k = 0; k < kColumns && c + k < channels; ++k) {
        const T total = team.sum(sum[k]);
        if (team.leads) sums[ray * channels + c + k] = total;
      }
    }
    return span.end;
  }
};

// y = factor x + value, where the factor of a sum is 1, and the value of a product is 0.
template <bool Values, bool Factors, typename T>
struct AffineMap {
  T factor = 1, value = 0;

  VOXELFIELD_HOST_DEVICE T operator()(T x) const {
    const T scaled = Factors ? factor * x : x;
    return Values ? scaled + value : scaled;
  }

  // This map, applied after those of the threads of the team that come before.
  template <typename Team>
  VOXELFIELD_HOST_DEVICE AffineMap after_threads_before(const Team& team) const {
    AffineMap through = *this;
    for (int step = 1; step < Team::kSize; step *= 2) {
      const AffineMap ahead = through.moved_up(team, step);
      if (team.seat >= step) through = {through.factor * ahead.factor, through(ahead.value)};
    }
    return through;
  }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE AffineMap of_thread_before(const Team& team) const {
    const AffineMap ahead = moved_up(team, 1);
    return team.seat > 0 ? ahead : AffineMap{};
  }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE AffineMap of_last_thread(const Team& team) const {
    return {Factors ? team.last(factor) : T(1), Values ? team.last(value) : T(0)};
  }

 private:
  template <typename Team>
  VOXELFIELD_HOST_DEVICE AffineMap moved_up(const Team& team, int step) const {
    return {Factors ? team.moved_up(factor, step) : T(1), Values ? team.moved_up(value, step) : T(0)};
  }
};

// Which numbers a scan returns; the values are part of the schema of scan_along_rays.
enum class ScanForm : int64_t { kExclusive = 0, kInclusive = 1, kTransposed = 2, kCount };

// The recurrence y_i = values_i + factors_i y_{i-1} over the rows of each ray, which is a prefix sum without factors
// and a prefix product without values. The three forms are y_{i-1}, y_i, and values_i + factors_{i-1} y_{i-1} (with y
// of this form): the third one, in the other direction, is the adjoint of the second.
template <bool Values, bool Factors, typename T>
struct RayScan {
  const T *values, *factors;
  int64_t channels;
  ScanForm form;
  bool reverse;
  T* results;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    for (int64_t c = 0; c < channels; ++c) results[i * channels + c] = 0;
  }

  template <typename Team>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t /*ray*/, const RaySpan& span, const Team& team) const {
    constexpr int kColumns = Team::kSize > 1 ? 1 : 8;
    const int64_t count = span.end - span.begin;
    for (int64_t c = 0; c < channels; c += kColumns) {
      T carry[kColumns];
      for (int k = 0; k < kColumns; ++k) carry[k] = Values ? T(0) : T(1);
      for (int64_t first = 0; team.any(first < count); first += Team::kSize) {
        const int64_t place = first + team.seat;
        const bool exists = place < count;
        const int64_t row = (reverse ? span.end - 1 - place : span.begin + place) * channels + c;
        for (int k = 0; k < kColumns && c + k < channels; ++k) {
          const T value = Values && exists ? values[row + k] : T(0);
          const T factor = Factors && exists ? factors[row + k] : T(1);
          const bool scales_value = Values && Factors && form == ScanForm::kTransposed;
          const AffineMap<Values, Factors, T> own{factor, scales_value ? factor * value : value};
          const auto through = own.after_threads_before(team);
          const T before = through.of_thread_before(team)(carry[k]);
          if (exists) {
            results[row + k] = form == ScanForm::kExclusive   ? before
                               : form == ScanForm::kInclusive ? own(before)
                                                              : value + before;
          }
          carry[k] = through.of_last_thread(team)(carry[k]);
        }
      }
    }
    return span.end;
  }
};

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
  static Tensor sum_along_rays(const Tensor& values, const Tensor& ray_offsets) {
    return walk<RayTotal>(values, ray_offsets, std::nullopt, false);
  }

  // (M, C) -> (M, C): RayScan, from the first sample of each ray or in reverse. Samples of no ray get zeros.
  static Tensor scan_along_rays(const OptionalTensor& values, const OptionalTensor& factors, const Tensor& ray_offsets,
                                int64_t form, bool reverse) {
    STD_TORCH_CHECK(values.has_value() || factors.has_value(), "values or factors must be given");
    STD_TORCH_CHECK(form >= 0 && form < static_cast<int64_t>(ScanForm::kCount), "form must be 0, 1 or 2, got ", form);
    const Tensor& like = values.has_value() ? *values : *factors;
    const Tensor offsets = checked_ray_offsets(ray_offsets, like);
    const OptionalTensor rows = checked("values", values, {kAny, kAny}, opmath_type(like), like);
    const OptionalTensor scales =
        checked("factors", factors, {like.size(0), values.has_value() ? like.size(1) : kAny}, opmath_type(like), like);
    const typename Backend::Guard guard(like);
    Tensor results = new_like(like, {like.size(0), like.size(1)});
    if (results.numel() == 0) return results;
    dispatch_opmath(like, [&](auto zero) {
      const auto scan = [&](auto sums, auto multiplies) {
        using Scan = RayScan<decltype(sums)::value, decltype(multiplies)::value, decltype(zero)>;
        Backend::for_each_ray(
            packed_rays(offsets, like.size(0)),
            Scan{data_of(rows), data_of(scales), like.size(1), static_cast<ScanForm>(form), reverse, data_of(results)});
      };
      if (!factors.has_value()) return scan(std::true_type{}, std::false_type{});
      dispatch_flag(values.has_value(), [&](auto sums) { scan(sums, std::true_type{}); });
    });
    return results;
  }

  // (R, C) -> (M, C): for each sample, the row of its ray. Samples of no ray get zeros.
  static Tensor spread_along_rays(const Tensor& values, const Tensor& ray_offsets, int64_t samples) {
    STD_TORCH_CHECK(samples >= 0, "samples must not be negative, got ", samples);
    return walk<RaySpread>(values, ray_offsets, samples, true);
  }

  static void implement(Library& m) {
    m.impl("sum_along_rays", TORCH_BOX(&RaySumsOps::sum_along_rays));
    m.impl("scan_along_rays", TORCH_BOX(&RaySumsOps::scan_along_rays));
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
