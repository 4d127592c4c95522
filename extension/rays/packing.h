// Packing what rays have, end to end, into buffers of a fixed number of rows. What a first pass counted is divided into
// parts, whose sums let every part find its place in the result by itself: no kernel but the two passes is needed.
//
// Rays are taken in order for as long as all that they have fits: from the first that does not, they get nothing.
#pragma once

#include "common/check_tensor.h"
#include "common/constants.h"

namespace voxelfield {

// A ray is counted in one segment, or in a few (always the same power of two) that may be walked in parallel.
constexpr int kMostShift = 5;

struct SegmentParts {
  int64_t segments;
  int segments_shift;  // a ray has 2^segments_shift segments

  VOXELFIELD_HOST_DEVICE int64_t rays() const { return segments >> segments_shift; }
  VOXELFIELD_HOST_DEVICE int64_t length() const {
    const int64_t rays = kPartRays << segments_shift, unit = rays > kPartSegments ? rays : kPartSegments;
    const int64_t units = (segments + unit * kMaxParts - 1) / (unit * kMaxParts);
    return unit * (units > 0 ? units : 1);
  }
  // At least one.
  VOXELFIELD_HOST_DEVICE int64_t parts() const { return segments > 0 ? (segments + length() - 1) / length() : 1; }
  VOXELFIELD_HOST_DEVICE int64_t begin(int64_t part) const { return part * length(); }
  VOXELFIELD_HOST_DEVICE int64_t end(int64_t part) const {
    return (part + 1) * length() < segments ? (part + 1) * length() : segments;
  }
};

// What the second pass starts from, and its results about rays.
struct Packing {
  const int32_t* counts;  // of each segment
  const int64_t* sums;    // of each part
  int64_t most;           // that a segment can have
  int64_t most_of_part;
  SegmentParts parts;
  int64_t capacity;
  int64_t* ray_offsets;
  int64_t* rays_taken;

  VOXELFIELD_HOST_DEVICE int32_t count(int64_t segment) const {
    return static_cast<int32_t>(bounded(counts[segment], most));
  }
  VOXELFIELD_HOST_DEVICE int64_t sum(int64_t part) const { return bounded(sums[part], most_of_part); }

 private:
  // What no counting op returns might yet be handed over as if it had.
  VOXELFIELD_HOST_DEVICE static int64_t bounded(int64_t value, int64_t most) {
    return value < 0 ? 0 : (value < most ? value : most);
  }
};

inline int shift_of(int64_t segments_per_ray) {
  int shift = 0;
  while ((int64_t{1} << shift) < segments_per_ray) ++shift;
  STD_TORCH_CHECK(segments_per_ray == int64_t{1} << shift && shift <= kMostShift,
                  "segments must be a power of two, at most 32, got ", segments_per_ray);
  return shift;
}

// Packed samples: positions, t, dt, ray_index, ray_offsets, rays_taken.
using PackedTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline PackedTensors new_packed(const Tensor& like, int64_t rays, int64_t capacity) {
  STD_TORCH_CHECK(capacity >= 0, "capacity must not be negative, got ", capacity);
  return {new_empty(like, {capacity, 3}, ScalarType::Float), new_empty(like, {capacity}, ScalarType::Float),
          new_empty(like, {capacity}, ScalarType::Float),    new_empty(like, {capacity}, ScalarType::Long),
          new_empty(like, {rays + 1}, ScalarType::Long),     new_empty(like, {1}, ScalarType::Long)};
}

// One packed sample. A sample that is not `known` is written by other means.
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

// A row that holds no sample: no position that an op would look at, and no length.
VOXELFIELD_HOST_DEVICE SampleRow empty_row(int64_t ray) { return {{NAN, NAN, NAN}, 0.0f, 0.0f, ray, true}; }

// What rows that no ray has hold: the last ray, so that ray_index rises.
VOXELFIELD_HOST_DEVICE SampleRow no_sample(int64_t rays) { return empty_row(rays > 0 ? rays - 1 : 0); }

// `most` is what a segment can have.
inline Packing packing_of(const Tensor& counts, const Tensor& sums, int64_t segments_per_ray, int64_t most,
                          const PackedTensors& out) {
  const Tensor &t = std::get<1>(out), &ray_offsets = std::get<4>(out), &rays_taken = std::get<5>(out);
  const SegmentParts parts{(ray_offsets.size(0) - 1) * segments_per_ray, shift_of(segments_per_ray)};
  check_contiguous("counts", counts, {parts.segments}, ScalarType::Int, t);
  check_contiguous("sums", sums, {parts.parts()}, ScalarType::Long, t);
  return {counts.const_data_ptr<int32_t>(),
          sums.const_data_ptr<int64_t>(),
          most,
          most * parts.length(),
          parts,
          t.size(0),
          ray_offsets.mutable_data_ptr<int64_t>(),
          rays_taken.mutable_data_ptr<int64_t>()};
}

}  // namespace voxelfield
