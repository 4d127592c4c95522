// One binary, several instruction sets: hot loops are compiled for baseline x86-64, AVX2 and AVX-512 and chosen at
// load.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && defined(__linux__)
#define VOXELFIELD_MULTIVERSION __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VOXELFIELD_MULTIVERSION
#endif

// `omp simd` is a promise that iterations are independent (or only sum into the named variable); no OpenMP runtime.
#define VOXELFIELD_PRAGMA_(x) _Pragma(#x)
#define VOXELFIELD_VECTORIZE VOXELFIELD_PRAGMA_(omp simd)
#define VOXELFIELD_VECTORIZE_SUM(variable) VOXELFIELD_PRAGMA_(omp simd reduction(+ : variable))
