// Arithmetic with float16 corners: with F16C, and in portable form.
#include <cstring>

#include "common/narrow.h"
#include "stencil/batches.h"

#if defined(VOXELFIELD_HAS_F16C)
#include <immintrin.h>
#endif

namespace voxelfield {
namespace {

template <bool kAdd>
VOXELFIELD_MULTIVERSION void sum_portably(const Half* const* corner, const float* weight, int sets, int64_t channels,
                                          float* row, int64_t stride) {
  sum_corners<kAdd>(corner, weight, sets, channels, row, stride);
}

VOXELFIELD_MULTIVERSION void add_gradient_portably(const CornerSlope<Half, float>& sum, int64_t channels) {
  add_gradient(sum, channels);
}

#if defined(VOXELFIELD_HAS_F16C)

// Eight or four numbers as a vector, or one as a float.
template <int kWidth>
VOXELFIELD_F16C inline auto load(const Half* values) {
  if constexpr (kWidth == 8) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  } else if constexpr (kWidth == 4) {
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
  } else {
    return _cvtsh_ss(values->x);
  }
}

template <int kWidth>
using Numbers = decltype(load<kWidth>(nullptr));

// Corners are converted once for all sets.
template <bool kAdd, int kWidth>
VOXELFIELD_F16C inline void sum_block(const Half* const* corner, const float* weight, int sets, int64_t first,
                                      float* row, int64_t stride) {
  Numbers<kWidth> feature[kCorners];
  for (int k = 0; k < kCorners; ++k) feature[k] = load<kWidth>(corner[k] + first);
  for (int set = 0; set < sets; ++set) {
    float* out = row + set * stride + first;
    Numbers<kWidth> sum{};
    if (kAdd) std::memcpy(&sum, out, sizeof(sum));
    for (int k = 0; k < kCorners; ++k) sum += weight[set * kCorners + k] * feature[k];
    std::memcpy(out, &sum, sizeof(sum));
  }
}

template <bool kAdd>
VOXELFIELD_F16C void sum_by_f16c(const Half* const* corner, const float* weight, int sets, int64_t channels, float* row,
                                 int64_t stride) {
  int64_t c = 0;
  for (; c + 8 <= channels; c += 8) sum_block<kAdd, 8>(corner, weight, sets, c, row, stride);
  if (channels & 4) {
    sum_block<kAdd, 4>(corner, weight, sets, c, row, stride);
    c += 4;
  }
  for (; c < channels; ++c) sum_block<kAdd, 1>(corner, weight, sets, c, row, stride);
}

// The sums over lanes of four vectors.
VOXELFIELD_F16C inline __m128 sum_lanes(__m128 a, __m128 b, __m128 c, __m128 d) {
  return _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d));
}

VOXELFIELD_F16C inline __m128 halves_added(__m256 x) {
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

template <int kWidth>
VOXELFIELD_F16C inline void add_products(const Half* const* corner, const Half* value, int64_t first,
                                         Numbers<kWidth>* sum) {
  const auto factor = load<kWidth>(value + first);
  for (int k = 0; k < kCorners; ++k) sum[k] += factor * load<kWidth>(corner[k] + first);
}

VOXELFIELD_F16C inline __m256 product_sums(const Half* const* corner, const Half* value, int64_t channels) {
  __m256 wide[kCorners] = {};
  int64_t c = 0;
  for (; c + 8 <= channels; c += 8) add_products<8>(corner, value, c, wide);
  __m128 sum[kCorners];
  for (int k = 0; k < kCorners; ++k) sum[k] = halves_added(wide[k]);
  if (channels & 4) {
    add_products<4>(corner, value, c, sum);
    c += 4;
  }
  for (; c < channels; ++c) {
    for (int k = 0; k < kCorners; ++k) sum[k][0] += load<1>(value + c) * load<1>(corner[k] + c);
  }
  return _mm256_set_m128(sum_lanes(sum[4], sum[5], sum[6], sum[7]), sum_lanes(sum[0], sum[1], sum[2], sum[3]));
}

// The products with the eight corners are summed over channels first: a conversion and one sum for each number read.
VOXELFIELD_F16C void add_gradient_by_f16c(const CornerSlope<Half, float>& sum, int64_t channels) {
  const __m256 product = product_sums(sum.corner, sum.value, channels);
  __m128 along[3];
  for (int axis = 0; axis < 3; ++axis) {
    along[axis] = halves_added(_mm256_mul_ps(product, _mm256_loadu_ps(sum.slope[axis])));
  }
  float total[4];
  _mm_storeu_ps(total, sum_lanes(along[0], along[1], along[2], along[2]));
  for (int axis = 0; axis < 3; ++axis) sum.gradient[axis] += total[axis];
}

#endif

}  // namespace

const Float16Corners float16_corners = [] {
#if defined(VOXELFIELD_HAS_F16C)
  if (runs_f16c()) return Float16Corners{sum_by_f16c<false>, sum_by_f16c<true>, add_gradient_by_f16c};
#endif
  return Float16Corners{sum_portably<false>, sum_portably<true>, add_gradient_portably};
}();

}  // namespace voxelfield
