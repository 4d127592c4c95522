// The two passes of packing on the CPU.
#pragma once

#include "common/backend.h"
#include "rays/segments.h"

namespace voxelfield {

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
    fit_rays(packing);
    const int64_t rays = packing.parts.rays(), used = packing.ray_offsets[rays];
    for_each(*packing.rays_kept, PlaceRay<Samples>{packing, samples}, 64);
    for_each(packing.capacity - used, [&](int64_t row) { samples.out.write(used + row, no_sample(rays)); }, 1 << 14);
  }

 private:
  static void fit_rays(const Packing& packing) {
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
