// How one source serves host and device compilers.
#pragma once

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
