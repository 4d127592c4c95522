// The cells that rays cross, and marching in two passes, for both backends.
#pragma once

#include "common/whole_numbers.h"
#include "rays/cut_rays_ops.h"
#include "rays/segments.h"

namespace voxelfield {

// Rays that are each divided into segments.
struct RaySegments : RayBatch {
  OccupancyView grid;
  int segments_shift;

  VOXELFIELD_HOST_DEVICE int64_t segments() const { return count << segments_shift; }
  VOXELFIELD_HOST_DEVICE RayView ray_of(int64_t segment) const { return (*this)[segment >> segments_shift]; }

  // Returns the lattice positions of a ray that belong to a segment.
  VOXELFIELD_HOST_DEVICE StepRange share(const StepRange& ray, int64_t segment) const {
    static_assert(int64_t{kMaxSteps} << kMaxSegmentsShift < (int64_t{1} << 31),
                  "products of steps and segments are 32-bit");
    const int32_t steps = ray.end - ray.begin;
    const int32_t number = static_cast<int32_t>(segment & ((int64_t{1} << segments_shift) - 1));
    return {ray.begin + (steps * number >> segments_shift), ray.begin + (steps * (number + 1) >> segments_shift)};
  }
};

// The first pass counts the samples of a segment and stores its first ranges of hits. Unused ranges are empty. If a
// segment has more ranges, the second pass continues after the last stored one.
struct CountSamples {
  RaySegments rays;
  StepRange* step_ranges;  // (kStepRanges, segments)

  VOXELFIELD_HOST_DEVICE int32_t operator()(int64_t segment) const {
    const RayView view = rays.ray_of(segment);
    const int64_t stride = rays.segments();
    int32_t samples = 0;
    int stored = 0;
    const auto store = [&](const StepRange& range) {
      if (stored < kStepRanges) step_ranges[stored * stride + segment] = range;
      ++stored;
    };
    if (view.near < view.far) {
      const RayWalk walk(rays.grid, view);
      StepRange open{0, 0};  // extended as long as ranges are adjacent
      walk.walk(rays.share(walk.range(), segment), [&](const StepRange& range) {
        samples += range.end - range.begin;
        if (range.begin != open.end || open.end == open.begin) {
          if (open.end > open.begin) store(open);
          open.begin = range.begin;
        }
        open.end = range.end;
        return true;
      });
      if (open.end > open.begin) store(open);
    }
    while (stored < kStepRanges) store({0, 0});
    return samples;
  }
};

// Finds samples in the ranges that the first pass stored. To find those after the stored ranges, it continues the walk.
struct MarchedSamples {
  RaySegments rays;
  const StepRange* step_ranges;
  SamplePointers out;

  // The values that all samples of a segment share.
  struct alignas(16) Staged {
    float origin[3], near, direction[3], offset;
    StepRange first;
  };

  VOXELFIELD_HOST_DEVICE Staged stage(int64_t segment) const {
    const RayView view = rays.ray_of(segment);
    return {{view.origin[0], view.origin[1], view.origin[2]},
            view.near,
            {view.direction[0], view.direction[1], view.direction[2]},
            view.offset,
            step_ranges[segment]};
  }

  // Returns sample `number` of a segment, unless it lies after the stored ranges.
  VOXELFIELD_HOST_DEVICE SampleRow sample(const Staged& staged, int64_t segment, int32_t number) const {
    // Callers of the raw op may pass arbitrary ranges, so lengths may wrap around.
    StepRange found = staged.first;
    int32_t length = wrapping_subtract(found.end, found.begin);
    for (int range = 1; number >= length && range < kStepRanges; ++range) {
      number = wrapping_subtract(number, length);
      found = step_ranges[range * rays.segments() + segment];
      length = wrapping_subtract(found.end, found.begin);
    }
    const float step = static_cast<float>(wrapping_add(found.begin, number));
    const float t = fmaf(step + staged.offset, rays.step, staged.near);
    SampleRow row{{}, t, rays.step, segment >> rays.segments_shift, number < length};
    for (int axis = 0; axis < 3; ++axis) row.position[axis] = fmaf(t, staged.direction[axis], staged.origin[axis]);
    return row;
  }

  // Writes those samples of a segment that lie after its stored ranges. The segment has `count` samples in total, and
  // `row` is the row of the first one.
  VOXELFIELD_HOST_DEVICE void write_rest(int64_t row, int64_t segment, int32_t count) const {
    int32_t number = 0;
    StepRange last{0, 0};
    for (int range = 0; range < kStepRanges && number < count; ++range) {
      last = step_ranges[range * rays.segments() + segment];
      // Callers of the raw op may pass arbitrary ranges.
      if (last.begin < 0 || last.end < last.begin || last.end > kMaxSteps) return;
      number += last.end - last.begin;
    }
    if (number >= count) return;
    const Staged staged = stage(segment);
    const RayView view = rays.ray_of(segment);
    const RayWalk walk(rays.grid, view);
    walk.walk({last.end, rays.share(walk.range(), segment).end}, [&](const StepRange& range) {
      Staged rest = staged;
      rest.first = range;
      for (int32_t k = 0; k < range.end - range.begin && number < count; ++k) {
        out.write(row + number++, sample(rest, segment, k));
      }
      return number < count;
    });
  }
};

// The distances and lengths of the samples of rays, in rows of slots (R, max_samples_per_ray).
struct SlotRows {
  const float *distances, *lengths;  // `lengths` may be null: all samples are a step long
  int64_t max_samples_per_ray;
  float step;
  SamplePointers out;

