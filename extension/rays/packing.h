// Packing the samples of rays end to end into buffers of a fixed number of rows, in two passes. The first counts the
// samples of each segment: a ray has one segment, or a few that threads walk in parallel. Consecutive segments make up
// a part, which one block of threads packs in the second pass; the sums of all parts tell each where its rows begin, so
// that no kernel is needed between the two passes.
//
// Rays are kept in order for as long as all of their samples fit. From the first ray that does not fit, none is kept.
#pragma once

#include "common/check_tensor.h"
#include "common/constants.h"

namespace voxelfield {

// The number of segments is the same power of two for all rays, up to 2^5. The length of a part is a multiple of the
// segments of 32 rays, and of 64 segments.
constexpr int kMaxSegmentsShift = 5;

struct SegmentParts {
  int64_t segments;
  int segments_shift;  // a ray has 2^segments_shift segments

  VOXELFIELD_HOST_DEVICE int64_t rays() const { return segments >> segments_shift; }
  VOXELFIELD_HOST_DEVICE int64_t length() const {
    const int64_t rays = kPartRays << segments_shift, unit = rays > kPartSegments ? rays : kPartSegments;
    const int64_t units = (segments + unit * kMaxParts - 1) / (unit * kMaxParts);
    return unit * (units > 0 ? units : 1);
  }
  // At least one, even without segments.
  VOXELFIELD_HOST_DEVICE int64_t parts() const { return segments > 0 ? (segments + length() - 1) / length() : 1; }
  VOXELFIELD_HOST_DEVICE int64_t begin(int64_t part) const { return part * length(); }
  VOXELFIELD_HOST_DEVICE int64_t end(int64_t part) const {
    return (part + 1) * length() < segments ? (part + 1) * length() : segments;
  }
};

// The counts that the second pass starts from, and its results about rays.
struct Packing {
  const int32_t* counts;  // of each segment
  const int64_t* sums;    // of each part
  int64_t max_count;      // of a segment
  int64_t max_sum;        // of a part
  SegmentParts parts;
  int64_t capacity;
  int64_t* ray_offsets;
  int64_t* rays_kept;

  VOXELFIELD_HOST_DEVICE int32_t count(int64_t segment) const {
    return static_cast<int32_t>(bounded(counts[segment], max_count));
  }
  VOXELFIELD_HOST_DEVICE int64_t sum(int64_t part) const { return bounded(sums[part], max_sum); }

 private:
  // Callers of the raw op may pass arbitrary counts, so they are clamped.
  VOXELFIELD_HOST_DEVICE static int64_t bounded(int64_t value, int64_t max_value) {
    return value < 0 ? 0 : (value < max_value ? value : max_value);
  }
};

inline int shift_of(int64_t segments_per_ray) {
  int shift = 0;
  while ((int64_t{1} << shift) < segments_per_ray) ++shift;
  STD_TORCH_CHECK(segments_per_ray == int64_t{1} << shift && shift <= kMaxSegmentsShift,
                  "segments must be a power of two, at most 32, got ", segments_per_ray);
  return shift;
}

// Packed samples: positions, t, dt, ray_index, ray_offsets, rays_kept.
using PackedTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline PackedTensors new_packed(const Tensor& like, int64_t rays, int64_t capacity) {
  STD_TORCH_CHECK(capacity >= 0, "capacity must not be negative, got ", capacity);
  return {new_empty(like, {capacity, 3}, ScalarType::Float), new_empty(like, {capacity}, ScalarType::Float),
          new_empty(like, {capacity}, ScalarType::Float),    new_empty(like, {capacity}, ScalarType::Long),
          new_empty(like, {rays + 1}, ScalarType::Long),     new_empty(like, {1}, ScalarType::Long)};
}

// One packed sample. A row that is not `known` yet is written by Samples::write_rest.
struct SampleRow {
  float position[3];
  float t, dt;
  int64_t ray;
  bool known;
};

struct SamplePointers {
  float *positions, *t, *dt;
  int64_t* ray_index;

  explicit SamplePointers(const PackedTensors& out)
      : positions(std::get<0>(out).mutable_data_ptr<float>()),
        t(std::get<1>(out).mutable_data_ptr<float>()),
        dt(std::get<2>(out).mutable_data_ptr<float>()),
        ray_index(std::get<3>(out).mutable_data_ptr<int64_t>()) {}

  VOXELFIELD_HOST_DEVICE void write(int64_t row, const SampleRow& sample) const {
    if (!sample.known) return;
    for (int axis = 0; axis < 3; ++axis) positions[3 * row + axis] = sample.position[axis];
    t[row] = sample.t;
    dt[row] = sample.dt;
    ray_index[row] = sample.ray;
  }
};

// A row without a sample: grids read zeros at a position of NaN, and compositing ignores a length of zero.
VOXELFIELD_HOST_DEVICE SampleRow empty_row(int64_t ray) { return {{NAN, NAN, NAN}, 0.0f, 0.0f, ray, true}; }

// A row that belongs to no ray. It names the last ray, so that ray_index never falls.
VOXELFIELD_HOST_DEVICE SampleRow no_sample(int64_t rays) { return empty_row(rays > 0 ? rays - 1 : 0); }

// `max_count` is the most that a segment can have.
inline Packing packing_of(const Tensor& counts, const Tensor& sums, int64_t segments_per_ray, int64_t max_count,
                          const PackedTensors& out) {
  const Tensor &t = std::get<1>(out), &ray_offsets = std::get<4>(out), &rays_kept = std::get<5>(out);
  const SegmentParts parts{(ray_offsets.size(0) - 1) * segments_per_ray, shift_of(segments_per_ray)};
  check_contiguous("counts", counts, {parts.segments}, ScalarType::Int, t);
  check_contiguous("sums", sums, {parts.parts()}, ScalarType::Long, t);
  return {counts.const_data_ptr<int32_t>(),
          sums.const_data_ptr<int64_t>(),
          max_count,
          max_count * parts.length(),
          parts,
          t.size(0),
          ray_offsets.mutable_data_ptr<int64_t>(),
          rays_kept.mutable_data_ptr<int64_t>()};
}

}  // namespace voxelfield
