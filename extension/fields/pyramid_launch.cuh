// Launches of kernels that march through a pyramid.
#pragma once

#include "common/backend.cuh"
#include "fields/pyramid_march.cuh"
#include "fields/pyramid_ops.h"

namespace voxelfield {

// The padded width of hidden layers of a given width.
inline int padded_field_width(int width) { return width <= 64 ? 64 : 128; }

// Launches a persistent kernel that marches `rays`, with at least `rays_per_warp` rays per warp. The last parameter of
// the kernel points to the number of the next unassigned ray.
template <typename Kernel, typename... Arguments>
void launch_march(Kernel* kernel, const MarchPlan& plan, int64_t rays, int rays_per_warp, const Tensor& like,
                  const Arguments&... arguments) {
  // Rays are numbered by ints, of which warps claim some past the last one.
  STD_TORCH_CHECK(rays <= 0x7f000000, "one launch marches at most 2^31 - 2^24 rays, got ", rays);
  const int64_t resident = resident_blocks(kernel, plan.warps * kWarp, plan.shared);
  const int64_t per_block = int64_t{rays_per_warp} * plan.warps;
  const int64_t blocks = std::clamp<int64_t>((rays + per_block - 1) / per_block, 1, resident);
  Tensor next_ray = new_zeros(like, {1}, ScalarType::Int);
  CudaBackend::launch(kernel, static_cast<unsigned>(blocks), plan.warps * kWarp, plan.shared, arguments...,
                      next_ray.mutable_data_ptr<int>());
}

}  // namespace voxelfield