  // The row of a sample, but for its position.
  VOXELFIELD_HOST_DEVICE SampleRow slot(int64_t ray, int32_t number) const {
    const int64_t at = ray * max_samples_per_ray + number;
    return {{}, distances[at], lengths == nullptr ? step : lengths[at], ray, true};
  }

  // All samples are in slots, so nothing remains to be written.
  VOXELFIELD_HOST_DEVICE void write_rest(int64_t /*row*/, int64_t /*ray*/, int32_t /*count*/) const {}
};

// Finds samples whose distances are stored in a row of slots per ray. Each ray is one segment.
struct SlottedSamples : SlotRows {
  const float *origins, *directions;

  struct Staged {
    float origin[3], direction[3];
  };

  VOXELFIELD_HOST_DEVICE Staged stage(int64_t ray) const {
    const float *o = origins + 3 * ray, *d = directions + 3 * ray;
    return {{o[0], o[1], o[2]}, {d[0], d[1], d[2]}};
  }

  VOXELFIELD_HOST_DEVICE SampleRow sample(const Staged& staged, int64_t ray, int32_t number) const {
    SampleRow row = slot(ray, number);
    for (int axis = 0; axis < 3; ++axis) row.position[axis] = fmaf(row.t, staged.direction[axis], staged.origin[axis]);
    return row;
  }
};

// The same for rays that nested boxes cut into pieces. The distance of a sample determines its piece.
struct SlottedPieces : SlotRows {
  RayBatch rays;  // in world coordinates
  NestedBoxes boxes;

  using Staged = Ray;

  VOXELFIELD_HOST_DEVICE Staged stage(int64_t ray) const { return Ray::copy(rays[ray]); }

  VOXELFIELD_HOST_DEVICE SampleRow sample(const Staged& whole, int64_t ray, int32_t number) const {
    SampleRow row = slot(ray, number);
    RayPieces pieces(boxes, whole);
    Ray piece = whole;
    while (pieces.next(boxes, rays.step, piece) && !(row.t < piece.far)) {
    }
    for (int axis = 0; axis < 3; ++axis) row.position[axis] = fmaf(row.t, piece.direction[axis], piece.origin[axis]);
    return row;
  }
};

// One axis of a cell's distance to the nearest occupied one in the maximum norm: the minimum, over the cells along this
// axis, of max(distance to that cell, distance of that cell by the axes before).
struct DistanceAlongAxis {
  const uint8_t* distances;
  uint8_t* smallest;
  int64_t size, stride;  // cells along the axis, and between two of them in memory

  VOXELFIELD_HOST_DEVICE void operator()(int64_t cell) const {
    const int64_t place = cell / stride % size;
    int32_t best = distances[cell];
    for (int32_t away = 1; away < best; ++away) {
      if (away <= place) best = smaller(best, away, distances[cell - away * stride]);
      if (away < size - place) best = smaller(best, away, distances[cell + away * stride]);
    }
    smallest[cell] = static_cast<uint8_t>(best);
  }

 private:
  static VOXELFIELD_HOST_DEVICE int32_t smaller(int32_t best, int32_t away, int32_t there) {
    const int32_t found = away > there ? away : there;
    return found < best ? found : best;
  }
};

// The distances before the first axis.
struct FirstDistance {
  const bool* occupied;
  uint8_t* distances;
  uint8_t max_distance;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t cell) const { distances[cell] = occupied[cell] ? 0 : max_distance; }
};

template <typename Backend>
struct MarchOps {
  static Tensor pack_occupancy(const Tensor& occupied) {
    const Tensor cells = checked("occupied", occupied, {kAny, kAny, kAny}, ScalarType::Bool, occupied);
    const typename Backend::Guard guard(occupied);
    const OccupancyView grid = occupancy_view(nullptr, shape_of(cells), nullptr);
    Tensor words = new_empty(cells, {grid.bricks[0], grid.bricks[1], grid.bricks[2]}, ScalarType::Long);
    Backend::for_each(words.numel(), PackBricks{data_of(cells), grid, data_of(words)});
    return words;
  }

