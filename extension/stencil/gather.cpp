// From vertices to points on the CPU. Sampling computes, for each point and set of weights, a weighted sum of the eight
// corners. The gradient with respect to a point is the derivative of that sum with respect to the point, times the
// incoming gradient, summed over channels.
#include "common/backend.h"
#include "stencil/batches.h"
#include "stencil/stencil_ops.h"

#if defined(VOXELFIELD_HAS_F16C)
#include <immintrin.h>
#endif

namespace voxelfield {
namespace {

// The weighted sum of the corners for each set of weights. It is stored to a row of the result, or with kAdd added to
// the row.
template <bool kAdd, int kSets, typename scalar_t, typename Result, typename T>
struct CornerSum {
  Result* row;     // of the first set
  int64_t stride;  // between the rows of consecutive sets
  const scalar_t* corner[kCorners];
  T weight[kSets][kCorners];

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t first) const {
    for (int set = 0; set < kSets; ++set) {
      Result* out = row + set * stride + first;
      VOXELFIELD_VECTORIZE
      for (int c = 0; c < kWidth; ++c) {
        T sum = kAdd ? widen(out[c]) : T(0);
        for (int k = 0; k < kCorners; ++k) sum += weight[set][k] * widen(corner[k][first + c]);
        out[c] = narrow_to<Result>(sum);
      }
    }
  }
};

// The derivative of that sum with respect to the point, times the incoming gradient `value`, summed over channels.
template <typename scalar_t, typename T>
struct CornerSlope {
  const scalar_t* corner[kCorners];
  T slope[3][kCorners];  // derivatives of the weights of the corners along each axis
  const scalar_t* value;
  T* gradient;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t first) const {
    T x = 0, y = 0, z = 0;
    VOXELFIELD_VECTORIZE_SUM(x, y, z)
    for (int c = 0; c < kWidth; ++c) {
      T along_x = 0, along_y = 0, along_z = 0;
      for (int k = 0; k < kCorners; ++k) {
        const T feature = widen(corner[k][first + c]);
        along_x += slope[0][k] * feature;
        along_y += slope[1][k] * feature;
        along_z += slope[2][k] * feature;
      }
      const T back = widen(value[first + c]);
      x += back * along_x;
      y += back * along_y;
      z += back * along_z;
    }
    gradient[0] += x;
    gradient[1] += y;
    gradient[2] += z;
  }
};

template <typename scalar_t, typename T = opmath_t<scalar_t>>
VOXELFIELD_HOST_DEVICE T dot(const scalar_t* a, const scalar_t* b, int64_t channels) {
  T product = 0;
  VOXELFIELD_VECTORIZE_SUM(product)
  for (int64_t c = 0; c < channels; ++c) product += widen(a[c]) * widen(b[c]);
  return product;
}

// From this number of channels on, it is less work to first sum one product per corner over all channels than to
// compute three sums per channel.
constexpr int64_t kManyChannels = 64;

template <typename scalar_t, typename T>
VOXELFIELD_HOST_DEVICE void add_gradient(const CornerSlope<scalar_t, T>& sum, int64_t channels) {
  if (channels < kManyChannels) return for_each_block(channels, sum);
  for (int k = 0; k < kCorners; ++k) {
    const T product = dot(sum.value, sum.corner[k], channels);
    for (int axis = 0; axis < 3; ++axis) sum.gradient[axis] += sum.slope[axis][k] * product;
  }
}

template <typename Sum>
VOXELFIELD_HOST_DEVICE void sum_corners(const Sum& sum, int64_t channels) {
  for_each_block(channels, sum);
}

#if defined(VOXELFIELD_HAS_F16C)

// Conversion of float16 by the instructions of the processor, in separate functions (see Float16Rows).
const bool uses_f16c = runs_f16c();

