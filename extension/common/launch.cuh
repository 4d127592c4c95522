// Kernels whose blocks stay: how many of them a device runs at once.
#pragma once

#include "common/backend.cuh"

namespace voxelfield {

// Readies a kernel for so much shared memory; returns how many blocks the device runs at once.
template <typename Kernel>
int resident_blocks(Kernel* kernel, int threads, int shared) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  int per_multiprocessor = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, shared));
  STD_TORCH_CHECK(per_multiprocessor > 0, "no block of the kernel fits this device");
  return per_multiprocessor * device_attribute(cudaDevAttrMultiProcessorCount);
}

}  // namespace voxelfield
