// Stamps a module with the digest of the sources it was compiled from, so that a stale binary is recognised unloaded.
#pragma once

#ifndef VOXELFIELD_SOURCE_DIGEST
#error "define VOXELFIELD_SOURCE_DIGEST (voxelfield/_build.py does)"
#endif

#define VOXELFIELD_STRING_(x) #x
#define VOXELFIELD_STRING(x) VOXELFIELD_STRING_(x)

#if defined(_MSC_VER)
#define VOXELFIELD_KEEP __declspec(dllexport)
#else
#define VOXELFIELD_KEEP __attribute__((used))
#endif

#if defined(__CUDACC_VER_MAJOR__)
#define VOXELFIELD_CUDA_MAJOR __CUDACC_VER_MAJOR__
#else
#define VOXELFIELD_CUDA_MAJOR 0
#endif

// The module also says which CUDA it was compiled by: its libcudart must be the one that torch brings (0: none needed).
extern "C" {
extern const char voxelfield_stamp[];
VOXELFIELD_KEEP const char voxelfield_stamp[] =
    "voxelfield-source-digest:" VOXELFIELD_STRING(VOXELFIELD_SOURCE_DIGEST)  //
    ";cuda:" VOXELFIELD_STRING(VOXELFIELD_CUDA_MAJOR) ";";
}
