// Vector access to memory, and vector atomics.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace voxelfield {

constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// `Width` consecutive elements, moved in one access.
template <typename scalar_t, int Width>
struct alignas(sizeof(scalar_t) * Width) Vector {
  scalar_t lane[Width];

  __device__ __forceinline__ Vector& operator+=(const Vector& other) {
#pragma unroll
    for (int i = 0; i < Width; ++i) lane[i] += other.lane[i];
    return *this;
  }
};

// The built-in type with the size of a vector.
template <int Bytes>
using Word = std::conditional_t<
    Bytes == 16, uint4,
    std::conditional_t<Bytes == 8, uint2,
                       std::conditional_t<Bytes == 4, unsigned, std::conditional_t<Bytes == 2, unsigned short, void>>>>;

template <int Width, typename scalar_t>
__device__ __forceinline__ Vector<scalar_t, Width> load(const scalar_t* address) {
  return *reinterpret_cast<const Vector<scalar_t, Width>*>(address);
}

// Loads from memory that is not written while the kernel runs.
template <int Width, typename scalar_t>
__device__ __forceinline__ Vector<scalar_t, Width> load_constant(const scalar_t* address) {
  const auto word = __ldg(reinterpret_cast<const Word<Width * sizeof(scalar_t)>*>(address));
  Vector<scalar_t, Width> value;
  memcpy(&value, &word, sizeof(word));
  return value;
}

template <typename scalar_t, int Width>
__device__ __forceinline__ void store(scalar_t* address, const Vector<scalar_t, Width>& value) {
  *reinterpret_cast<Vector<scalar_t, Width>*>(address) = value;
}

// Stores to global memory in one access. The compiler may split a plain store into stores of single elements.
template <typename scalar_t, int Width>
__device__ __forceinline__ void store_global(scalar_t* address, const Vector<scalar_t, Width>& value) {
  Word<Width * sizeof(scalar_t)> word;
  memcpy(&word, &value, sizeof(word));
  __stwb(reinterpret_cast<decltype(word)*>(address), word);
}

template <typename scalar_t, int Width, typename T>
__device__ __forceinline__ Vector<scalar_t, Width> narrow(const Vector<T, Width>& wide) {
  Vector<scalar_t, Width> result;
#pragma unroll
  for (int i = 0; i < Width; ++i) result.lane[i] = static_cast<scalar_t>(wide.lane[i]);
  return result;
}

// sum += weight * value
template <typename scalar_t, int Width, typename T>
__device__ __forceinline__ void add_weighted(Vector<T, Width>& sum, T weight, const Vector<scalar_t, Width>& value) {
#pragma unroll
  for (int i = 0; i < Width; ++i) sum.lane[i] += weight * static_cast<T>(value.lane[i]);
}

// Vector atomics exist for float32 from sm_90 on. Older GPUs add one element at a time. VOXELFIELD_SCALAR_ATOMICS
// selects this form on every GPU, for tests.
#if __CUDA_ARCH__ >= 900 && !defined(VOXELFIELD_SCALAR_ATOMICS)
#define VOXELFIELD_VECTOR_ATOMICS 1
#else
#define VOXELFIELD_VECTOR_ATOMICS 0
#endif

template <int Width, typename T>
__device__ __forceinline__ void atomic_add(T* address, const Vector<T, Width>& value) {
  constexpr bool kVectors = VOXELFIELD_VECTOR_ATOMICS && std::is_same_v<T, float>;
  if constexpr (kVectors && Width % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Width; i += 4) {
      atomicAdd(reinterpret_cast<float4*>(address + i),
                make_float4(value.lane[i], value.lane[i + 1], value.lane[i + 2], value.lane[i + 3]));
    }
  } else if constexpr (kVectors && Width == 2) {
    atomicAdd(reinterpret_cast<float2*>(address), make_float2(value.lane[0], value.lane[1]));
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) atomicAdd(address + i, value.lane[i]);
  }
}

}  // namespace voxelfield
