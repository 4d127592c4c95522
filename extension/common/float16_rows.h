// Rows of float16 to float32 and back, by the processor's own conversions (F16C) where it has them.
//
// Only functions compiled for F16C may contain its instructions, and compilers do not inline such functions into code
// that also runs elsewhere. Hot loops therefore call functions that work through whole rows, by pointers chosen at run
// time.
#pragma once

#include <cstdint>

#include "common/narrow.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define VOXELFIELD_HAS_F16C
// Every processor with AVX2 has FMA and F16C.
#define VOXELFIELD_F16C __attribute__((target("avx2,fma,f16c")))
#endif

namespace voxelfield {

// Whether functions marked VOXELFIELD_F16C run here. ATEN_CPU_CAPABILITY=default in the environment, which keeps
// torch's own kernels to the baseline, says no.
bool runs_f16c();

struct Float16Rows {
  // Converts `count` rows of `length` numbers into rows that follow one another.
  void (*widen)(const Half* const* rows, int count, int64_t length, float* out);
  // Rounds to nearest even.
  void (*narrow)(const float* values, int64_t count, Half* out);
};

// Chosen when the library is loaded.
extern const Float16Rows float16_rows;

}  // namespace voxelfield
