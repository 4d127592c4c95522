// Marches rays through several boxes of cells, in steps that may grow with the distance; the host side checks,
// allocates, and marches each ray. In contrast to RayWalk, distances are accumulated from one step to the next, and
// cells are visited one by one, because the length of a step depends on where it began.
#pragma once

#include "common/finite.h"
#include "rays/packed_rays.h"
#include "rays/ray_inputs.h"

namespace voxelfield {

// Boxes of equally many cells. Where boxes overlap, the first one counts.
struct CellLevels {
  const bool* occupied;  // (count, X, Y, Z)
  const float* aabbs;    // (count, 6): lower corner, upper corner
  int64_t count;
  int32_t resolution[3];
};

// The distances at which a ray enters and leaves a box; it misses the box unless enter < leave.
struct Crossing {
  float enter, leave;
};

struct LevelRay {
  float origin[3], direction[3], inverse[3];
  bool finite;

  VOXELFIELD_HOST_DEVICE LevelRay(const float* from, const float* along)
      : finite(all_finite(from) && all_finite(along)) {
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      origin[axis] = from[axis];
      direction[axis] = along[axis];
      inverse[axis] = 1.0f / along[axis];
    }
  }

  // Whether the ray crosses no faces of this axis at a finite distance.
  VOXELFIELD_HOST_DEVICE bool parallel(int axis) const { return !(fabsf(inverse[axis]) < INFINITY); }

  VOXELFIELD_HOST_DEVICE Crossing cross(const float* aabb) const {
    Crossing all{-INFINITY, INFINITY};
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float below = aabb[axis] - origin[axis], above = aabb[3 + axis] - origin[axis];
      if (parallel(axis)) {
        if (below > 0.0f || above < 0.0f) all.leave = -INFINITY;
        continue;
      }
      const bool rises = inverse[axis] > 0.0f;
      all.enter = fmaxf(all.enter, (rises ? below : above) * inverse[axis]);
      all.leave = fminf(all.leave, (rises ? above : below) * inverse[axis]);
    }
    return all;
  }
};

struct MarchLevels {
  const float *origins, *directions, *near, *far;
  CellLevels levels;
  float step;         // 0: one interval for each cell
  float cone_angle;   // the length of a step is at least this times the distance
  int64_t max_count;  // of intervals on a ray

  // Calls visit(begin, end) for each interval whose midpoint lies in an occupied cell, and returns where the ray stops.
  template <typename Visit>
  VOXELFIELD_HOST_DEVICE float march(int64_t row, const Visit& visit) const {
    const LevelRay ray(origins + 3 * row, directions + 3 * row);
    float t = near[row];
    int64_t room = max_count;
    if (!ray.finite || !(t > -INFINITY)) return t;
    for (float begin = t; begin < far[row] && room > 0;) {
      int64_t level = 0;
      float end = far[row], next = INFINITY;  // the beginning of the nearest box ahead that precedes `level`
      for (; level < levels.count; ++level) {
        const Crossing box = ray.cross(levels.aabbs + 6 * level);
        if (!(box.enter < box.leave) || !(begin < box.leave)) continue;
        if (box.enter <= begin) {
          end = fminf(end, box.leave);
          break;
        }
        next = fminf(next, box.enter);
      }
      end = fminf(end, next);
      if (!(level < levels.count)) {
        begin = next;
      } else {
        if (!advance(t, begin) || !cross_cells(ray, level, begin, end, t, room, visit)) break;
        begin = end;
      }
    }
    return t;
  }

 private:
  VOXELFIELD_HOST_DEVICE float length(float t) const {
    constexpr float kLongest = 1e10f;
    return fminf(fmaxf(t * cone_angle, step), kLongest);
  }

