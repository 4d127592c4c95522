// Packs the samples of all rays contiguously into buffers of a fixed number of rows, in two passes. The first pass
// counts the samples of each segment. A ray is one segment, or a few segments that different threads walk in parallel.
// Consecutive segments form a part, and one block of threads packs a part in the second pass. Each block computes the
// first row of its part from the sums of all parts, so no kernel is needed between the two passes.
//
// Rays are kept in order as long as all of their samples fit. From the first ray that does not fit, no further ray is
// kept.
#pragma once

#include <cmath>

#include "common/constants.h"
#include "rays/packed_rays.h"

namespace voxelfield {

// All rays have the same number of segments, a power of two up to 2^5. The length of a part is a multiple of the
// segments of 32 rays, and of 64 segments.
constexpr int kMaxSegmentsShift = 5;

struct SegmentParts {
  int64_t segments;
  int segments_shift;  // a ray has 2^segments_shift segments
  int64_t length;      // segments per part
  int64_t count;       // number of parts: at least one, even without segments

  SegmentParts(int64_t segments, int segments_shift) : segments(segments), segments_shift(segments_shift) {
    const int64_t multiple = std::max(kPartRays << segments_shift, kPartSegments);
    length = multiple * std::max<int64_t>((segments + multiple * kMaxParts - 1) / (multiple * kMaxParts), 1);
    count = std::max<int64_t>((segments + length - 1) / length, 1);
  }

  VOXELFIELD_HOST_DEVICE int64_t rays() const { return segments >> segments_shift; }
  VOXELFIELD_HOST_DEVICE int64_t first(int64_t ray) const { return ray << segments_shift; }
  VOXELFIELD_HOST_DEVICE int64_t begin(int64_t part) const { return part * length; }
  VOXELFIELD_HOST_DEVICE int64_t end(int64_t part) const {
    return (part + 1) * length < segments ? (part + 1) * length : segments;
  }
};

// Packed samples: positions, t, dt, ray_index, ray_offsets, rays_kept.
using PackedTensors = TensorTuple<6>;

inline PackedTensors new_packed(const Tensor& like, int64_t rays, int64_t capacity) {
  STD_TORCH_CHECK(capacity >= 0, "capacity must not be negative, got ", capacity);
  return {new_empty(like, {capacity, 3}, ScalarType::Float), new_empty(like, {capacity}, ScalarType::Float),
          new_empty(like, {capacity}, ScalarType::Float),    new_empty(like, {capacity}, ScalarType::Long),
          new_empty(like, {rays + 1}, ScalarType::Long),     new_empty(like, {1}, ScalarType::Long)};
}

// One packed sample. A row that is not yet `known` is written by Samples::write_rest.
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
      : positions(data_of(std::get<0>(out))),
        t(data_of(std::get<1>(out))),
        dt(data_of(std::get<2>(out))),
        ray_index(data_of(std::get<3>(out))) {}

  VOXELFIELD_HOST_DEVICE void write(int64_t row, const SampleRow& sample) const {
    if (!sample.known) return;
    for (int axis = 0; axis < 3; ++axis) positions[3 * row + axis] = sample.position[axis];
    t[row] = sample.t;
    dt[row] = sample.dt;
    ray_index[row] = sample.ray;
  }
};

// Returns a row without a sample. At a position of NaN, grids read zeros, and compositing ignores a sample of length
// zero.
VOXELFIELD_HOST_DEVICE SampleRow empty_row(int64_t ray) { return {{NAN, NAN, NAN}, 0.0f, 0.0f, ray, true}; }

// Returns a row that belongs to no ray. It has the index of the last ray, so that ray_index never decreases.
VOXELFIELD_HOST_DEVICE SampleRow no_sample(int64_t rays) { return empty_row(rays > 0 ? rays - 1 : 0); }

// The counts from which the second pass starts, and its results for the rays.
struct Packing {
  const int32_t* counts;  // per segment
  const int64_t* sums;    // per part
  int64_t max_count;      // per segment
  int64_t max_sum;        // per part
  SegmentParts parts;
  int64_t capacity;
  int64_t* ray_offsets;
  int64_t* rays_kept;

  VOXELFIELD_HOST_DEVICE int32_t count(int64_t segment) const {
    return static_cast<int32_t>(bounded(counts[segment], max_count));
  }
  VOXELFIELD_HOST_DEVICE int64_t sum(int64_t part) const { return bounded(sums[part], max_sum); }

  VOXELFIELD_HOST_DEVICE int64_t count_of_ray(int64_t ray) const {
    int64_t samples = 0;
    for (int64_t segment = parts.first(ray); segment < parts.first(ray + 1); ++segment) samples += count(segment);
    return samples;
  }
};

inline int log2_exact(int64_t segments_per_ray) {
  int shift = 0;
  while ((int64_t{1} << shift) < segments_per_ray) ++shift;
  STD_TORCH_CHECK(segments_per_ray == int64_t{1} << shift && shift <= kMaxSegmentsShift,
                  "segments_per_ray must be a power of two, at most 32, got ", segments_per_ray);
  return shift;
}

// Checks and collects the inputs of the second pass. No segment has more than `max_count` samples.
inline Packing packing_of(const Tensor& counts, const Tensor& sums, int64_t segments_per_ray, int64_t max_count,
                          const PackedTensors& out) {
  const Tensor &t = std::get<1>(out), &ray_offsets = std::get<4>(out), &rays_kept = std::get<5>(out);
  const SegmentParts parts{(ray_offsets.size(0) - 1) * segments_per_ray, log2_exact(segments_per_ray)};
  return {contiguous_data("counts", counts, {parts.segments}, ScalarType::Int, t),
          contiguous_data("sums", sums, {parts.count}, ScalarType::Long, t),
          max_count,
          max_count * parts.length,
          parts,
          t.size(0),
          data_of(ray_offsets),
          data_of(rays_kept)};
}

}  // namespace voxelfield
