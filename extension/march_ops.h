// Host side of ray marching, written once: allocate and hand over to a backend's kernels.
#pragma once

#include "packing.h"
#include "ray_walk.h"

namespace voxelfield {

// Stretches of a segment that the first pass remembers for the second, which walks on from there if there are more.
constexpr int kStretches = 8;

struct Stretch {
  int32_t begin, end;
};

struct RayBatch {
  const float *origins, *directions, *near, *far, *offset;
  OccupancyView grid;
  float step, steps_per_length;
  int64_t count;
  int segments_shift;

  VOXELFIELD_HOST_DEVICE int64_t segments() const { return count << segments_shift; }
  VOXELFIELD_HOST_DEVICE RayView operator[](int64_t ray) const {
    return {origins + 3 * ray, directions + 3 * ray, near[ray], far[ray], offset[ray], step, steps_per_length};
  }
  // Lattice positions of a segment: [begin, end).
  VOXELFIELD_HOST_DEVICE Stretch lattice(const RayView& ray, int64_t segment) const {
    static_assert(int64_t{kMostSteps} << kMostShift < (int64_t{1} << 31), "products of steps and segments are 32-bit");
    const int32_t steps = ray.steps(), part = static_cast<int32_t>(segment & ((int64_t{1} << segments_shift) - 1));
    return {steps * part >> segments_shift, steps * (part + 1) >> segments_shift};
  }
};

// Counts the samples of a segment and remembers its first stretches.
VOXELFIELD_HOST_DEVICE int32_t count_on_segment(const RayBatch& rays, int64_t segment, Stretch* stretches) {
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
  RayBatch rays;
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
    STD_TORCH_CHECK(occupied.dim() == 3 && occupied.scalar_type() == ScalarType::Bool,
                    "occupied must be (X, Y, Z) bool");
    const typename Backend::Guard guard(occupied);
    const Tensor cells = as_contiguous(occupied);
    const OccupancyView grid = view_of(nullptr, {cells.size(0), cells.size(1), cells.size(2)}, nullptr);
    Tensor words = new_empty(cells, {grid.blocks[0], grid.blocks[1], grid.blocks[2]}, ScalarType::Long);
    if (words.numel() > 0) {
      Backend::pack_blocks(cells.const_data_ptr<bool>(), grid, words.mutable_data_ptr<int64_t>(), words.numel());
    }
    return words;
  }

  static std::tuple<Tensor, Tensor, Tensor> count_ray_samples(const Tensor& origins, const Tensor& directions,
                                                              const Tensor& near, const Tensor& far,
                                                              const Tensor& offset, const Tensor& words,
                                                              std::vector<int64_t> resolution, const Tensor& aabb,
                                                              double step, int64_t segments) {
    const typename Backend::Guard guard(origins);
    const Inputs in{origins, directions, near, far, offset, words, aabb};
    const RayBatch rays = in.batch(resolution, step, segments);
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
                                         const Tensor& far, const Tensor& offset, const Tensor& words,
                                         std::vector<int64_t> resolution, const Tensor& aabb, double step,
                                         int64_t segments, const Tensor& counts, const Tensor& stretches,
                                         const Tensor& sums, int64_t capacity) {
    const typename Backend::Guard guard(origins);
    const Inputs in{origins, directions, near, far, offset, words, aabb};
    const RayBatch rays = in.batch(resolution, step, segments);
    const PackedTensors out = new_packed(in.origins, rays.count, capacity);
    const Packing packing = packing_of(counts, sums, segments, out);
    STD_TORCH_CHECK(stretches.scalar_type() == ScalarType::Int && stretches.is_contiguous() &&
                        stretches.numel() == 2 * kStretches * rays.segments(),
                    "stretches must be what count_ray_samples returned");
    Backend::place_samples(packing,
                           MarchedSamples{rays, reinterpret_cast<const Stretch*>(stretches.const_data_ptr<int32_t>()),
                                          SamplePointers(out)});
    return out;
  }

 private:
  static OccupancyView view_of(const int64_t* words, const std::vector<int64_t>& resolution, const float* aabb) {
    STD_TORCH_CHECK(resolution.size() == 3, "resolution must be X, Y, Z");
    OccupancyView grid{words, {}, {}, aabb};
    int64_t blocks = 1;
    for (int axis = 0; axis < 3; ++axis) {
      STD_TORCH_CHECK(resolution[axis] >= 0 && resolution[axis] < kMostCells,
                      "an occupancy grid must have fewer than 2^22 cells along each axis, got ", resolution[axis]);
      grid.resolution[axis] = static_cast<int32_t>(resolution[axis]);
      grid.blocks[axis] = blocks_for(resolution[axis]);
      blocks *= grid.blocks[axis];
      STD_TORCH_CHECK(blocks < (int64_t{1} << 31), "an occupancy grid must have fewer than 2^31 blocks of 4^3 cells");
    }
    return grid;
  }

  // Keeps contiguous copies alive for as long as raw pointers to them are in use.
  struct Inputs {
    Tensor origins, directions, near, far, offset, words, aabb;

    Inputs(const Tensor& origins, const Tensor& directions, const Tensor& near, const Tensor& far, const Tensor& offset,
           const Tensor& words, const Tensor& aabb)
        : origins(as_contiguous(origins)),
          directions(as_contiguous(directions)),
          near(as_contiguous(near)),
          far(as_contiguous(far)),
          offset(as_contiguous(offset)),
          words(as_contiguous(words)),
          aabb(as_contiguous(aabb)) {}

    RayBatch batch(const std::vector<int64_t>& resolution, double step, int64_t segments) const {
      const OccupancyView grid = view_of(words.const_data_ptr<int64_t>(), resolution, aabb.const_data_ptr<float>());
      STD_TORCH_CHECK(words.dim() == 3 && words.numel() > 0 && words.size(0) == grid.blocks[0] &&
                          words.size(1) == grid.blocks[1] && words.size(2) == grid.blocks[2],
                      "words must be what pack_occupancy returned for a grid of that resolution");
      return {origins.const_data_ptr<float>(),
              directions.const_data_ptr<float>(),
              near.const_data_ptr<float>(),
              far.const_data_ptr<float>(),
              offset.const_data_ptr<float>(),
              grid,
              static_cast<float>(step),
              1.0f / static_cast<float>(step),
              origins.size(0),
              shift_of(segments)};
    }
  };
};

}  // namespace voxelfield