  // Moves t, by steps of the length at t, to the first interval whose midpoint is not before `limit`. Returns false if
  // steps are too short to move t, which therefore would never get there.
  VOXELFIELD_HOST_DEVICE bool advance(float& t, float limit) const {
    if (step <= 0.0f) {
      t = limit;
      return true;
    }
    const float dt = length(t);
    while (t + 0.5f * dt < limit) {
      const float next = t + dt;
      if (!(next > t)) return false;
      t = next;
    }
    return true;
  }

  // Visits the intervals in the cells of a box between two distances. Returns false if the ray stops there.
  template <typename Visit>
  VOXELFIELD_HOST_DEVICE bool cross_cells(const LevelRay& ray, int64_t level, float begin, float end, float& t,
                                          int64_t& room, const Visit& visit) const {
    const float* low = levels.aabbs + 6 * level;
    int32_t cell[3];
    float width[3], exit[3];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float cells = int_to_float(levels.resolution[axis]), last = cells - 1.0f;
      width[axis] = (low[3 + axis] - low[axis]) / cells;
      const float position = (ray.origin[axis] + ray.direction[axis] * begin - low[axis]) / width[axis];
      cell[axis] = trunc_small(position > 0.0f ? (position < last ? position : last) : 0.0f);
      exit[axis] = exit_of(ray, axis, cell[axis], low[axis], width[axis]);
    }
    while (true) {
      const int axis = exit[0] < exit[1] ? (exit[0] < exit[2] ? 0 : 2) : (exit[1] < exit[2] ? 1 : 2);
      const float nearest = axis == 0 ? exit[0] : (axis == 1 ? exit[1] : exit[2]);
      const float limit = fminf(nearest, end);
      const int64_t x = cell[0], y = cell[1], z = cell[2];
      const int64_t place = ((level * levels.resolution[0] + x) * levels.resolution[1] + y) * levels.resolution[2] + z;
      if (!levels.occupied[place]) {
        if (!advance(t, limit)) return false;
      } else if (step <= 0.0f) {
        if (t < limit) {
          visit(t, limit);
          t = limit;
          if (--room == 0) return false;
        }
      } else {
        for (float dt = length(t); t + 0.5f * dt < limit; dt = length(t)) {
          const float next = t + dt;
          if (!(next > t)) return false;
          visit(t, next);
          t = next;
          if (--room == 0) return false;
        }
      }
      if (!(nearest < end)) return true;
      VOXELFIELD_UNROLL
      for (int other = 0; other < 3; ++other) {  // a loop over all axes, so that arrays stay in registers
        if (other != axis) continue;
        cell[other] += ray.direction[other] > 0.0f ? 1 : -1;
        if (cell[other] < 0 || cell[other] >= levels.resolution[other]) return true;
        exit[other] = exit_of(ray, other, cell[other], low[other], width[other]);
      }
    }
  }

  VOXELFIELD_HOST_DEVICE static float exit_of(const LevelRay& ray, int axis, int32_t cell, float low, float width) {
    if (ray.parallel(axis)) return INFINITY;
    const float face = low + int_to_float(cell + (ray.direction[axis] > 0.0f ? 1 : 0)) * width;
    return (face - ray.origin[axis]) * ray.inverse[axis];
  }
};

struct CountIntervals {
  MarchLevels rays;
  int64_t* counts;  // (R,)
  float* stops;     // (R,)

  VOXELFIELD_HOST_DEVICE void operator()(int64_t ray) const {
    int64_t count = 0;
    stops[ray] = rays.march(ray, [&](float /*begin*/, float /*end*/) { ++count; });
    counts[ray] = count;
  }
};

struct PlaceIntervals {
  MarchLevels rays;
  PackedRays packed;
  float *begins, *ends;  // (M,)
  int64_t* ray_index;    // (M,)

  VOXELFIELD_HOST_DEVICE void operator()(int64_t ray) const {
    const RaySpan rows = packed[ray];
    if (rows.begin == rows.end) return;
    MarchLevels all = rays;
    if (rows.end - rows.begin < all.max_count) all.max_count = rows.end - rows.begin;
    int64_t row = rows.begin;
    const auto place = [&](float begin, float end) {
      begins[row] = begin;
      ends[row] = end;
      ray_index[row] = ray;
      ++row;
    };
    const float stop = all.march(ray, place);
    // No row is left over unless the caller's offsets leave room for more, or the passes were compiled to round
    // differently. Rows must not keep what was in memory before.
    while (row < rows.end) place(stop, stop);
  }
};

