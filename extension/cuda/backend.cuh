// What every CUDA backend shares: the device, its stream, launch checks, vector access and vector atomics.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>

#include "../tensors.h"

namespace voxelfield {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

struct CudaBackend {
  struct Guard {
    torch::stable::accelerator::DeviceGuard device;
    explicit Guard(const Tensor& like) : device(like.get_device_index()) {}
  };

  // The caller holds a Guard, so the current device is the tensors' own.
  static cudaStream_t stream() {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(torch::stable::accelerator::getCurrentDeviceIndex(), &stream));
    return static_cast<cudaStream_t>(stream);
  }

  static unsigned blocks(int64_t items, int64_t per_block) {
    const int64_t count = (items + per_block - 1) / per_block;
    STD_TORCH_CHECK(count <= 0x7fffffff, "too many items for one launch: ", items);
    return static_cast<unsigned>(count);
  }
};

// `Width` consecutive elements, moved in one access.
template <typename scalar_t, int Width>
struct alignas(sizeof(scalar_t) * Width) Vector {
  scalar_t lane[Width];
};

template <int Width, typename scalar_t>
__device__ __forceinline__ Vector<scalar_t, Width> load(const scalar_t* address) {
  return *reinterpret_cast<const Vector<scalar_t, Width>*>(address);
}

template <int Width, typename scalar_t>
__device__ __forceinline__ void store(scalar_t* address, const Vector<scalar_t, Width>& value) {
  *reinterpret_cast<Vector<scalar_t, Width>*>(address) = value;
}

// Vector atomics exist for float32 from sm_90 on. VOXELFIELD_SCALAR_ATOMICS forces the older devices' path for tests.
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

// The widest access, up to 16 bytes, that divides the channel count and suits every pointer's alignment.
template <typename scalar_t, typename F>
void dispatch_width(int64_t channels, std::initializer_list<const void*> pointers, const F& f) {
  constexpr int kWidest = 16 / sizeof(scalar_t);
  const auto fits = [&](int width) {
    if (channels % width != 0) return false;
    for (const void* pointer : pointers) {
      if (reinterpret_cast<uintptr_t>(pointer) % (width * sizeof(scalar_t)) != 0) return false;
    }
    return true;
  };
  if constexpr (kWidest >= 8) {
    if (fits(8)) return f(std::integral_constant<int, 8>{});
  }
  if constexpr (kWidest >= 4) {
    if (fits(4)) return f(std::integral_constant<int, 4>{});
  }
  if (fits(2)) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

}  // namespace voxelfield