// Loads eight or four numbers as a vector, or one number into the first lane of four.
template <int kWidth>
VOXELFIELD_F16C inline auto load(const Half* values) {
  if constexpr (kWidth == 8) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  } else if constexpr (kWidth == 4) {
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
  } else {
    return _mm_cvtph_ps(_mm_cvtsi32_si128(values->x));
  }
}

template <int kWidth>
using Numbers = decltype(load<kWidth>(nullptr));

// Corners are converted once for all sets.
template <int kWidth, bool kAdd, int kSets>
VOXELFIELD_F16C inline void sum_block(const CornerSum<kAdd, kSets, Half, float, float>& sum, int64_t first) {
  Numbers<kWidth> feature[kCorners];
  for (int k = 0; k < kCorners; ++k) feature[k] = load<kWidth>(sum.corner[k] + first);
  for (int set = 0; set < kSets; ++set) {
    float* out = sum.row + set * sum.stride + first;
    Numbers<kWidth> total{};
    if (kAdd) std::memcpy(&total, out, kWidth * sizeof(float));
    for (int k = 0; k < kCorners; ++k) total += sum.weight[set][k] * feature[k];
    std::memcpy(out, &total, kWidth * sizeof(float));
  }
}

template <bool kAdd, int kSets>
VOXELFIELD_F16C void sum_by_f16c(const CornerSum<kAdd, kSets, Half, float, float>& sum, int64_t channels) {
  int64_t c = 0;
  for (; c + 8 <= channels; c += 8) sum_block<8>(sum, c);
  if (channels & 4) {
    sum_block<4>(sum, c);
    c += 4;
  }
  for (; c < channels; ++c) sum_block<1>(sum, c);
}

template <bool kAdd, int kSets>
VOXELFIELD_HOST_DEVICE void sum_corners(const CornerSum<kAdd, kSets, Half, float, float>& sum, int64_t channels) {
  uses_f16c ? sum_by_f16c(sum, channels) : for_each_block(channels, sum);
}

VOXELFIELD_F16C inline __m128 sum_lanes(__m128 a, __m128 b, __m128 c, __m128 d) {
  return _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d));
}

