// Host side of sample selection, written once: allocate and hand over to a backend's kernels.
#pragma once

#include "composite.h"
#include "packing.h"

namespace voxelfield {

// Finds the samples that were kept.
struct KeptSamples {
  const float *positions, *t, *dt;
  const int64_t* ray_offsets;
  const int32_t* kept;  // where a ray's samples are, the indices of those that were kept come first
  SamplePointers out;

  using Staged = int64_t;  // where the ray's samples begin

  VOXELFIELD_HOST_DEVICE Staged stage(int64_t ray) const { return ray_offsets[ray]; }

  VOXELFIELD_HOST_DEVICE SampleRow sample(Staged begin, int64_t ray, int32_t number) const {
    const int64_t source = kept[begin + number];
    return {{positions[3 * source], positions[3 * source + 1], positions[3 * source + 2]},
            t[source],
            dt[source],
            ray,
            true};
  }

  // All are remembered.
  VOXELFIELD_HOST_DEVICE void write_rest(int64_t /*row*/, int64_t /*ray*/, int32_t /*count*/) const {}
};

template <typename Backend>
struct SelectOps {
  static std::tuple<Tensor, Tensor, Tensor> count_visible_samples(const Tensor& density, const Tensor& dt,
                                                                  const Tensor& ray_offsets, double min_transmittance,
                                                                  double min_weight) {
    check_samples(density, dt, ray_offsets);
    const typename Backend::Guard guard(density);
    const Tensor d = as_contiguous(density), width = as_contiguous(dt), offsets = as_contiguous(ray_offsets);
    const int64_t rays = offsets.size(0) - 1;
    const SegmentParts parts{rays, 0};
    Tensor kept = new_empty(d, {d.size(0)}, ScalarType::Int);
    Tensor counts = new_empty(d, {rays}, ScalarType::Int);
    Tensor sums = new_empty(d, {parts.parts()}, ScalarType::Long);
    const PackedSamples<float> samples{
        d.const_data_ptr<float>(),         nullptr, nullptr,   width.const_data_ptr<float>(),
        offsets.const_data_ptr<int64_t>(), rays,    d.size(0), static_cast<float>(min_transmittance)};
    Backend::count_visible(samples, static_cast<float>(min_weight), parts, kept.mutable_data_ptr<int32_t>(),
                           counts.mutable_data_ptr<int32_t>(), sums.mutable_data_ptr<int64_t>());
    return {kept, counts, sums};
  }

  static PackedTensors pack_visible_samples(const Tensor& positions, const Tensor& t, const Tensor& dt,
                                            const Tensor& ray_offsets, const Tensor& kept, const Tensor& counts,
                                            const Tensor& sums, int64_t capacity) {
    check_samples(t, dt, ray_offsets);
    STD_TORCH_CHECK(positions.dim() == 2 && positions.size(0) == t.size(0) && positions.size(1) == 3 &&
                        positions.scalar_type() == ScalarType::Float,
                    "positions must be (M, 3) float32");
    STD_TORCH_CHECK(
        kept.dim() == 1 && kept.size(0) == t.size(0) && kept.scalar_type() == ScalarType::Int && kept.is_contiguous(),
        "kept must be what count_visible_samples returned");
    const typename Backend::Guard guard(t);
    const Tensor p = as_contiguous(positions), distance = as_contiguous(t), width = as_contiguous(dt),
                 offsets = as_contiguous(ray_offsets);
    const PackedTensors out = new_packed(t, offsets.size(0) - 1, capacity);
    Backend::pack_visible(
        packing_of(counts, sums, 1, out),
        KeptSamples{p.const_data_ptr<float>(), distance.const_data_ptr<float>(), width.const_data_ptr<float>(),
                    offsets.const_data_ptr<int64_t>(), kept.const_data_ptr<int32_t>(), SamplePointers(out)});
    return out;
  }

 private:
  static void check_samples(const Tensor& values, const Tensor& dt, const Tensor& ray_offsets) {
    STD_TORCH_CHECK(values.dim() == 1 && dt.dim() == 1 && dt.size(0) == values.size(0) && ray_offsets.dim() == 1 &&
                        ray_offsets.size(0) > 0 && values.scalar_type() == ScalarType::Float &&
                        dt.scalar_type() == ScalarType::Float && ray_offsets.scalar_type() == ScalarType::Long,
                    "samples must be (M,) float32 and ray_offsets (R + 1,) int64");
    STD_TORCH_CHECK(values.size(0) < (int64_t{1} << 31), "at most 2^31 - 1 samples can be selected from, got ",
                    values.size(0));
  }
};

}  // namespace voxelfield