  static Tensor empty_distance(const Tensor& occupied, int64_t max_distance) {
    const Tensor cells = checked("occupied", occupied, {kAny, kAny, kAny}, ScalarType::Bool, occupied);
    STD_TORCH_CHECK(max_distance >= 1 && max_distance <= 255, "max_distance must be 1 to 255, got ", max_distance);
    const typename Backend::Guard guard(occupied);
    Tensor distances = new_empty(cells, shape_of(cells), ScalarType::Byte);
    Tensor before = new_empty(cells, shape_of(cells), ScalarType::Byte);
    const int64_t count = cells.numel();
    Backend::for_each(count, FirstDistance{data_of(cells), data_of(distances), static_cast<uint8_t>(max_distance)});
    int64_t stride = 1;
    for (int axis = 2; axis >= 0; --axis) {
      std::swap(before, distances);
      Backend::for_each(count, DistanceAlongAxis{data_of(before), data_of(distances), cells.size(axis), stride});
      stride *= cells.size(axis);
    }
    return distances;
  }

  static TensorTuple<3> count_ray_samples(const Tensor& origins, const Tensor& directions, const Tensor& near,
                                          const Tensor& far, const Tensor& offset, const Tensor& occupied,
                                          std::vector<int64_t> resolution, const Tensor& aabb_occupancy, double step,
                                          int64_t segments_per_ray) {
    const RayInputs in{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const typename Backend::Guard guard(origins);
    const RaySegments rays{in.batch(step), cells.bits(), log2_exact(segments_per_ray)};
    const SegmentParts parts{rays.segments(), rays.segments_shift};
    Tensor counts = new_empty(in.origins, {rays.segments()}, ScalarType::Int);
    Tensor step_ranges = new_empty(in.origins, {kStepRanges, rays.segments(), 2}, ScalarType::Int);
    Tensor sums = new_empty(in.origins, {parts.count}, ScalarType::Long);
    Backend::count_segments(parts, data_of(counts), data_of(sums), CountSamples{rays, ranges_in(step_ranges)});
    return {counts, step_ranges, sums};
  }

  static PackedTensors place_ray_samples(const Tensor& origins, const Tensor& directions, const Tensor& near,
                                         const Tensor& far, const Tensor& offset, const Tensor& occupied,
                                         std::vector<int64_t> resolution, const Tensor& aabb_occupancy, double step,
                                         int64_t segments_per_ray, const Tensor& counts, const Tensor& step_ranges,
                                         const Tensor& sums, int64_t capacity) {
    const RayInputs in{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const typename Backend::Guard guard(origins);
    const RaySegments rays{in.batch(step), cells.bits(), log2_exact(segments_per_ray)};
    const PackedTensors out = new_packed(in.origins, rays.count, capacity);
    const Packing packing = packing_of(counts, sums, segments_per_ray, kMaxSteps, out);
    contiguous_data("step_ranges", step_ranges, {kStepRanges, rays.segments(), 2}, ScalarType::Int, origins);
    Backend::place_segments(packing, MarchedSamples{rays, ranges_in(step_ranges), SamplePointers(out)});
    return out;
  }

  static PackedTensors pack_slots(const Tensor& origins, const Tensor& directions, const Tensor& near,
                                  const Tensor& far, const Tensor& offset, const Tensor& any_slots,
                                  const Tensor& counts, const Tensor& sums, double step, std::vector<double> boxes,
                                  int64_t capacity, const Tensor& lengths) {
    const RayInputs in{origins, directions, near, far, offset};
    const int64_t rays = in.origins.size(0), max_samples_per_ray = any_slots.size(1);
    const Tensor slots = checked("slots", any_slots, {rays, max_samples_per_ray}, ScalarType::Float, in.origins);
    const bool in_steps = lengths.dim() == 2 && lengths.size(1) == 0;
    const float* data =
        contiguous_data("lengths", lengths, {rays, in_steps ? 0 : max_samples_per_ray}, ScalarType::Float, origins);
    const typename Backend::Guard guard(origins);
    const PackedTensors out = new_packed(in.origins, rays, capacity);
    const Packing packing = packing_of(counts, sums, 1, std::min<int64_t>(max_samples_per_ray, kMaxSteps), out);
    const SlotRows rows{data_of(slots), in_steps ? nullptr : data, max_samples_per_ray, static_cast<float>(step),
                        SamplePointers(out)};
    if (boxes.empty()) {
      Backend::place_segments(packing, SlottedSamples{rows, data_of(in.origins), data_of(in.directions)});
    } else {
      Backend::place_segments(packing, SlottedPieces{rows, in.batch(step), nested_boxes(boxes)});
    }
    return out;
  }

  static void implement(Library& m) {
    m.impl("pack_occupancy", TORCH_BOX(&MarchOps::pack_occupancy));
    m.impl("empty_distance", TORCH_BOX(&MarchOps::empty_distance));
    m.impl("count_ray_samples", TORCH_BOX(&MarchOps::count_ray_samples));
    m.impl("place_ray_samples", TORCH_BOX(&MarchOps::place_ray_samples));
  }

 private:
  static StepRange* ranges_in(const Tensor& step_ranges) {
    return reinterpret_cast<StepRange*>(step_ranges.mutable_data_ptr<int32_t>());
  }
};

}  // namespace voxelfield
