// Packing the samples of rays end to end into buffers of a fixed number of rows, in two passes. The first counts the
// samples of each segment of a ray: a ray is one segment, or a few that threads walk in parallel. Consecutive segments
// make up a part, which one block of threads packs in the second pass; the sums of all parts tell each where its rows
// begin, so that no kernel is needed between the two passes.
//
// Rays are kept in order for as long as all of their samples fit. From the first ray that does not fit, none is kept.
#pragma once

#include "common/backend.h"
#include "common/checks.h"
#include "common/constants.h"

namespace voxelfield {

// Offsets and counts that callers of raw ops pass are not checked on CUDA, because that would synchronise. They are
// clamped where they are read.
VOXELFIELD_HOST_DEVICE int64_t bounded(int64_t value, int64_t max_value) {
  return value < 0 ? 0 : (value < max_value ? value : max_value);
}

// The rows of packed samples that a ray has. Whatever its offsets say, no ray reaches beyond the samples.
struct RaySpan {
  int64_t begin = 0, end = 0;
};

struct PackedRays {
  const int64_t* offsets;  // (count + 1,)
  int64_t count;
  int64_t samples;

  // A ray whose end lies before its begin has no samples, and neither has one past the last.
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

// The number of segments is the same power of two for all rays, up to 2^5. The length of a part is a multiple of the
// segments of 32 rays, and of 64 segments.
constexpr int kMaxSegmentsShift = 5;

struct SegmentParts {
  int64_t segments;
  int segments_shift;  // a ray has 2^segments_shift segments
  int64_t length;      // of a part, in segments
  int64_t count;       // of parts: at least one, even without segments

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

// A row without a sample: grids read zeros at a position of NaN, and compositing ignores a length of zero.
VOXELFIELD_HOST_DEVICE SampleRow empty_row(int64_t ray) { return {{NAN, NAN, NAN}, 0.0f, 0.0f, ray, true}; }

// A row that belongs to no ray. It names the last ray, so that ray_index never falls.
VOXELFIELD_HOST_DEVICE SampleRow no_sample(int64_t rays) { return empty_row(rays > 0 ? rays - 1 : 0); }

// No segment has more than `max_count` samples.
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

// On the CPU parts are counted in parallel, and one loop over all counts lies between the passes.
struct CpuPacking : CpuBackend {
  // First pass: count(segment) for every segment, and the sums of each part.
  template <typename Count>
  static void count_segments(const SegmentParts& parts, int32_t* counts, int64_t* sums, const Count& count) {
    for_each_task(parts.count, [&](int64_t part, int64_t /*thread*/) {
      int64_t sum = 0;
      for (int64_t segment = parts.begin(part); segment < parts.end(part); ++segment) {
        counts[segment] = count(segment);
        sum += counts[segment];
      }
      sums[part] = sum;
    });
  }

  // Second pass: writes every row, those of rays by samples.sample and write_rest, the others as rows of no ray.
  template <typename Samples>
  static void place_segments(const Packing& packing, const Samples& samples) {
    keep_rays(packing);
    const int64_t rays = packing.parts.rays(), used = packing.ray_offsets[rays];
    const auto place_ray = [&](int64_t ray) {
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
    };
    for_each(*packing.rays_kept, place_ray, 64);
    for_each(packing.capacity - used, [&](int64_t row) { samples.out.write(used + row, no_sample(rays)); }, 1 << 14);
  }

 private:
  // Fills in ray_offsets and rays_kept.
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
