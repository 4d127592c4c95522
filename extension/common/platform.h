// Macros that let one source serve host and device compilers and several instruction sets.
#pragma once

#if defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
#include <xmmintrin.h>
#endif

#if defined(__CUDACC__)
#define VOXELFIELD_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(_MSC_VER)
#define VOXELFIELD_HOST_DEVICE __forceinline
#else
#define VOXELFIELD_HOST_DEVICE inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define VOXELFIELD_UNROLL _Pragma("unroll")
#else
#define VOXELFIELD_UNROLL
#endif

// Hot loops are compiled for baseline x86-64, AVX2 and AVX-512, and one version is selected when the library is loaded.
// The functions that they call must be inlined (VOXELFIELD_HOST_DEVICE does this) or be multiversioned themselves.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && defined(__linux__)
#define VOXELFIELD_MULTIVERSION __attribute__((noinline, target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VOXELFIELD_MULTIVERSION
#endif

// `omp simd` asserts that iterations are independent, or only add to the named variables. It needs no OpenMP runtime.
#define VOXELFIELD_PRAGMA_(x) _Pragma(#x)
#if defined(__CUDACC__)
#define VOXELFIELD_VECTORIZE VOXELFIELD_UNROLL
#else
#define VOXELFIELD_VECTORIZE VOXELFIELD_PRAGMA_(omp simd)
#endif
#define VOXELFIELD_VECTORIZE_SUM(...) VOXELFIELD_PRAGMA_(omp simd reduction(+ : __VA_ARGS__))

// Prefetches the cache line of an address that will be read soon.
#if defined(__GNUC__)
#define VOXELFIELD_PREFETCH(address) __builtin_prefetch(address)
#elif defined(_MSC_VER) && (defined(_M_X64) || defined(_M_IX86))
#define VOXELFIELD_PREFETCH(address) _mm_prefetch(reinterpret_cast<const char*>(address), _MM_HINT_T0)
#else
#define VOXELFIELD_PREFETCH(address) static_cast<void>(address)
#endif
