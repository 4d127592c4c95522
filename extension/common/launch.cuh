// The one place that asks a device what a launch may use. Answers are kept, because the driver takes microseconds.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "common/backend.cuh"
#include "common/shared_memory.h"

namespace voxelfield {

// VOXELFIELD_SHARED_MEMORY_LIMIT, read once: bytes that a block may use, for tests and benchmarks of smaller GPUs.
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

// Bytes of shared memory, static and dynamic together, that a block may have on the current device.
inline int shared_memory_limit() {
  return std::min(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), shared_memory_cap());
}

// For launches that need no opt-in.
inline void check_shared_memory(int64_t shared) {
  STD_TORCH_CHECK(shared <= shared_memory_cap(), "a launch takes ", shared,
                  " bytes of shared memory; VOXELFIELD_SHARED_MEMORY_LIMIT allows ", shared_memory_cap());
}

// Lets launches of a kernel take `shared` bytes of dynamic shared memory. The driver's own limit is raised to the
// device's at the first call and stays there, so that threads with different networks do not lower it for one another.
inline void allow_shared_memory(const void* kernel, int shared) {
  check_shared_memory(shared);
  if (shared <= kSharedWithoutOptIn) return;
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int>, int> allowed;
  int device = 0;
  check_cuda(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  int& most = allowed[{kernel, device}];
  if (most == 0) {
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel));
    const int free =
        device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - static_cast<int>(attributes.sharedSizeBytes);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, free));
    most = free;
  }
  STD_TORCH_CHECK(shared <= most, "a launch takes ", shared, " bytes of shared memory; this device allows ", most);
}

template <typename... Parameters>
void allow_shared_memory(void (*kernel)(Parameters...), int shared) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), shared);
}

// For kernels whose blocks stay: the number of blocks that the current device runs at once, readied for launch.
inline int resident_blocks(const void* kernel, int threads, int shared) {
  static std::mutex mutex;
  static std::map<std::tuple<const void*, int, int, int>, int> known;
  allow_shared_memory(kernel, shared);
  int device = 0;
  check_cuda(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  int& blocks = known[{kernel, device, threads, shared}];
  if (blocks == 0) {
    int per_multiprocessor = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, shared));
    STD_TORCH_CHECK(per_multiprocessor > 0, "no block of the kernel fits this device");
    blocks = per_multiprocessor * device_attribute(cudaDevAttrMultiProcessorCount);
  }
  return blocks;
}

template <typename... Parameters>
int resident_blocks(void (*kernel)(Parameters...), int threads, int shared) {
  return resident_blocks(reinterpret_cast<const void*>(kernel), threads, shared);
}

// Warns once for each kind of launch that a network's weights do not fit shared memory. `said` is the caller's own.
inline void warn_of_packed_weights(std::once_flag& said, const char* name, int wanted, int limit) {
  std::call_once(said, [&] {
    const std::string message =
        std::string(name) + ": " + std::to_string(wanted) + " bytes do not fit the shared memory of a block (" +
        std::to_string(limit) +
        " bytes), so the weights of the network are read from global memory, which is slower. " +
        "Narrower or fewer hidden layers avoid that. This is said once.";
    aoti_torch_warn("voxelfield", __FILE__, __LINE__, message.c_str());
  });
}

}  // namespace voxelfield
