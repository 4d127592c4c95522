// What every CUDA backend shares: the device, its stream and the size of a launch.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>

#include "common/tensors.h"
#include "common/vector.cuh"

namespace voxelfield {

constexpr int kThreads = 256;

inline void check_cuda(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error));
}

// Of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

template <typename F>
__global__ void __launch_bounds__(kThreads) for_each_kernel(int64_t n, F f) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) f(i);
}

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

  // Launches a kernel on the current stream, and checks the launch.
  template <typename... Parameters, typename... Arguments>
  static void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, int shared,
                     const Arguments&... arguments) {
    kernel<<<blocks, threads, shared, stream()>>>(arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // Calls f(i) for every i in [0, n), each in a thread of its own. F is a struct whose operator() is
  // VOXELFIELD_HOST_DEVICE, so that it serves CpuBackend too.
  template <typename F>
  static void for_each(int64_t n, const F& f) {
    if (n > 0) launch(for_each_kernel<F>, blocks(n, kThreads), kThreads, 0, n, f);
  }
};

}  // namespace voxelfield
