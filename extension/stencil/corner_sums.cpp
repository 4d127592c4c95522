// Arithmetic with float16 corners: with F16C, and in portable form.
#include "stencil/corner_sums.h"

#include "common/narrow.h"

#if defined(VOXELFIELD_HAS_F16C)
#include <immintrin.h>
#endif

namespace voxelfield {
namespace {

template <bool kAdd>
VOXELFIELD_MULTIVERSION void sum_portably(const Half* const* corner, const float* weight, int sets, int64_t channels,
                                          float* row, int64_t stride) {
  CornerSum<kAdd, Half, float, float> sum;
  for (int k = 0; k < kCorners; ++k) sum.corner[k] = corner[k];
  for (int set = 0; set < sets; ++set) {
    sum.weight = weight + set * kCorners;
    sum.row = row + set * stride;
    for_each_piece(channels, sum);
  }
}

VOXELFIELD_MULTIVERSION void add_gradient_portably(const CornerSlope<Half, float>& sum, int64_t channels) {
  if (channels < kManyChannels) return for_each_piece(channels, sum);
  for (int k = 0; k < kCorners; ++k) {
    const float product = dot(sum.value, sum.corner[k], channels);
    for (int axis = 0; axis < 3; ++axis) sum.gradient[axis] += sum.slope[axis][k] * product;
  }
}

#if defined(VOXELFIELD_HAS_F16C)

VOXELFIELD_F16C inline __m256 load_eight(const Half* values) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
}

VOXELFIELD_F16C inline __m128 load_four(const Half* values) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(values)));
}

// The other lanes are zero.
VOXELFIELD_F16C inline __m128 load_one(const Half* value) { return _mm_cvtph_ps(_mm_cvtsi32_si128(value->x)); }

// Corners are converted once for all sets.
template <bool kAdd>
VOXELFIELD_F16C void sum_by_f16c(const Half* const* corner, const float* weight, int sets, int64_t channels, float* row,
                                 int64_t stride) {
  int64_t c = 0;
  for (; c + 8 <= channels; c += 8) {
    __m256 feature[kCorners];
    for (int k = 0; k < kCorners; ++k) feature[k] = load_eight(corner[k] + c);
    for (int set = 0; set < sets; ++set) {
      float* out = row + set * stride + c;
      __m256 sum = kAdd ? _mm256_loadu_ps(out) : _mm256_setzero_ps();
      for (int k = 0; k < kCorners; ++k) {
        sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weight + set * kCorners + k), feature[k], sum);
      }
      _mm256_storeu_ps(out, sum);
    }
  }
  if (channels & 4) {
    __m128 feature[kCorners];
    for (int k = 0; k < kCorners; ++k) feature[k] = load_four(corner[k] + c);
    for (int set = 0; set < sets; ++set) {
      float* out = row + set * stride + c;
      __m128 sum = kAdd ? _mm_loadu_ps(out) : _mm_setzero_ps();
      for (int k = 0; k < kCorners; ++k) {
        sum = _mm_fmadd_ps(_mm_broadcast_ss(weight + set * kCorners + k), feature[k], sum);
      }
      _mm_storeu_ps(out, sum);
    }
    c += 4;
  }
  for (; c < channels; ++c) {
    float feature[kCorners];
    for (int k = 0; k < kCorners; ++k) feature[k] = _cvtsh_ss(corner[k][c].x);
    for (int set = 0; set < sets; ++set) {
      float* out = row + set * stride + c;
      float sum = kAdd ? *out : 0.0f;
      for (int k = 0; k < kCorners; ++k) sum += weight[set * kCorners + k] * feature[k];
      *out = sum;
    }
  }
}

// The sums over lanes of four vectors.
VOXELFIELD_F16C inline __m128 sum_lanes(__m128 a, __m128 b, __m128 c, __m128 d) {
  return _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d));
}

VOXELFIELD_F16C inline __m128 halves_added(__m256 x) {
  return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
}

VOXELFIELD_F16C inline __m256 product_sums(const Half* const* corner, const Half* value, int64_t channels) {
  __m256 wide[kCorners];
  for (int k = 0; k < kCorners; ++k) wide[k] = _mm256_setzero_ps();
  int64_t c = 0;
  for (; c + 8 <= channels; c += 8) {
    const __m256 factor = load_eight(value + c);
    for (int k = 0; k < kCorners; ++k) wide[k] = _mm256_fmadd_ps(factor, load_eight(corner[k] + c), wide[k]);
  }
  __m128 sum[kCorners];
  for (int k = 0; k < kCorners; ++k) sum[k] = halves_added(wide[k]);
  if (channels & 4) {
    const __m128 factor = load_four(value + c);
    for (int k = 0; k < kCorners; ++k) sum[k] = _mm_fmadd_ps(factor, load_four(corner[k] + c), sum[k]);
    c += 4;
  }
  for (; c < channels; ++c) {
    const __m128 factor = load_one(value + c);
    for (int k = 0; k < kCorners; ++k) sum[k] = _mm_fmadd_ps(factor, load_one(corner[k] + c), sum[k]);
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