VOXELFIELD_F16C inline __m128 halves_added(__m256 x) {
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

template <int kWidth>
VOXELFIELD_F16C inline void add_products(const CornerSlope<Half, float>& sum, int64_t first, Numbers<kWidth>* product) {
  const auto factor = load<kWidth>(sum.value + first);
  for (int k = 0; k < kCorners; ++k) product[k] += factor * load<kWidth>(sum.corner[k] + first);
}

// The products with the eight corners are summed over channels first, which takes one conversion and one multiply-add
// per number that is read.
VOXELFIELD_F16C void add_gradient_by_f16c(const CornerSlope<Half, float>& sum, int64_t channels) {
  __m256 wide[kCorners] = {};
  int64_t c = 0;
  for (; c + 8 <= channels; c += 8) add_products<8>(sum, c, wide);
  __m128 product[kCorners], along[3];
  for (int k = 0; k < kCorners; ++k) product[k] = halves_added(wide[k]);
  if (channels & 4) {
    add_products<4>(sum, c, product);
    c += 4;
  }
  for (; c < channels; ++c) add_products<1>(sum, c, product);
  const __m256 products = _mm256_set_m128(sum_lanes(product[4], product[5], product[6], product[7]),
                                          sum_lanes(product[0], product[1], product[2], product[3]));
  for (int axis = 0; axis < 3; ++axis) {
    along[axis] = halves_added(_mm256_mul_ps(products, _mm256_loadu_ps(sum.slope[axis])));
  }
  float total[4];
  _mm_storeu_ps(total, sum_lanes(along[0], along[1], along[2], along[2]));
  for (int axis = 0; axis < 3; ++axis) sum.gradient[axis] += total[axis];
}

VOXELFIELD_HOST_DEVICE void add_gradient(const CornerSlope<Half, float>& sum, int64_t channels) {
  uses_f16c ? add_gradient_by_f16c(sum, channels) : add_gradient<Half, float>(sum, channels);
}

#endif

// The corners of a batch of points with few channels.
struct CornerArrays {
  int32_t offset[kCorners][kPointsPerBatch];
  float weight[kCorners][kPointsPerBatch];
  int32_t empty[kPointsPerBatch];

  VOXELFIELD_HOST_DEVICE void set(int64_t i, const Stencil<float>& s) {
    empty[i] = s.empty;
    for (int k = 0; k < kCorners; ++k) {
      offset[k][i] = static_cast<int32_t>(s.offset(k));
      weight[k][i] = s.value(k);
    }
  }

  template <int kChannels>
  VOXELFIELD_HOST_DEVICE void sum(const float* data, int64_t count, float* row, int64_t columns) const {
    for (int c = 0; c < kChannels; ++c) {
      VOXELFIELD_VECTORIZE
      for (int64_t i = 0; i < count; ++i) {
        float sum = 0;
        for (int k = 0; k < kCorners; ++k) sum += weight[k][i] * data[offset[k][i] + c];
        // Values read for an empty stencil may be NaN, and a weight of zero would not remove them.
        row[i * columns + c] = empty[i] ? 0.f : sum;
      }
    }
  }
};

// Samples one level with few channels at a batch of points, all in one grid or in several of a batch of grids.
VOXELFIELD_HOST_DEVICE void gather_few(Level<GridLocator<float>, const float> level, const float* points, int64_t first,
                                       int64_t count, float* out, int64_t columns) {
  const int64_t share = level.locator.points_per_grid, size = level.locator.vertices(share) * level.locator.channels;
  level.locator.points_per_grid = 0;
  CornerArrays corners;
  for (const int64_t end = first + count; first < end; first += count) {
    const int64_t grid = share > 0 ? first / share : 0;
    count = share > 0 ? std::min(end, (grid + 1) * share) - first : end - first;
    locate(level.locator, points, Consecutive{first}, count, &corners);
    const float* const data = level.data + grid * size;
    float* const row = out + first * columns + level.column;
    switch (level.locator.channels) {
      case 1: corners.sum<1>(data, count, row, columns); break;
      case 2: corners.sum<2>(data, count, row, columns); break;
      default: corners.sum<3>(data, count, row, columns);
    }
  }
}

template <bool kAdd, int kSets, typename scalar_t, typename Result, typename T>
VOXELFIELD_HOST_DEVICE void gather_rows(const scalar_t* data, const Stencil<T>& s, int64_t channels, Result* row,
                                        int64_t stride) {
  if (s.empty) {
    for (int set = 0; set < kSets && !kAdd; ++set) std::fill_n(row + set * stride, channels, Result(0));
    return;
  }
  CornerSum<kAdd, kSets, scalar_t, Result, T> sum;
  sum.row = row;
  sum.stride = stride;
  for (int k = 0; k < kCorners; ++k) {
    sum.corner[k] = data + s.offset(k);
    for (int set = 0; set < kSets; ++set) sum.weight[set][k] = s.corner_weight(k, set);
  }
  sum_corners(sum, channels);
}

// `total` holds the rows of a batch, (kSets, kPointsPerBatch, columns). Levels that are added up are summed there and
// rounded once, and float16 rows are rounded together.
template <int kSets, typename Locator, typename scalar_t, typename T>
VOXELFIELD_MULTIVERSION void gather_range(const Levels<Locator, const scalar_t>& levels, const PointsView<T, kSets>& at,
                                          scalar_t* out, int64_t begin, int64_t end, T* total) {
  const int64_t columns = levels.columns, total_stride = kPointsPerBatch * columns;
  Stencil<T> stencils[kPointsPerBatch];
  for (int64_t first = begin; first < end; first += kPointsPerBatch) {
    const int64_t count = std::min(kPointsPerBatch, end - first);
    if (levels.sum) std::fill_n(total, kSets * total_stride, T(0));
    for (const auto& level : levels) {
      const int64_t channels = level.locator.channels;
      if constexpr (kVectorisesPoints<kSets, scalar_t> && std::is_same_v<Locator, GridLocator<float>>) {
        if (!levels.sum && channels <= kMaxPointwiseChannels && level.locator.fits_32_bits()) {
          gather_few(level, at.points, first, count, out, columns);
          continue;
        }
      }
      locate(level.locator, at.points, Consecutive{first}, count, stencils);
      prefetch_corners(level.locator, level.data, stencils, count);
      for (int64_t i = 0; i < count; ++i) {
        T* const total_row = total + i * columns + level.column;
        if (levels.sum) {
          gather_rows<true, kSets>(level.data, stencils[i], channels, total_row, total_stride);
        } else if constexpr (kConvertsRows<scalar_t>) {
          gather_rows<false, kSets>(level.data, stencils[i], channels, total_row, total_stride);
        } else {
          scalar_t* const row = out + (first + i) * columns + level.column;
          gather_rows<false, kSets>(level.data, stencils[i], channels, row, at.count * columns);
        }
      }
    }
    if (!levels.sum && !kConvertsRows<scalar_t>) continue;
    for (int set = 0; set < kSets; ++set) {
      round_values(total + set * total_stride, count * columns, out + (set * at.count + first) * columns);
    }
  }
}

template <int kSets, typename Locator, typename scalar_t, typename T>
VOXELFIELD_MULTIVERSION void point_gradient_range(const Levels<Locator, const scalar_t>& levels, const scalar_t* values,
                                                  const PointsView<T, kSets>& at, T* out, int64_t begin, int64_t end) {
  std::fill(out + 3 * begin, out + 3 * end, T(0));
  Stencil<T> stencils[kPointsPerBatch];
  for (int64_t first = begin; first < end; first += kPointsPerBatch) {
    const int64_t count = std::min(kPointsPerBatch, end - first);
    for (const auto& level : levels) {
      locate(level.locator, at.points, Consecutive{first}, count, stencils);
      prefetch_corners(level.locator, level.data, stencils, count);
      for (int64_t i = 0; i < count; ++i) {
        const Stencil<T>& s = stencils[i];
        if (s.empty) continue;
        for (int set = 0; set < kSets; ++set) {
          CornerSlope<scalar_t, T> sum;
          sum.value = values + (set * at.count + first + i) * levels.columns + level.column;
          sum.gradient = out + 3 * (first + i);
          for (int k = 0; k < kCorners; ++k) {
            sum.corner[k] = level.data + s.offset(k);
            for (int axis = 0; axis < 3; ++axis) sum.slope[axis][k] = s.corner_slope(k, axis, set);
          }
          add_gradient(sum, level.locator.channels);
        }
      }
    }
  }
}

struct Cpu : CpuBackend {
  template <int kSets, typename Locator, typename scalar_t, typename T>
  static void gather(const Levels<Locator, const scalar_t>& levels, const PointsView<T, kSets>& at, scalar_t* out) {
    ask_for_huge_pages(out, kSets * at.count * levels.columns * sizeof(scalar_t));
    const bool totals = levels.sum || kConvertsRows<scalar_t>;
    for_each_range(at.count, kPointsPerTask, [&](int64_t begin, int64_t end) {
      std::vector<T> total(totals ? kSets * kPointsPerBatch * levels.columns : 0);
      gather_range(levels, at, out, begin, end, total.data());
    });
  }

  template <int kSets, typename Locator, typename scalar_t, typename T>
  static void point_gradient(const Levels<Locator, const scalar_t>& levels, const scalar_t* values,
                             const PointsView<T, kSets>& at, T* out) {
    for_each_range(at.count, kPointsPerTask,
                   [&](int64_t begin, int64_t end) { point_gradient_range(levels, values, at, out, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { StencilOps<Cpu>::implement_gather(m); }

}  // namespace voxelfield
