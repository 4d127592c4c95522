// Packed samples in memory, and the rows that belong to no ray or have no sample.
#pragma once

#include <cmath>

#include "common/checks.h"

namespace voxelfield {

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

}  // namespace voxelfield
