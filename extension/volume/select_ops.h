// Host side of sample selection for both backends: checks, allocates, and calls the kernels of a backend.
//   Backend::count_visible(samples, rule, parts, kept, counts, sums)
//   Backend::place_segments(packing, samples)
#pragma once

#include "rays/segments.h"
#include "volume/composite.h"

namespace voxelfield {

// Reads the samples that were kept.
struct VisibleSamples {
  const float *positions, *t, *dt;
  PackedRays rays;
  const int32_t* kept;  // in the rows of each ray: first the indices of its kept samples, then arbitrary values
  SamplePointers out;

  using Staged = int64_t;  // the first sample of the ray

  VOXELFIELD_HOST_DEVICE Staged stage(int64_t ray) const { return rays[ray].begin; }

  VOXELFIELD_HOST_DEVICE SampleRow sample(Staged begin, int64_t ray, int32_t number) const {
    const int64_t source = within(begin + number) ? kept[begin + number] : -1;
    if (!within(source)) return empty_row(ray);
    SampleRow row{{}, t[source], dt[source], ray, true};
    for (int axis = 0; axis < 3; ++axis) row.position[axis] = positions[3 * source + axis];
    return row;
  }

  // The first pass stores all samples that it keeps, so nothing remains to be written.
  VOXELFIELD_HOST_DEVICE void write_rest(int64_t /*row*/, int64_t /*ray*/, int32_t /*count*/) const {}

 private:
  VOXELFIELD_HOST_DEVICE bool within(int64_t i) const { return i >= 0 && i < rays.samples; }
};

template <typename Backend>
struct SelectOps {
  static TensorTuple<3> count_visible_samples(const Tensor& density, const Tensor& dt, const Tensor& ray_offsets,
                                              double min_transmittance, double min_weight) {
    const Inputs in = inputs("density", density, dt, ray_offsets);
    check_fraction("min_transmittance", min_transmittance);
    check_fraction("min_weight", min_weight);
    const typename Backend::Guard guard(density);
    const PackedRays rays = in.rays();
    const SegmentParts parts{rays.count, 0};
    Tensor kept = new_empty(density, {rays.samples}, ScalarType::Int);
    Tensor counts = new_empty(density, {rays.count}, ScalarType::Int);
    Tensor sums = new_empty(density, {parts.count}, ScalarType::Long);
    const CompositeRows<float> samples{data_of(in.values), data_of(in.dt), rays, static_cast<float>(min_transmittance)};
    const KeepRule<float> rule{samples.min_transmittance, static_cast<float>(min_weight)};
    Backend::count_visible(samples, rule, parts, data_of(kept), data_of(counts), data_of(sums));
    return {kept, counts, sums};
  }

  static PackedTensors pack_visible_samples(const Tensor& positions, const Tensor& t, const Tensor& dt,
                                            const Tensor& ray_offsets, const Tensor& kept, const Tensor& counts,
                                            const Tensor& sums, int64_t capacity) {
    const Inputs in = inputs("t", t, dt, ray_offsets);
    const Tensor p = checked("positions", positions, {t.size(0), 3}, ScalarType::Float, t);
    const int32_t* chosen = contiguous_data("kept", kept, {t.size(0)}, ScalarType::Int, t);
    const typename Backend::Guard guard(t);
    const PackedRays rays = in.rays();
    const PackedTensors out = new_packed(t, rays.count, capacity);
    Backend::place_segments(
        packing_of(counts, sums, 1, t.size(0), out),
        VisibleSamples{data_of(p), data_of(in.values), data_of(in.dt), rays, chosen, SamplePointers(out)});
    return out;
  }

  static void implement(Library& m) {
    m.impl("count_visible_samples", TORCH_BOX(&SelectOps::count_visible_samples));
    m.impl("pack_visible_samples", TORCH_BOX(&SelectOps::pack_visible_samples));
  }

 private:
  struct Inputs {
    Tensor values, dt, ray_offsets;

    PackedRays rays() const { return packed_rays(ray_offsets, values.size(0)); }
  };

  static Inputs inputs(const char* name, const Tensor& values, const Tensor& dt, const Tensor& ray_offsets) {
    Inputs in{checked(name, values, {kAny}, ScalarType::Float, values),
              checked("dt", dt, {values.size(0)}, ScalarType::Float, values), checked_ray_offsets(ray_offsets, values)};
    STD_TORCH_CHECK(values.size(0) < (int64_t{1} << 31), "at most 2^31 - 1 samples can be selected from, got ",
                    values.size(0));
    return in;
  }
};

}  // namespace voxelfield
