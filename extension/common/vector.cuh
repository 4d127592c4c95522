// Vector access to memory and vector atomics.
#pragma once

#include <cuda_runtime.h>

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

// The built-in type of a vector's size.
template <int Bytes>
struct Word;
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <int Width, typename scalar_t>
__device__ __forceinline__ Vector<scalar_t, Width> load(const scalar_t* address) {
  return *reinterpret_cast<const Vector<scalar_t, Width>*>(address);
}

// Loads from memory that nothing writes while the kernel runs.
template <int Width, typename scalar_t>
__device__ __forceinline__ Vector<scalar_t, Width> load_constant(const scalar_t* address) {
  using word_t = typename Word<Width * sizeof(scalar_t)>::type;
  const word_t word = __ldg(reinterpret_cast<const word_t*>(address));
  Vector<scalar_t, Width> value;
  memcpy(&value, &word, sizeof(word));
  return value;
}

template <typename scalar_t, int Width>
__device__ __forceinline__ void store(scalar_t* address, const Vector<scalar_t, Width>& value) {
  *reinterpret_cast<Vector<scalar_t, Width>*>(address) = value;
}

// Stores to global memory in one access; the compiler may split a plain store into stores of the elements.
template <typename scalar_t, int Width>
__device__ __forceinline__ void store_global(scalar_t* address, const Vector<scalar_t, Width>& value) {
  typename Word<Width * sizeof(scalar_t)>::type word;
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

// Vector atomics exist for float32 from sm_90 on. Older GPUs add one element at a time, and so does every GPU if
// VOXELFIELD_SCALAR_ATOMICS is defined, for tests.
#if __CUDA_ARCH__ >= 900 && !defined(VOXELFIELD_SCALAR_ATOMICS)
#define VOXELFIELD_VECTOR_ATOMICS 1
#else
#define VOXELFIELD_VECTOR_ATOMICS 0
#endif

template <int Width, typename T>
__device__ __forceinline__ void atomic_add(T* address, const Vector<T, Width>& value) {
#if VOXELFIELD_VECTOR_ATOMICS
  constexpr bool kFloat = std::is_same_v<T, float>;
#else
  constexpr bool kFloat = false;
#endif
  if constexpr (kFloat && Width % 4 == 0) {
#pragma unroll
    for (int i = 0; i < Width; i += 4) {
      atomicAdd(reinterpret_cast<float4*>(address + i),
                make_float4(value.lane[i], value.lane[i + 1], value.lane[i + 2], value.lane[i + 3]));
    }
  } else if constexpr (kFloat && Width == 2) {
    atomicAdd(reinterpret_cast<float2*>(address), make_float2(value.lane[0], value.lane[1]));
  } else {
#pragma unroll
    for (int i = 0; i < Width; ++i) atomicAdd(address + i, value.lane[i]);
  }
}

}  // namespace voxelfield