struct LevelInputs : RayInputs {
  Tensor occupied, aabbs;

  LevelInputs(const Tensor& origins, const Tensor& directions, const Tensor& near, const Tensor& far,
              const Tensor& occupied, const Tensor& aabbs)
      : RayInputs(origins, directions, near, far, std::nullopt),
        occupied(checked("occupied", occupied, {kAny, kAny, kAny, kAny}, ScalarType::Bool, origins)),
        aabbs(checked("aabbs", aabbs, {occupied.size(0), 6}, ScalarType::Float, origins)) {}

  MarchLevels rays(double step, double cone_angle, int64_t max_count) const {
    check_finite_not_negative("step", step);
    check_finite_not_negative("cone_angle", cone_angle);
    STD_TORCH_CHECK(max_count > 0, "max_count must be positive, got ", max_count);
    CellLevels levels{data_of(occupied), data_of(aabbs), occupied.size(0), {}};
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t cells = occupied.size(1 + axis);
      STD_TORCH_CHECK(0 < cells && cells < kMaxCells, "occupied must have 1 to 2^22 - 1 cells along each axis, got ",
                      cells);
      levels.resolution[axis] = static_cast<int32_t>(cells);
    }
    const float shortest = static_cast<float>(step), angle = static_cast<float>(cone_angle);
    return {data_of(origins), data_of(directions), data_of(near), data_of(far), levels, shortest, angle, max_count};
  }
};

template <typename Backend>
struct MarchLevelsOps {
  static TensorTuple<2> count_level_intervals(const Tensor& origins, const Tensor& directions, const Tensor& near,
                                              const Tensor& far, const Tensor& occupied, const Tensor& aabbs,
                                              double step, double cone_angle, int64_t max_count) {
    const LevelInputs in{origins, directions, near, far, occupied, aabbs};
    const typename Backend::Guard guard(origins);
    const int64_t rays = origins.size(0);
    Tensor counts = new_empty(in.origins, {rays}, ScalarType::Long), stops = new_like(in.origins, {rays});
    Backend::for_each(rays, CountIntervals{in.rays(step, cone_angle, max_count), data_of(counts), data_of(stops)});
    return {counts, stops};
  }

  static TensorTuple<3> place_level_intervals(const Tensor& origins, const Tensor& directions, const Tensor& near,
                                              const Tensor& far, const Tensor& occupied, const Tensor& aabbs,
                                              double step, double cone_angle, int64_t max_count,
                                              const Tensor& ray_offsets, int64_t samples) {
    const LevelInputs in{origins, directions, near, far, occupied, aabbs};
    const int64_t rays = origins.size(0);
    const Tensor offsets = checked("ray_offsets", ray_offsets, {rays + 1}, ScalarType::Long, in.origins);
    STD_TORCH_CHECK(samples >= 0, "samples must not be negative, got ", samples);
    const typename Backend::Guard guard(origins);
    Tensor begins = new_like(in.origins, {samples}), ends = new_like(in.origins, {samples});
    Tensor ray_index = new_empty(in.origins, {samples}, ScalarType::Long);
    Backend::for_each(rays, PlaceIntervals{in.rays(step, cone_angle, max_count), packed_rays(offsets, samples),
                                           data_of(begins), data_of(ends), data_of(ray_index)});
    return {begins, ends, ray_index};
  }

  static void implement(Library& m) {
    m.impl("count_level_intervals", TORCH_BOX(&MarchLevelsOps::count_level_intervals));
    m.impl("place_level_intervals", TORCH_BOX(&MarchLevelsOps::place_level_intervals));
  }
};

}  // namespace voxelfield
