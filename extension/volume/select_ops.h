// Host side of sample selection, written once: check, allocate, and hand over to a backend's kernels.
//   Backend::count_visible(samples, rule, parts, kept, counts, sums)
//   Backend::pack_visible(packing, samples)
#pragma once

#include "common/checks.h"
#include "rays/packed_rays.h"
#include "rays/packing.h"
#include "volume/composite.h"

namespace voxelfield {

// Finds the samples that were kept.
struct KeptSamples {
  const float *positions, *t, *dt;
  PackedRays rays;
  const int32_t* kept;  // in the rows of a ray: first the indices of its kept samples, then anything
  SamplePointers out;

  using Staged = int64_t;  // where the ray's samples begin

  VOXELFIELD_HOST_DEVICE Staged stage(int64_t ray) const { return rays[ray].begin; }

  VOXELFIELD_HOST_DEVICE SampleRow sample(Staged begin, int64_t ray, int32_t number) const {
    const int64_t source = within(begin + number) ? kept[begin + number] : -1;
    if (!within(source)) return empty_row(ray);
    SampleRow row{{}, t[source], dt[source], ray, true};
    for (int axis = 0; axis < 3; ++axis) row.position[axis] = positions[3 * source + axis];
    return row;
  }

  // The first pass remembers every sample that it kept.
  VOXELFIELD_HOST_DEVICE void write_rest(int64_t /*row*/, int64_t /*ray*/, int32_t /*count*/) const {}

 private:
  VOXELFIELD_HOST_DEVICE bool within(int64_t i) const { return i >= 0 && i < rays.samples; }
};

template <typename Backend>
struct SelectOps {
  static std::tuple<Tensor, Tensor, Tensor> count_visible_samples(const Tensor& density, const Tensor& dt,
                                                                  const Tensor& ray_offsets, double min_transmittance,
                                                                  double min_weight) {
    check_samples("density", density, dt, ray_offsets);
    check_fraction("min_transmittance", min_transmittance);
    check_fraction("min_weight", min_weight);
    const typename Backend::Guard guard(density);
    const Tensor d = as_contiguous(density), width = as_contiguous(dt), offsets = as_contiguous(ray_offsets);
    const int64_t rays = offsets.size(0) - 1;
    const SegmentParts parts{rays, 0};
    Tensor kept = new_empty(d, {d.size(0)}, ScalarType::Int);
    Tensor counts = new_empty(d, {rays}, ScalarType::Int);
    Tensor sums = new_empty(d, {parts.count}, ScalarType::Long);
    const PackedSamples<float> samples{d.const_data_ptr<float>(), width.const_data_ptr<float>(),
                                       packed_rays(offsets, d.size(0)), static_cast<float>(min_transmittance)};
    const KeepRule<float> rule{samples.min_transmittance, static_cast<float>(min_weight)};
    Backend::count_visible(samples, rule, parts, kept.mutable_data_ptr<int32_t>(), counts.mutable_data_ptr<int32_t>(),
                           sums.mutable_data_ptr<int64_t>());
    return {kept, counts, sums};
  }

  static PackedTensors pack_visible_samples(const Tensor& positions, const Tensor& t, const Tensor& dt,
                                            const Tensor& ray_offsets, const Tensor& kept, const Tensor& counts,
                                            const Tensor& sums, int64_t capacity) {
    check_samples("t", t, dt, ray_offsets);
    check_tensor("positions", positions, {t.size(0), 3}, ScalarType::Float, t);
    check_contiguous("kept", kept, {t.size(0)}, ScalarType::Int, t);
    const typename Backend::Guard guard(t);
    const Tensor p = as_contiguous(positions), distance = as_contiguous(t), width = as_contiguous(dt),
                 offsets = as_contiguous(ray_offsets);
    const PackedTensors out = new_packed(t, offsets.size(0) - 1, capacity);
    Backend::pack_visible(
        packing_of(counts, sums, 1, t.size(0), out),
        KeptSamples{p.const_data_ptr<float>(), distance.const_data_ptr<float>(), width.const_data_ptr<float>(),
                    packed_rays(offsets, t.size(0)), kept.const_data_ptr<int32_t>(), SamplePointers(out)});
    return out;
  }

  static void implement(Library& m) {
    m.impl("count_visible_samples", TORCH_BOX(&SelectOps::count_visible_samples));
    m.impl("pack_visible_samples", TORCH_BOX(&SelectOps::pack_visible_samples));
  }

 private:
  static void check_samples(const char* name, const Tensor& values, const Tensor& dt, const Tensor& ray_offsets) {
    check_tensor(name, values, {kAny}, ScalarType::Float, values);
    check_tensor("dt", dt, {values.size(0)}, ScalarType::Float, values);
    check_ray_offsets(ray_offsets, values);
    STD_TORCH_CHECK(values.size(0) < (int64_t{1} << 31), "at most 2^31 - 1 samples can be selected from, got ",
                    values.size(0));
  }
};

}  // namespace voxelfield
