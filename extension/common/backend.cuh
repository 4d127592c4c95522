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

}  // namespace voxelfield
