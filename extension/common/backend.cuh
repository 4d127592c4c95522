// Shared by all CUDA backends: the device, its stream, launch sizes and launch limits. Only this file queries the
// device. Results are cached, because a driver query takes microseconds.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/macros.h>

#include <cerrno>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <string>

#include "common/constants.h"
#include "common/tensors.h"
#include "common/vector.cuh"

namespace voxelfield {

constexpr int kThreads = 256;

inline void check_cuda(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA error: ", cudaGetErrorString(error));
}

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

  // The caller holds a Guard, so the current device is the device of the tensors.
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

  template <typename... Parameters, typename... Arguments>
  static void launch(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int shared,
                     const Arguments&... arguments) {
    kernel<<<blocks, threads, shared, stream()>>>(arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // Calls f(i) for every i in [0, n), each in its own thread. F is a struct whose operator() is VOXELFIELD_HOST_DEVICE,
  // so that CpuBackend can use it too.
  template <typename F>
  static void for_each(int64_t n, const F& f) {
    if (n > 0) launch(for_each_kernel<F>, blocks(n, kThreads), kThreads, 0, n, f);
  }
};

// The value of VOXELFIELD_SHARED_MEMORY_LIMIT, which is read once: the bytes that a block may use. Tests and benchmarks
// set it to imitate smaller GPUs.
inline int shared_memory_cap() {
  static const int cap = [] {
    const char* const text = std::getenv("VOXELFIELD_SHARED_MEMORY_LIMIT");
    if (text == nullptr) return std::numeric_limits<int>::max();
    char* end = nullptr;
    errno = 0;
    const long value = std::strtol(text, &end, 10);
    STD_TORCH_CHECK(end != text && *end == '\0' && errno == 0 && 0 < value && value <= std::numeric_limits<int>::max(),
                    "VOXELFIELD_SHARED_MEMORY_LIMIT must be a positive number of bytes, got '", text, "'");
    return static_cast<int>(value);
  }();
  return cap;
}

// The bytes of shared memory, static and dynamic together, that a block may use on the current device.
inline int shared_memory_limit() {
  return std::min(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), shared_memory_cap());
}

// Checks launches that need no opt-in.
inline void check_shared_memory(int64_t shared) {
  STD_TORCH_CHECK(shared <= shared_memory_cap(), "a launch takes ", shared,
                  " bytes of shared memory; VOXELFIELD_SHARED_MEMORY_LIMIT allows ", shared_memory_cap());
}

// Returns the result of a driver query about launches of a kernel on the current device, and caches it.
template <typename F>
int cached_query(const void* kernel, int threads, int shared, const F& ask) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, int>, int> answers;
  int device = 0;
  check_cuda(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  int& answer = answers[{kernel, device, threads, shared}];
  if (answer == 0) answer = ask();
  return answer;
}

// Lets launches of a kernel use `shared` bytes of dynamic shared memory. The first call raises the driver's limit to
// the maximum of the device. It is never lowered again, so threads with different networks do not interfere.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, int shared) {
  check_shared_memory(shared);
  if (shared <= kSharedWithoutOptIn) return;
  const int limit = cached_query(reinterpret_cast<const void*>(kernel), 0, 0, [&] {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel));
    const int free =
        device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - static_cast<int>(attributes.sharedSizeBytes);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, free));
    return free;
  });
  STD_TORCH_CHECK(shared <= limit, "a launch takes ", shared, " bytes of shared memory; this device allows ", limit);
}

// For persistent kernels: raises the shared-memory limit and returns the number of blocks that the current device runs
// at once.
template <typename Kernel>
int resident_blocks(Kernel* kernel, int threads, int shared) {
  allow_shared_memory(kernel, shared);
  return cached_query(reinterpret_cast<const void*>(kernel), threads, shared, [&] {
    int per_multiprocessor = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, shared));
    STD_TORCH_CHECK(per_multiprocessor > 0, "no block of the kernel fits this device");
    return per_multiprocessor * device_attribute(cudaDevAttrMultiProcessorCount);
  });
}

// Warns once per kind of launch that the weights of a network do not fit in shared memory. Each caller has its own
// `warned`.
inline void warn_of_packed_weights(std::once_flag& warned, const char* name, int wanted, int limit) {
  std::call_once(warned, [&] {
    const std::string message =
        std::string(name) + ": " + std::to_string(wanted) + " bytes do not fit the shared memory of a block (" +
        std::to_string(limit) +
        " bytes), so the weights of the network are read from global memory, which is slower. " +
        "Narrower or fewer hidden layers avoid that. This warning appears once.";
    aoti_torch_warn("voxelfield", __FILE__, __LINE__, message.c_str());
  });
}

}  // namespace voxelfield
