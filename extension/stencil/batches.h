// How the CPU kernels divide their work. Points are divided into batches, whose stencils are computed together before
// they are used. The channels of a point are divided into blocks of a width known at compile time, so that they stay in
// registers.
#pragma once

#include <algorithm>

#include "common/narrow.h"
#include "common/tensors.h"
#include "stencil/trilinear.h"

namespace voxelfield {

// Large enough that the prefetches of a batch complete while its remaining stencils are computed, and small enough that
// the stencils stay in the L1 cache.
constexpr int64_t kPointsPerBatch = 32;
// Large enough that the cost of fetching a task is negligible.
constexpr int64_t kPointsPerTask = 2048;
constexpr int64_t kCacheLine = 64;

// Calls f.template block<width>(first) for blocks that cover all channels.
template <int kWidth = 16, typename F>
VOXELFIELD_HOST_DEVICE void for_each_block(int64_t channels, const F& f, int64_t first = 0) {
  if constexpr (kWidth == 16) {
    for (; first + kWidth <= channels; first += kWidth) f.template block<kWidth>(first);
  } else if (channels & kWidth) {
    f.template block<kWidth>(first);
    first += kWidth;
  }
  if constexpr (kWidth > 1) for_each_block<kWidth / 2>(channels, f, first);
}

// The indices of the points of a batch. These are consecutive; a pointer to a list of indices can be used instead.
struct Consecutive {
  int64_t first;
  VOXELFIELD_HOST_DEVICE int64_t operator[](int64_t i) const { return first + i; }
};

template <typename T, typename Indices, typename Locator>
VOXELFIELD_HOST_DEVICE void locate_each(const Locator& locator, const T* points, Indices indices, int64_t count,
                                        Stencil<T>* stencils) {
  for (int64_t i = 0; i < count; ++i) stencils[i] = locator(points, indices[i]);
}

// Writes the required parts of each stencil to arrays, so that the loops over points are vectorised.
template <typename T, typename Indices, typename Locator, typename Arrays>
VOXELFIELD_HOST_DEVICE void locate_each(const Locator& locator, const T* points, Indices indices, int64_t count,
                                        Arrays* arrays) {
  VOXELFIELD_VECTORIZE
  for (int64_t i = 0; i < count; ++i) arrays->set(i, locator(points, indices[i]));
}

template <Padding kPadding, bool kAlignCorners, typename T>
VOXELFIELD_HOST_DEVICE GridLocator<T> linear(GridLocator<T> locator) {
  locator.padding = kPadding;
  locator.align_corners = kAlignCorners;
  locator.nearest = false;
  return locator;
}

// Finds the stencils of a batch: writes a list of them, or arrays with a function `set(i, stencil)`. The common lookups
// have their own loops, from which the compiler removes the branches of the others.
template <typename Locator, typename T, typename Indices, typename Stencils>
VOXELFIELD_MULTIVERSION void locate(const Locator& locator, const T* points, Indices indices, int64_t count,
                                    Stencils* stencils) {
  if constexpr (std::is_same_v<Locator, GridLocator<T>>) {
    const bool aligned = locator.align_corners;
    if (!locator.nearest && locator.padding == Padding::kBorder) {
      return aligned ? locate_each(linear<Padding::kBorder, true>(locator), points, indices, count, stencils)
                     : locate_each(linear<Padding::kBorder, false>(locator), points, indices, count, stencils);
    }
    if (!locator.nearest && locator.padding == Padding::kZeros) {
      return aligned ? locate_each(linear<Padding::kZeros, true>(locator), points, indices, count, stencils)
                     : locate_each(linear<Padding::kZeros, false>(locator), points, indices, count, stencils);
    }
  }
  locate_each(locator, points, indices, count, stencils);
}

// The hardware prefetches longer runs by itself, and more data would not stay in the L1 cache until it is used.
constexpr int64_t kMaxPrefetch = 256;

template <typename scalar_t>
VOXELFIELD_HOST_DEVICE void prefetch(const scalar_t* data, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(data);
  const int64_t size = std::min<int64_t>(count * sizeof(scalar_t), kMaxPrefetch);
  for (int64_t at = 0; at < size; at += kCacheLine) VOXELFIELD_PREFETCH(bytes + at);
  VOXELFIELD_PREFETCH(bytes + size - 1);
}

// Prefetches the corners of a batch. Two neighbours along z are contiguous. Cells are read in memory order, which needs
// no prefetching.
template <typename Locator, typename scalar_t, typename T>
VOXELFIELD_HOST_DEVICE void prefetch_corners(const Locator& locator, const scalar_t* data, const Stencil<T>* stencils,
                                             int64_t count) {
  if constexpr (!std::is_same_v<Locator, GridLocator<T>>) return;
  for (int64_t i = 0; i < count; ++i) {
    const Stencil<T>& s = stencils[i];
    for (int corner = 0; corner < kCorners; corner += 2) {
      prefetch(data + s.offset(corner), s.step[2] + locator.channels);
    }
  }
}

// Up to this number of channels, float32 kernels vectorise over points instead of channels.
constexpr int64_t kMaxPointwiseChannels = 3;

template <int Sets, typename scalar_t>
constexpr bool kVectorisesPoints = Sets == 1 && std::is_same_v<std::remove_const_t<scalar_t>, float>;

// Whether kernels convert whole rows of a dtype to float32 before they compute. bfloat16 is cheap to convert when it is
// read.
template <typename scalar_t>
constexpr bool kConvertsRows = std::is_same_v<scalar_t, Half>;

// The type of the elements of the rows with which kernels compute.
template <typename scalar_t>
using row_t = std::conditional_t<kConvertsRows<scalar_t>, opmath_t<scalar_t>, scalar_t>;

template <typename T, typename scalar_t>
VOXELFIELD_HOST_DEVICE void round_values(const T* values, int64_t count, scalar_t* out) {
  if constexpr (kConvertsRows<scalar_t>) {
    float16_rows.narrow(values, count, out);
  } else {
    VOXELFIELD_VECTORIZE
    for (int64_t i = 0; i < count; ++i) out[i] = narrow_to<scalar_t>(values[i]);
  }
}

}  // namespace voxelfield
