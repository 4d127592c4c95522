// The stamp of a module: the loader reads it from the unloaded file to tell whether the binary fits the sources and the
// GPUs at hand. voxelfield/_build/sources.py reads it, and writes the translation unit that includes this header.
#pragma once

#ifndef VOXELFIELD_STAMP
#error "VOXELFIELD_STAMP is not defined: voxelfield/_build/sources.py writes the file that includes this header"
#endif

#define VOXELFIELD_STRING_(x) #x
#define VOXELFIELD_STRING(x) VOXELFIELD_STRING_(x)

#if defined(_MSC_VER)
#define VOXELFIELD_KEEP __declspec(dllexport)
#else
#define VOXELFIELD_KEEP __attribute__((used))
#endif

// The CUDA half holds the CUDA runtime of its compiler, which needs a driver of the same major version or later.
#if defined(__CUDACC_VER_MAJOR__)
#define VOXELFIELD_CUDA_MAJOR __CUDACC_VER_MAJOR__
#else
#define VOXELFIELD_CUDA_MAJOR 0
#endif

// Not const: a constant would also need a declaration, which compilers want with the attribute (MSVC) or without it.
extern "C" {
VOXELFIELD_KEEP char voxelfield_stamp[] = VOXELFIELD_STAMP "cuda:" VOXELFIELD_STRING(VOXELFIELD_CUDA_MAJOR) ";";
}
