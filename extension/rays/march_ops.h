// Host side of ray marching, written once: allocate and hand over to a backend's kernels.
#pragma once

#include "rays/packing.h"
#include "rays/ray_inputs.h"

namespace voxelfield {

// The first pass remembers kStretches stretches of a segment for the second, which walks on from there if there are
// more.
struct Stretch {
  int32_t begin, end;
};

// Rays, each cut into segments.
struct RaySegments : RayBatch {
  OccupancyView grid;
  int segments_shift;

  VOXELFIELD_HOST_DEVICE int64_t segments() const { return count << segments_shift; }
  // Lattice positions of a segment: [begin, end).
  VOXELFIELD_HOST_DEVICE Stretch lattice(const RayView& ray, int64_t segment) const {
    static_assert(int64_t{kMostSteps} << kMostShift < (int64_t{1} << 31), "products of steps and segments are 32-bit");
    const int32_t steps = ray.steps(), part = static_cast<int32_t>(segment & ((int64_t{1} << segments_shift) - 1));
    return {steps * part >> segments_shift, steps * (part + 1) >> segments_shift};
  }
};

// Counts the samples of a segment and remembers its first stretches.
VOXELFIELD_HOST_DEVICE int32_t count_on_segment(const RaySegments& rays, int64_t segment, Stretch* stretches) {
  const RayView view = rays[segment >> rays.segments_shift];
  const Stretch lattice = rays.lattice(view, segment);
  if (lattice.begin == lattice.end) return 0;
  const int64_t stride = rays.segments();
  int32_t samples = 0;
  int stretch = 0;
  Stretch open{0, 0};
  const auto close = [&] {
    if (open.end > open.begin && stretch < kStretches) stretches[stretch * stride + segment] = open;
    stretch += open.end > open.begin;
  };
  RayWalk(rays.grid, view).walk(lattice.begin, lattice.end, [&](int32_t begin, int32_t end) {
    samples += end - begin;
    if (begin != open.end || open.end == open.begin) {
      close();
      open.begin = begin;
    }
    open.end = end;
    return true;
  });
  close();
  return samples;
}

// Finds samples, of which the first pass remembered where they are or how to find them.
struct MarchedSamples {
  RaySegments rays;
  const Stretch* stretches;
  SamplePointers out;

  // What all samples of a segment need.
  struct alignas(16) Staged {
    float origin[3], near, direction[3], offset;
    Stretch first;
  };

  VOXELFIELD_HOST_DEVICE Staged stage(int64_t segment) const {
    const RayView view = rays[segment >> rays.segments_shift];
    return {{view.origin[0], view.origin[1], view.origin[2]},
            view.near,
            {view.direction[0], view.direction[1], view.direction[2]},
            view.offset,
            stretches[segment]};
  }

  // The segment's `number`-th sample, unless it lies beyond the remembered stretches.
  VOXELFIELD_HOST_DEVICE SampleRow sample(const Staged& staged, int64_t segment, int32_t number) const {
    Stretch found = staged.first;
    for (int stretch = 1; number >= found.end - found.begin && stretch < kStretches; ++stretch) {
      number -= found.end - found.begin;
      found = stretches[stretch * rays.segments() + segment];
    }
    const float t = fmaf(static_cast<float>(found.begin + number) + staged.offset, rays.step, staged.near);
    SampleRow row{{}, t, rays.step, segment >> rays.segments_shift, number < found.end - found.begin};
    for (int axis = 0; axis < 3; ++axis) row.position[axis] = fmaf(t, staged.direction[axis], staged.origin[axis]);
    return row;
  }

  // The samples of a segment beyond its remembered stretches; `count` in all, from row `row` on.
  VOXELFIELD_HOST_DEVICE void write_rest(int64_t row, int64_t segment, int32_t count) const {
    int32_t number = 0;
    Stretch last{0, 0};
    for (int stretch = 0; stretch < kStretches && number < count; ++stretch) {
      last = stretches[stretch * rays.segments() + segment];
      // What no counting op returned might yet be handed over as if it had.
      if (last.begin < 0 || last.end < last.begin || last.end > kMostSteps) return;
      number += last.end - last.begin;
    }
    if (number >= count) return;
    const Staged staged = stage(segment);
    const RayView view = rays[segment >> rays.segments_shift];
    RayWalk(rays.grid, view).walk(last.end, rays.lattice(view, segment).end, [&](int32_t begin, int32_t end) {
      Staged rest = staged;
      rest.first = {begin, end};
      for (int32_t k = 0; k < end - begin && number < count; ++k) out.write(row + number++, sample(rest, segment, k));
      return number < count;
    });
  }
};

template <typename Backend>
struct MarchOps {
  static Tensor pack_occupancy(const Tensor& occupied) {
    check_tensor("occupied", occupied, {kAny, kAny, kAny}, ScalarType::Bool, occupied);
    const typename Backend::Guard guard(occupied);
    const Tensor cells = as_contiguous(occupied);
    const OccupancyView grid = occupancy_view(nullptr, {cells.size(0), cells.size(1), cells.size(2)}, nullptr);
    Tensor words = new_empty(cells, {grid.blocks[0], grid.blocks[1], grid.blocks[2]}, ScalarType::Long);
    if (words.numel() > 0) {
      Backend::pack_blocks(cells.const_data_ptr<bool>(), grid, words.mutable_data_ptr<int64_t>(), words.numel());
    }
    return words;
  }

  static std::tuple<Tensor, Tensor, Tensor> count_ray_samples(const Tensor& origins, const Tensor& directions,
                                                              const Tensor& near, const Tensor& far,
                                                              const Tensor& offset, const Tensor& occupied,
                                                              std::vector<int64_t> resolution,
                                                              const Tensor& aabb_occupancy, double step,
                                                              int64_t segments) {
    const RayInputs in{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const typename Backend::Guard guard(origins);
    const RaySegments rays{in.batch(step), cells.bits(), shift_of(segments)};
    const SegmentParts parts{rays.segments(), rays.segments_shift};
    Tensor counts = new_empty(in.origins, {rays.segments()}, ScalarType::Int);
    Tensor stretches = new_empty(in.origins, {kStretches, rays.segments(), 2}, ScalarType::Int);
    Tensor sums = new_empty(in.origins, {parts.parts()}, ScalarType::Long);
    Backend::count_samples(rays, parts, counts.mutable_data_ptr<int32_t>(),
                           reinterpret_cast<Stretch*>(stretches.mutable_data_ptr<int32_t>()),
                           sums.mutable_data_ptr<int64_t>());
    return {counts, stretches, sums};
  }

  static PackedTensors place_ray_samples(const Tensor& origins, const Tensor& directions, const Tensor& near,
                                         const Tensor& far, const Tensor& offset, const Tensor& occupied,
                                         std::vector<int64_t> resolution, const Tensor& aabb_occupancy, double step,
                                         int64_t segments, const Tensor& counts, const Tensor& stretches,
                                         const Tensor& sums, int64_t capacity) {
    const RayInputs in{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const typename Backend::Guard guard(origins);
    const RaySegments rays{in.batch(step), cells.bits(), shift_of(segments)};
    const PackedTensors out = new_packed(in.origins, rays.count, capacity);
    const Packing packing = packing_of(counts, sums, segments, kMostSteps, out);
    check_contiguous("stretches", stretches, {kStretches, rays.segments(), 2}, ScalarType::Int, origins);
    Backend::place_samples(packing,
                           MarchedSamples{rays, reinterpret_cast<const Stretch*>(stretches.const_data_ptr<int32_t>()),
                                          SamplePointers(out)});
    return out;
  }
};

}  // namespace voxelfield
