// The two passes of packing on the CPU: parts in parallel, and one loop over all counts between the passes.
#pragma once

#include "common/backend.h"
#include "rays/packing.h"

namespace voxelfield {

// First pass: count(segment) for every segment, and the sums of each part.
template <typename Count>
void count_segments(const SegmentParts& parts, int32_t* counts, int64_t* sums, const Count& count) {
  for_each_task(parts.parts(), [&](int64_t part, int64_t /*thread*/) {
    int64_t sum = 0;
    for (int64_t segment = parts.begin(part); segment < parts.end(part); ++segment) {
      counts[segment] = count(segment);
      sum += counts[segment];
    }
    sums[part] = sum;
  });
}

// Fills in ray_offsets and rays_kept.
inline void keep_rays(const Packing& packing) {
  const int64_t rays = packing.parts.rays(), segments_per_ray = int64_t{1} << packing.parts.segments_shift;
  int64_t used = 0, kept = 0;
  bool fits = true;
  packing.ray_offsets[0] = 0;
  for (int64_t ray = 0; ray < rays; ++ray) {
    int64_t samples = 0;
    for (int64_t part = 0; part < segments_per_ray; ++part) samples += packing.count(ray * segments_per_ray + part);
    fits = fits && used + samples <= packing.capacity;
    if (fits) {
      used += samples;
      ++kept;
    }
    packing.ray_offsets[ray + 1] = used;
  }
  *packing.rays_kept = kept;
}

// Second pass: writes every row, those of rays by samples.sample and write_rest, the others as rows of no ray.
template <typename Samples>
void place_segments(const Packing& packing, const Samples& samples) {
  constexpr int64_t kRowsPerTask = 1 << 14, kRaysPerTask = 64;
  keep_rays(packing);
  const int64_t rays = packing.parts.rays(), kept = *packing.rays_kept, used = packing.ray_offsets[rays];
  for_each_range(kept, kRaysPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t ray = begin; ray < end; ++ray) {
      int64_t row = packing.ray_offsets[ray];
      const int64_t first = ray << packing.parts.segments_shift, last = (ray + 1) << packing.parts.segments_shift;
      for (int64_t segment = first; segment < last; ++segment) {
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
  });
  for_each_range(packing.capacity - used, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) samples.out.write(used + row, no_sample(rays));
  });
}

}  // namespace voxelfield
