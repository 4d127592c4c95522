// How the CPU kernels divide their work: points into batches, whose stencils are found together ahead of their use, and
// the channels of a point into pieces of a width that the compiler knows, so that they stay in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/narrow.h"
#include "common/platform.h"
#include "stencil/trilinear.h"

namespace voxelfield {

// Enough for prefetches of a batch to complete while its remaining stencils are found, and few enough for the stencils
// to stay in the first-level cache.
constexpr int64_t kPointsPerBatch = 32;
// A thread takes so many points at a time that the cost of taking a task does not matter.
constexpr int64_t kPointsPerTask = 2048;
constexpr int64_t kCacheLine = 64;

// Calls f.template piece<width>(first) for pieces that cover all channels.
template <typename F>
VOXELFIELD_HOST_DEVICE void for_each_piece(int64_t channels, const F& f) {
  int64_t c = 0;
  for (; c + 16 <= channels; c += 16) f.template piece<16>(c);
  if (channels & 8) {
    f.template piece<8>(c);
    c += 8;
  }
  if (channels & 4) {
    f.template piece<4>(c);
    c += 4;
  }
  if (channels & 2) {
    f.template piece<2>(c);
    c += 2;
  }
  if (channels & 1) f.template piece<1>(c);
}

// The points of a batch by index: consecutive ones here, or a pointer to a list of them.
struct Consecutive {
  int64_t first;
  VOXELFIELD_HOST_DEVICE int64_t operator[](int64_t i) const { return first + i; }
};

template <typename T, typename Indices, typename Locator>
VOXELFIELD_HOST_DEVICE void locate_each(const Locator& locator, const T* points, Indices indices, int64_t count,
                                        Stencil<T>* stencils) {
  for (int64_t i = 0; i < count; ++i) stencils[i] = locator(points, indices[i]);
}

// The usual lookups have loops of their own, from which the compiler removes the branches of the others.
template <Padding kPadding, bool kAlignCorners, typename T, typename Indices>
VOXELFIELD_HOST_DEVICE void locate_linear(GridLocator<T> locator, const T* points, Indices indices, int64_t count,
                                          Stencil<T>* stencils) {
  locator.padding = kPadding;
  locator.align_corners = kAlignCorners;
  locator.nearest = false;
  locate_each(locator, points, indices, count, stencils);
}

template <typename T, typename Indices>
VOXELFIELD_MULTIVERSION void locate(const GridLocator<T>& locator, const T* points, Indices indices, int64_t count,
                                    Stencil<T>* stencils) {
  if (locator.nearest || locator.padding == Padding::kReflection) {
    locate_each(locator, points, indices, count, stencils);
  } else if (locator.padding == Padding::kBorder) {
    if (locator.align_corners) {
      locate_linear<Padding::kBorder, true>(locator, points, indices, count, stencils);
    } else {
      locate_linear<Padding::kBorder, false>(locator, points, indices, count, stencils);
    }
  } else if (locator.align_corners) {
    locate_linear<Padding::kZeros, true>(locator, points, indices, count, stencils);
  } else {
    locate_linear<Padding::kZeros, false>(locator, points, indices, count, stencils);
  }
}

template <typename T, typename Indices>
VOXELFIELD_MULTIVERSION void locate(const CellLocator<T>& locator, const T* points, Indices indices, int64_t count,
                                    Stencil<T>* stencils) {
  locate_each(locator, points, indices, count, stencils);
}

// The hardware prefetches longer runs by itself, and more would not stay in the first-level cache until its use.
constexpr int64_t kMaxPrefetch = 256;

template <typename scalar_t>
VOXELFIELD_HOST_DEVICE void prefetch(const scalar_t* data, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(data);
  const int64_t size = std::min<int64_t>(count * sizeof(scalar_t), kMaxPrefetch);
  for (int64_t at = 0; at < size; at += kCacheLine) VOXELFIELD_PREFETCH(bytes + at);
  VOXELFIELD_PREFETCH(bytes + size - 1);
}

// Requests the corners of a batch. Two neighbours along z are contiguous.
template <typename scalar_t, typename T>
VOXELFIELD_HOST_DEVICE void prefetch_corners(const GridLocator<T>& locator, const scalar_t* data,
                                             const Stencil<T>* stencils, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Stencil<T>& s = stencils[i];
    for (int corner = 0; corner < kCorners; corner += 2) {
      prefetch(data + s.offset(corner), s.step[2] + locator.channels);
    }
  }
}

// Cells are read in the order of memory, which needs no prefetching.
template <typename scalar_t, typename T>
VOXELFIELD_HOST_DEVICE void prefetch_corners(const CellLocator<T>& /*locator*/, const scalar_t* /*data*/,
                                             const Stencil<T>* /*stencils*/, int64_t /*count*/) {}

// Whether kernels convert whole rows of a dtype to float32 before they compute. bfloat16 is cheap to widen as it is
// read.
template <typename scalar_t>
constexpr bool kConvertsRows = std::is_same_v<scalar_t, Half>;

// A row as it is, or a converted copy in `spare`.
template <typename scalar_t, typename T>
VOXELFIELD_HOST_DEVICE auto compute_row(const scalar_t* row, [[maybe_unused]] int64_t length,
                                        [[maybe_unused]] T* spare) {
  if constexpr (kConvertsRows<scalar_t>) {
    float16_rows.widen(&row, 1, length, spare);
    return static_cast<const T*>(spare);
  } else {
    return row;
  }
}

// Rounds contiguous sums to the dtype of the result.
template <typename T, typename scalar_t>
VOXELFIELD_HOST_DEVICE void round_values(const T* values, int64_t count, scalar_t* out) {
  if constexpr (kConvertsRows<scalar_t>) {
    float16_rows.narrow(values, count, out);
  } else {
    VOXELFIELD_VECTORIZE
    for (int64_t i = 0; i < count; ++i) out[i] = Narrow<scalar_t>::from(values[i]);
  }
}

}  // namespace voxelfield
