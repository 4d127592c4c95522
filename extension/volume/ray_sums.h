// Sums over the samples of each ray, and their adjoint. Sums have a fixed order, so that every run returns the same
// bits. All have `channels` numbers a row; those of a ray are shared out to a thread or a group as walk_rays.h says.
#pragma once

#include <cstdint>

#include "rays/packed_rays.h"

namespace voxelfield {

// The sum of each ray's rows, or for each sample that of the rows ahead of it.
template <bool Ahead, typename T>
struct RaySums {
  const T* values;
  int64_t channels;
  T* sums;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    for (int64_t c = 0; Ahead && c < channels; ++c) sums[i * channels + c] = 0;
  }

  template <typename Group>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Group& group) const {
    // A thread alone takes several channels on its way, because they lie together.
    constexpr int kColumns = Group::kSize == 1 ? 8 : 1;
    for (int64_t c = 0; c < channels; c += kColumns) {
      T sum[kColumns] = {};
      for (int64_t first = span.begin; Ahead ? group.any(first < span.end) : first < span.end; first += Group::kSize) {
        const int64_t i = first + group.seat;
        for (int k = 0; k < kColumns && c + k < channels; ++k) {
          const T value = i < span.end ? values[i * channels + c + k] : T(0);
          if constexpr (Ahead) {
            const auto scan = group(value);
            if (i < span.end) sums[i * channels + c + k] = sum[k] + scan.before;
            sum[k] += scan.total;
          } else {
            sum[k] += value;
          }
        }
      }
      for (int k = 0; !Ahead && k < kColumns && c + k < channels; ++k) {
        const T total = group.sum(sum[k]);
        if (group.leads) sums[ray * channels + c + k] = total;
      }
    }
    return span.end;
  }
};

template <typename T>
using TotalSums = RaySums<false, T>;

template <typename T>
using SumsAhead = RaySums<true, T>;

// Each sample's row is that of its ray.
template <typename T>
struct RaySpread {
  const T* sums;
  int64_t channels;
  T* values;

  VOXELFIELD_HOST_DEVICE void clear(int64_t i) const {
    for (int64_t c = 0; c < channels; ++c) values[i * channels + c] = 0;
  }

  template <typename Group>
  VOXELFIELD_HOST_DEVICE int64_t operator()(int64_t ray, const RaySpan& span, const Group& group) const {
    const int64_t step = Group::kSize % channels;
    int64_t c = group.seat % channels;
    for (int64_t k = span.begin * channels + group.seat; k < span.end * channels; k += Group::kSize) {
      values[k] = sums[ray * channels + c];
      c += step;
      if (c >= channels) c -= channels;
    }
    return span.end;
  }
};

}  // namespace voxelfield
