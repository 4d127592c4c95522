// Conversions of float16 rows, with F16C and in the portable form of narrow.h. Both give the same bits.
#include "common/narrow.h"

#include <cstdlib>
#include <cstring>

#if defined(VOXELFIELD_HAS_F16C)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace voxelfield {
namespace {

VOXELFIELD_MULTIVERSION void widen_portably(const Half* const* rows, int count, int64_t length, float* out) {
  for (int row = 0; row < count; ++row) {
    const Half* values = rows[row];
    float* to = out + row * length;
    VOXELFIELD_VECTORIZE
    for (int64_t i = 0; i < length; ++i) to[i] = widen(values[i]);
  }
}

VOXELFIELD_MULTIVERSION void narrow_portably(const float* values, int64_t count, Half* out) {
  VOXELFIELD_VECTORIZE
  for (int64_t i = 0; i < count; ++i) out[i] = narrow_to<Half>(values[i]);
}

#if defined(VOXELFIELD_HAS_F16C)

VOXELFIELD_F16C void widen_by_f16c(const Half* const* rows, int count, int64_t length, float* out) {
  for (int row = 0; row < count; ++row) {
    const Half* values = rows[row];
    float* to = out + row * length;
    int64_t i = 0;
    for (; i + 8 <= length; i += 8) {
      const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values + i));
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(eight));
    }
    if (length & 4) {
      const __m128i four = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + i));
      _mm_storeu_ps(to + i, _mm_cvtph_ps(four));
      i += 4;
    }
    for (; i < length; ++i) to[i] = _cvtsh_ss(values[i].x);
  }
}

VOXELFIELD_F16C void narrow_by_f16c(const float* values, int64_t count, Half* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), eight);
  }
  for (; i < count; ++i) out[i].x = _cvtss_sh(values[i], _MM_FROUND_TO_NEAREST_INT);
}

#endif

}  // namespace

bool runs_f16c() {
#if defined(VOXELFIELD_HAS_F16C)
  const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
  if (capability != nullptr && std::strcmp(capability, "default") == 0) return false;
  // Only recent compilers support F16C in __builtin_cpu_supports. The check for AVX2 also covers whether the operating
  // system saves the registers.
  __builtin_cpu_init();
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

const Float16Rows float16_rows = [] {
#if defined(VOXELFIELD_HAS_F16C)
  if (runs_f16c()) return Float16Rows{widen_by_f16c, narrow_by_f16c};
#endif
  return Float16Rows{widen_portably, narrow_portably};
}();

}  // namespace voxelfield
