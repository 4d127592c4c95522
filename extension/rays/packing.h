// Packs the samples of all rays contiguously into buffers of a fixed number of rows, in two passes. The first pass
// counts the samples of each segment. A ray is one segment, or a few segments that different threads walk in parallel.
// Consecutive segments form a part, and one block of threads packs a part in the second pass. Each block computes the
// first row of its part from the sums of all parts, so no kernel is needed between the two passes.
//
// Rays are kept in order as long as all of their samples fit. From the first ray that does not fit, no further ray is
// kept.
#pragma once

#include "common/backend.h"
#include "common/checks.h"
#include "common/constants.h"

namespace voxelfield {

// Callers of the raw ops may pass arbitrary offsets and counts. They are not checked on CUDA, because that would
// synchronise, so they are clamped when they are read.
VOXELFIELD_HOST_DEVICE int64_t bounded(int64_t value, int64_t max_value) {
  return value < 0 ? 0 : (value < max_value ? value : max_value);
}

// The rows of packed samples that belong to a ray. They never exceed the samples, whatever the offsets are.
struct RaySpan {
  int64_t begin = 0, end = 0;
};

struct PackedRays {
  const int64_t* offsets;  // (count + 1,)
  int64_t count;
  int64_t samples;

  // A ray has no samples if its end lies before its begin, or if it lies after the last ray.
  VOXELFIELD_HOST_DEVICE RaySpan operator[](int64_t ray) const {
    if (ray >= count) return {};
    const int64_t begin = bounded(offsets[ray], samples), end = bounded(offsets[ray + 1], samples);
    return {begin, end > begin ? end : begin};
  }

  // Rows that belong to no ray.
  VOXELFIELD_HOST_DEVICE RaySpan before() const { return {0, bounded(offsets[0], samples)}; }
  VOXELFIELD_HOST_DEVICE RaySpan behind() const { return {bounded(offsets[count], samples), samples}; }
};

inline Tensor checked_ray_offsets(const Tensor& ray_offsets, const Tensor& like) {
  const Tensor offsets = checked("ray_offsets", ray_offsets, {kAny}, ScalarType::Long, like);
  STD_TORCH_CHECK(offsets.size(0) > 0, "ray_offsets must have R + 1 entries, at least one, got none");
  return offsets;
}

inline PackedRays packed_rays(const Tensor& ray_offsets, int64_t samples) {
  return {data_of(ray_offsets), ray_offsets.size(0) - 1, samples};
}

// All rays have the same number of segments, a power of two up to 2^5. The length of a part is a multiple of the
// segments of 32 rays, and of 64 segments.
constexpr int kMaxSegmentsShift = 5;

struct SegmentParts {
  int64_t segments;
  int segments_shift;  // a ray has 2^segments_shift segments
  int64_t length;      // segments per part
  int64_t count;       // number of parts: at least one, even without segments

  SegmentParts(int64_t segments, int segments_shift) : segments(segments), segments_shift(segments_shift) {
    const int64_t unit = std::max(kPartRays << segments_shift, kPartSegments);
    length = unit * std::max<int64_t>((segments + unit * kMaxParts - 1) / (unit * kMaxParts), 1);
    count = std::max<int64_t>((segments + length - 1) / length, 1);
  }

  VOXELFIELD_HOST_DEVICE int64_t rays() const { return segments >> segments_shift; }
  VOXELFIELD_HOST_DEVICE int64_t first(int64_t ray) const { return ray << segments_shift; }
  VOXELFIELD_HOST_DEVICE int64_t begin(int64_t part) const { return part * length; }
  VOXELFIELD_HOST_DEVICE int64_t end(int64_t part) const {
    return (part + 1) * length < segments ? (part + 1) * length : segments;
  }
};

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

inline int shift_of(int64_t segments_per_ray) {
  int shift = 0;
  while ((int64_t{1} << shift) < segments_per_ray) ++shift;
  STD_TORCH_CHECK(segments_per_ray == int64_t{1} << shift && shift <= kMaxSegmentsShift,
                  "segments_per_ray must be a power of two, at most 32, got ", segments_per_ray);
  return shift;
}

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

// Checks and collects the inputs of the second pass. No segment has more than `max_count` samples.
inline Packing packing_of(const Tensor& counts, const Tensor& sums, int64_t segments_per_ray, int64_t max_count,
                          const PackedTensors& out) {
  const Tensor &t = std::get<1>(out), &ray_offsets = std::get<4>(out), &rays_kept = std::get<5>(out);
  const SegmentParts parts{(ray_offsets.size(0) - 1) * segments_per_ray, shift_of(segments_per_ray)};
  return {check_contiguous("counts", counts, {parts.segments}, ScalarType::Int, t),
          check_contiguous("sums", sums, {parts.count}, ScalarType::Long, t),
          max_count,
          max_count * parts.length,
          parts,
          t.size(0),
          data_of(ray_offsets),
          data_of(rays_kept)};
}

// Counts the samples of each segment of a part, and returns their sum.
template <typename Count>
VOXELFIELD_MULTIVERSION int64_t count_part(const SegmentParts& parts, int64_t part, int32_t* counts,
                                           const Count& count) {
  int64_t sum = 0;
  for (int64_t segment = parts.begin(part); segment < parts.end(part); ++segment) {
    counts[segment] = count(segment);
    sum += counts[segment];
  }
  return sum;
}

// Writes the rows of a ray.
template <typename Samples>
struct PlaceRay {
  const Packing& packing;
  const Samples& samples;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t ray) const {
    int64_t row = packing.ray_offsets[ray];
    for (int64_t segment = packing.parts.first(ray); segment < packing.parts.first(ray + 1); ++segment) {
      const int32_t count = packing.count(segment);
      if (count == 0) continue;
      const auto staged = samples.stage(segment);
      for (int32_t number = 0; number < count; ++number) {
        samples.out.write(row + number, samples.sample(staged, segment, number));
      }
      samples.write_rest(row, segment, count);
      row += count;
    }
  }
};

// On the CPU, parts are counted in parallel, and one loop over all counts runs between the passes.
struct CpuPacking : CpuBackend {
  // First pass: calls count(segment) for every segment, and sums the counts of each part.
  template <typename Count>
  static void count_segments(const SegmentParts& parts, int32_t* counts, int64_t* sums, const Count& count) {
    for_each_task(parts.count,
                  [&](int64_t part, int64_t /*thread*/) { sums[part] = count_part(parts, part, counts, count); });
  }

  // Second pass: writes every row. The rows of rays come from samples.sample and write_rest, and all other rows are
  // marked as rows of no ray.
  template <typename Samples>
  static void place_segments(const Packing& packing, const Samples& samples) {
    keep_rays(packing);
    const int64_t rays = packing.parts.rays(), used = packing.ray_offsets[rays];
    for_each(*packing.rays_kept, PlaceRay<Samples>{packing, samples}, 64);
    for_each(packing.capacity - used, [&](int64_t row) { samples.out.write(used + row, no_sample(rays)); }, 1 << 14);
  }

 private:
  // Writes ray_offsets and rays_kept.
  static void keep_rays(const Packing& packing) {
    int64_t used = 0, kept = 0;
    bool fits = true;
    packing.ray_offsets[0] = 0;
    for (int64_t ray = 0; ray < packing.parts.rays(); ++ray) {
      const int64_t samples = packing.count_of_ray(ray);
      fits = fits && used + samples <= packing.capacity;
      if (fits) {
        used += samples;
        ++kept;
      }
      packing.ray_offsets[ray + 1] = used;
    }
    *packing.rays_kept = kept;
  }
};

}  // namespace voxelfield
