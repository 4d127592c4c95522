// Transfer of the rows of `mlp` between global memory and the registers of a warp.
#pragma once

#include "mlp/fragments.cuh"
#include "mlp/plan.h"

namespace voxelfield {

// The number of rows: `capacity`, or a smaller number that is read on the device.
struct RowCount {
  int capacity;
  const void* count;
  bool wide_count;  // int64, otherwise int32

  __device__ __forceinline__ int used() const {
    if (count == nullptr) return capacity;
    const int64_t value = wide_count ? *static_cast<const int64_t*>(count) : *static_cast<const int32_t*>(count);
    return value < 0 ? 0 : value < capacity ? static_cast<int>(value) : capacity;
  }
};

// A warp's part of an array (N, columns): the rows from `first` to `end`. It is empty if `rows` is not positive.
template <typename pointer_t>
struct WarpRows {
  pointer_t start;
  int rows, columns;

  __device__ __forceinline__ WarpRows(pointer_t array, int first, int end, int columns)
      : start(array + static_cast<int64_t>(first) * columns), rows(end - first), columns(columns) {}
};

// Fetches rows that will be read soon into the L2 cache.
template <int M>
__device__ __forceinline__ void prefetch(const WarpRows<const __half*>& rows) {
  constexpr int kLine = 64;
  const int count = (rows.rows < 16 * M ? rows.rows : 16 * M) * rows.columns;
#pragma unroll 1
  for (int i = lane_of_warp() * kLine; i < count; i += kWarp * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(rows.start + i));
  }
}

// Calls f(m, i, row) for the rows of a thread.
template <int M, typename F>
__device__ __forceinline__ void for_each_row(const F& f) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) f(m, i, 16 * m + 8 * i + lane_of_warp() / 4);
  }
}

// Columns beyond the end are zeros. Rows beyond the end repeat the last row: their activations must not be NaN unless
// those of a row are, because the sums of the weights' gradients multiply them by gradients of zero, and zeros as input
// would give NaN if a weight is infinite in float16.
template <int M>
__device__ __forceinline__ void load_input(const WarpRows<const __half*>& from, int group, Fragment (&tiles)[2][M]) {
  const int column = kInputGroup * group + lane_of_warp() % 4 * kInputWidth;
  for_each_row<M>([&](int m, int i, int row) {
    const __half* const source = from.start + min(row, from.rows - 1) * from.columns + column;
    uint4 own = make_uint4(0, 0, 0, 0);
    if (from.columns % kInputWidth == 0) {
      if (column < from.columns) own = __ldg(reinterpret_cast<const uint4*>(source));
    } else {
      uint2 low = make_uint2(0, 0), high = low;
      if (column < from.columns) low = __ldg(reinterpret_cast<const uint2*>(source));
      if (column + kInputWidth / 2 < from.columns) high = __ldg(reinterpret_cast<const uint2*>(source) + 1);
      own = make_uint4(low.x, low.y, high.x, high.y);
    }
    tiles[0][m].part[i] = own.x;
    tiles[0][m].part[i + 2] = own.y;
    tiles[1][m].part[i] = own.z;
    tiles[1][m].part[i + 2] = own.w;
  });
}

template <int M>
__device__ __forceinline__ void store_input(const Fragment (&tiles)[2][M], const WarpRows<__half*>& to, int group) {
  const int column = kInputGroup * group + lane_of_warp() % 4 * kInputWidth;
  for_each_row<M>([&](int m, int i, int row) {
    if (row >= to.rows || column >= to.columns) return;
    __half* const target = to.start + row * to.columns + column;
    const uint2 low = make_uint2(tiles[0][m].part[i], tiles[0][m].part[i + 2]),
                high = make_uint2(tiles[1][m].part[i], tiles[1][m].part[i + 2]);
    if (to.columns % kInputWidth == 0) {
      *reinterpret_cast<uint4*>(target) = make_uint4(low.x, low.y, high.x, high.y);
    } else {
      reinterpret_cast<uint2*>(target)[0] = low;
      if (column + kInputWidth / 2 < to.columns) reinterpret_cast<uint2*>(target)[1] = high;
    }
  });
}

template <int M>
__device__ __forceinline__ void load_output(const WarpRows<const __half*>& from, int group, bool few,
                                            Fragment (&tiles)[M]) {
  if (few) {
    const int column = lane_of_warp() % 4 * 2;
    unsigned own[M][2][2];
    for_each_row<M>([&](int m, int i, int row) {
      const unsigned short* source = reinterpret_cast<const unsigned short*>(from.start + row * from.columns + column);
      own[m][i][0] = row < from.rows && column < from.columns ? __ldg(source) : 0;
      own[m][i][1] = row < from.rows && column + 1 < from.columns ? __ldg(source + 1) : 0;
    });
    for_each_row<M>([&](int m, int i, int) {
      tiles[m].part[i] = own[m][i][0] | own[m][i][1] << 16;
      tiles[m].part[i + 2] = 0;
    });
    return;
  }
  const int column = kOutputGroup * group + lane_of_warp() % 4 * kOutputWidth;
  for_each_row<M>([&](int m, int i, int row) {
    uint2 own = make_uint2(0, 0);
    if (row < from.rows && column < from.columns) {
      own = __ldg(reinterpret_cast<const uint2*>(from.start + row * from.columns + column));
    }
    tiles[m].part[i] = own.x;
    tiles[m].part[i + 2] = own.y;
  });
}

template <int M>
__device__ __forceinline__ void store_output(const Fragment (&tiles)[M], const WarpRows<__half*>& to, int group,
                                             bool few) {
  const int column = kOutputGroup * group + lane_of_warp() % 4 * (few ? 2 : kOutputWidth);
  for_each_row<M>([&](int m, int i, int row) {
    __half* target = to.start + row * to.columns + column;
    if (!few) {
      if (row < to.rows && column < to.columns) {
        *reinterpret_cast<uint2*>(target) = make_uint2(tiles[m].part[i], tiles[m].part[i + 2]);
      }
    } else {
      if (row < to.rows && column < to.columns) target[0] = __low2half(as_half2(tiles[m].part[i]));
      if (row < to.rows && column + 1 < to.columns) target[1] = __high2half(as_half2(tiles[m].part[i]));
    }
  });
}

// Writes zeros to a warp's 16 * M rows, whose start is aligned to 16 bytes.
template <int M>
__device__ __forceinline__ void clear_rows(const WarpRows<__half*>& to) {
  const int count = (to.rows < 16 * M ? to.rows : 16 * M) * to.columns;
  for (int i = lane_of_warp() * 8; i < count; i += kWarp * 8) {
    if (i + 8 <= count) {
      *reinterpret_cast<uint4*>(to.start + i) = make_uint4(0, 0, 0, 0);
    } else {
      for (int k = i; k < count; ++k) to.start[k] = __ushort_as_half(0);
    }
  }
}

}  // namespace voxelfield
