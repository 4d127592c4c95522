// Host side of marching through a pyramid: converts tensors to the views that kernels use, and launches the kernels.
#pragma once

#include "common/backend.cuh"
#include "fields/pyramid_march.cuh"
#include "mlp/pack_weights.h"
#include "rays/cut_rays_ops.h"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

constexpr int64_t kMostMarchedRays = 1 << 30;

// Keeps contiguous copies alive for as long as raw pointers to them are in use.
struct PyramidInputs {
  CellInputs cells;
  std::vector<Tensor> levels;
  std::vector<OptionalTensor> blocks;
  Tensor aabb;
  NetworkInputs density;

  PyramidInputs(const CellInputs& cells, const std::vector<Tensor>& any_levels,
                const std::vector<OptionalTensor>& any_blocks, const Tensor& any_aabb,
                const std::vector<Tensor>& density_weights, const Tensor& like)
      : cells(cells), blocks(any_blocks), aabb(checked("aabb", any_aabb, {2, 3}, ScalarType::Float, like)) {
    const int64_t count = static_cast<int64_t>(any_levels.size());
    STD_TORCH_CHECK(1 <= count && count <= kMaxPyramidLevels, "levels must be 1 to ", kMaxPyramidLevels,
                    " tensors, got ", count);
    STD_TORCH_CHECK(blocks.empty() || blocks.size() == any_levels.size(), "blocks must be none or one for each of ",
                    count, " levels, got ", blocks.size());
    for (const Tensor& any_level : any_levels) {
      const std::string name = "levels[" + std::to_string(levels.size()) + "]";
      const Tensor level = checked(name.c_str(), any_level, {kAny, kAny, kAny, kLevelChannels}, ScalarType::Half, like);
      STD_TORCH_CHECK(level.numel() > 0 && level.numel() < 0x7fffffff, name, " must have 1 to 2^31 - 2 numbers, got ",
                      level.numel());
      const bool aligned = reinterpret_cast<uintptr_t>(level.data_ptr()) % sizeof(uint2) == 0;
      levels.push_back(aligned ? level : torch::stable::clone(level));
    }
    density = checked_network("density_weights", density_weights, kLevelChannels * count, kFieldOutputs, 2, like);
  }

  bool sparse() const {
    return std::any_of(blocks.begin(), blocks.end(), [](const OptionalTensor& table) { return table.has_value(); });
  }

  // Returns the scene with a density network whose hidden layers are padded to `width`.
  PyramidScene scene(int width, double step, double density_initial, double min_transmittance, double min_weight,
                     const std::vector<double>& boxes) const {
    check_step(step);
    check_finite_not_negative("density_initial", density_initial);
    check_fraction("min_transmittance", min_transmittance);
    check_fraction("min_weight", min_weight);
    PyramidScene scene{};
    scene.cells = cells.either();
    for (const Tensor& level : levels) {
      const auto size = [&](int axis) { return static_cast<int32_t>(level.size(axis)); };
      PyramidLevel own{data_of(level), {size(0), size(1), size(2)}, {}};
      if (!blocks.empty() && blocks[scene.levels].has_value()) {
        own.table = block_table("blocks", *blocks[scene.levels], {size(0), size(1), size(2)}, level);
      }
      scene.level[scene.levels++] = own;
    }
    scene.aabb = data_of(aabb);
    scene.density = field_network(width, 2, density.view);
    scene.step = static_cast<float>(step);
    scene.steps_per_length = steps_per_length(step);
    scene.density_initial = static_cast<float>(density_initial);
    scene.rule = {static_cast<float>(min_transmittance), static_cast<float>(min_weight)};
    if (!boxes.empty()) scene.boxes = nested_boxes(boxes);
    return scene;
  }
};

// The padded width of hidden layers of a given width.
inline int padded_field_width(int width) { return width <= 64 ? 64 : 128; }

// Launches a persistent kernel that marches `rays`, with at least `rays_per_warp` rays per warp. The last parameter of
// the kernel points to the number of the next unassigned ray.
template <typename Kernel, typename... Arguments>
void launch_march(Kernel* kernel, const MarchPlan& plan, int64_t rays, int rays_per_warp, const Tensor& like,
                  const Arguments&... arguments) {
  const int64_t resident = resident_blocks(kernel, plan.warps * kWarp, plan.shared);
  const int64_t per_block = int64_t{rays_per_warp} * plan.warps;
  const int64_t blocks = std::clamp<int64_t>((rays + per_block - 1) / per_block, 1, resident);
  Tensor next_ray = new_zeros(like, {1}, ScalarType::Int);
  CudaBackend::launch(kernel, static_cast<unsigned>(blocks), plan.warps * kWarp, plan.shared, arguments...,
                      next_ray.mutable_data_ptr<int>());
}

}  // namespace voxelfield
