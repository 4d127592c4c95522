// The host side of marching through a pyramid: from tensors to the kernels' views, and the launch.
#pragma once

#include <algorithm>

#include "common/backend.cuh"
#include "fields/pyramid_march.cuh"
#include "rays/ray_inputs.h"

namespace voxelfield {

constexpr int64_t kMostMarchedRays = 1 << 30;

// A contiguous tensor that can be read by so many bytes at a time.
inline Tensor as_vectors(const Tensor& x, uintptr_t bytes) {
  const Tensor dense = as_contiguous(x);
  return reinterpret_cast<uintptr_t>(dense.data_ptr()) % bytes == 0 ? dense : torch::stable::clone(dense);
}

// Keeps contiguous copies alive for as long as raw pointers to them are in use.
struct PyramidInputs {
  std::vector<Tensor> levels;
  Tensor aabb;
  PyramidView view{};

  PyramidInputs(const std::vector<Tensor>& any_levels, const Tensor& any_aabb, const Tensor& like)
      : aabb(as_contiguous(any_aabb)) {
    const int count = static_cast<int>(any_levels.size());
    STD_TORCH_CHECK(1 <= count && count <= kMaxPyramidLevels, "levels must be 1 to ", kMaxPyramidLevels,
                    " tensors, got ", count);
    check_tensor("aabb", aabb, {2, 3}, ScalarType::Float, like);
    for (const Tensor& level : any_levels) {
      const std::string name = "levels[" + std::to_string(view.levels) + "]";
      check_tensor(name.c_str(), level, {kAny, kAny, kAny, kLevelChannels}, ScalarType::Half, like);
      STD_TORCH_CHECK(level.numel() > 0 && level.numel() < 0x7fffffff, name, " must have 1 to 2^31 - 2 numbers, got ",
                      level.numel());
      levels.push_back(as_vectors(level, sizeof(uint2)));
      PyramidLevel& own = view.level[view.levels++];
      own.features = levels.back().const_data_ptr<torch::headeronly::Half>();
      for (int axis = 0; axis < 3; ++axis) own.resolution[axis] = static_cast<int32_t>(level.size(axis));
    }
    view.aabb = aabb.const_data_ptr<float>();
  }
};

struct NetworkInputs {
  std::vector<Tensor> weights;
  Network view{};
  int width = 0;  // of the widest hidden layer

  NetworkInputs(const char* name, const std::vector<Tensor>& any_weights, int64_t inputs, int most_layers,
                const Tensor& like) {
    const int layers = static_cast<int>(any_weights.size());
    STD_TORCH_CHECK(2 <= layers && layers <= most_layers, name, " must be 2 to ", most_layers, " matrices, got ",
                    layers);
    view = field_network(kMaxWidth, layers);
    const ScalarType dtype = any_weights[0].scalar_type();
    STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::Float, "on CUDA ", name,
                    " must be float16 or float32, got ", torch::headeronly::toString(dtype));
    view.float_weights = dtype == ScalarType::Float;
    int64_t columns = inputs;
    for (int l = 0; l < view.layers; ++l) {
      const Tensor own = as_contiguous(any_weights[l]);
      const int64_t most = l == view.layers - 1 ? kFieldOutputs : 128;
      STD_TORCH_CHECK(own.dim() == 2 && own.size(1) == columns && 1 <= own.size(0) && own.size(0) <= most &&
                          own.scalar_type() == dtype && same_device(own, like),
                      name, "[", l, "] must be (1 to ", most, ", ", columns,
                      "), of one dtype and on one device with all else, got ",
                      describe(own.sizes(), own.scalar_type(), own));
      columns = own.size(0);
      if (l < view.layers - 1) width = std::max(width, static_cast<int>(columns));
      view.layer[l] = {own.data_ptr(), static_cast<int>(own.size(0)), static_cast<int>(own.size(1))};
      weights.push_back(own);
    }
  }

  // The kernels' view, with hidden layers padded to a width.
  Network padded_to(int padded) const {
    Network network = view;
    network.width = padded;
    return network;
  }
};

inline PyramidScene pyramid_scene(const CellInputs& cells, const PyramidInputs& pyramid, const NetworkInputs& density,
                                  int width, double step, double density_initial, double min_transmittance,
                                  double min_weight) {
  check_step(step);
  check_finite_not_negative("density_initial", density_initial);
  check_fraction("min_transmittance", min_transmittance);
  check_fraction("min_weight", min_weight);
  return {cells.either(),
          pyramid.view,
          density.padded_to(width),
          static_cast<float>(step),
          steps_per_length(step),
          static_cast<float>(density_initial),
          {static_cast<float>(min_transmittance), static_cast<float>(min_weight)}};
}

// The width that hidden layers of so many numbers are padded to.
inline int padded_field_width(int width) { return width <= 64 ? 64 : 128; }

// Launches a kernel whose blocks stay until `rays` have been marched; each warp begins with at least so many of them.
// The kernel's last parameter points to the next ray that no warp has yet.
template <typename Kernel, typename... Arguments>
void launch_march(Kernel* kernel, const MarchPlan& plan, int64_t rays, int rays_per_warp, const Tensor& like,
                  const Arguments&... arguments) {
  const int64_t most = resident_blocks(kernel, plan.warps * kWarp, plan.shared);
  const int64_t per_block = int64_t{rays_per_warp} * plan.warps;
  const int64_t blocks = std::clamp<int64_t>((rays + per_block - 1) / per_block, 1, most);
  Tensor next_ray = new_zeros(like, {1}, ScalarType::Int);
  CudaBackend::launch(kernel, static_cast<unsigned>(blocks), plan.warps * kWarp, plan.shared, arguments...,
                      next_ray.mutable_data_ptr<int>());
}

}  // namespace voxelfield
