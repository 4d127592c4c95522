// What every CPU backend shares.
#pragma once

#include "../tensors.h"

namespace voxelfield {

struct CpuBackend {
  // The host has one device: nothing to switch.
  struct Guard {
    explicit Guard(const Tensor& /*like*/) {}
  };
};

}  // namespace voxelfield
