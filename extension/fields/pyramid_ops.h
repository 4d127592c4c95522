// Host side of marching through a pyramid, for both backends: checks tensors, allocates results, and calls
// Backend::march(field, rays, out) or Backend::render(field, color, degree, camera, out).
#pragma once

#include "cameras/camera.h"
#include "color/color.h"
#include "fields/pyramid_plan.h"
#include "fields/pyramid_scene.h"
#include "mlp/network_inputs.h"
#include "rays/cut_rays_ops.h"
#include "rays/segments.h"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

constexpr int64_t kMaxMarchedRays = 1 << 30;

// Numbers of the march; `boxes` is empty if rays are straight.
struct MarchNumbers {
  double step, density_initial, min_transmittance, min_weight;
  std::vector<double> boxes;
};

// Keeps contiguous copies alive for as long as raw pointers to them are in use.
struct PyramidInputs {
  CellInputs cells;
  std::vector<Tensor> levels;
  std::vector<OptionalTensor> blocks;
  Tensor aabb;
  NetworkInputs density;
  MarchNumbers numbers;

  PyramidInputs(const CellInputs& cells, const std::vector<Tensor>& any_levels,
                const std::vector<OptionalTensor>& any_blocks, const Tensor& any_aabb,
                const std::vector<Tensor>& density_weights, const MarchNumbers& numbers, const Tensor& like)
      : cells(cells),
        blocks(any_blocks),
        aabb(checked("aabb", any_aabb, {2, 3}, ScalarType::Float, like)),
        numbers(numbers) {
    check_step(numbers.step);
    check_finite_not_negative("density_initial", numbers.density_initial);
    check_fraction("min_transmittance", numbers.min_transmittance);
    check_fraction("min_weight", numbers.min_weight);
    const int64_t count = static_cast<int64_t>(any_levels.size());
    STD_TORCH_CHECK(1 <= count && count <= kMaxFieldLevels, "levels must be 1 to ", kMaxFieldLevels, " tensors, got ",
                    count);
    STD_TORCH_CHECK(blocks.empty() || blocks.size() == any_levels.size(), "blocks must be none or one for each of ",
                    count, " levels, got ", blocks.size());
    const ScalarType dtype = like.is_cuda() ? ScalarType::Half : any_levels[0].scalar_type();
    for (const Tensor& any_level : any_levels) {
      const std::string name = "levels[" + std::to_string(levels.size()) + "]";
      const Tensor level = checked(name.c_str(), any_level, {kAny, kAny, kAny, kLevelChannels}, dtype, like);
      STD_TORCH_CHECK(level.numel() > 0 && level.numel() < 0x7fffffff, name, " must have 1 to 2^31 - 2 numbers, got ",
                      level.numel());
      // CUDA reads the four channels of a vertex at once.
      const bool aligned = reinterpret_cast<uintptr_t>(level.data_ptr()) % (kLevelChannels * sizeof(Half)) == 0;
      levels.push_back(aligned ? level : torch::stable::clone(level));
    }
    density = checked_network("density_weights", density_weights, kLevelChannels * count, kMaxGeometry, 2, like);
  }

  ScalarType dtype() const { return levels[0].scalar_type(); }
  bool in_pieces() const { return !numbers.boxes.empty(); }

  bool sparse() const {
    return std::any_of(blocks.begin(), blocks.end(), [](const OptionalTensor& table) { return table.has_value(); });
  }

  template <typename scalar_t>
  PyramidScene<scalar_t> scene() const {
    PyramidScene<scalar_t> scene{};
    scene.cells = cells.either();
    for (const Tensor& level : levels) {
      const auto size = [&](int axis) { return static_cast<int32_t>(level.size(axis)); };
      PyramidLevel<scalar_t> view{data_of(level), {size(0), size(1), size(2)}, {}};
      if (!blocks.empty() && blocks[scene.levels].has_value()) {
        view.table = block_table("blocks", *blocks[scene.levels], {size(0), size(1), size(2)}, level);
      }
      scene.level[scene.levels++] = view;
    }
    scene.aabb = data_of(aabb);
    scene.density = density.view;
    scene.step = static_cast<float>(numbers.step);
    scene.steps_per_length = steps_per_length(numbers.step);
    scene.density_initial = static_cast<float>(numbers.density_initial);
    scene.rule = {static_cast<float>(numbers.min_transmittance), static_cast<float>(numbers.min_weight)};
    if (in_pieces()) scene.boxes = nested_boxes(numbers.boxes);
    return scene;
  }
};

// Where the visible samples of rays are written: a row of slots for each ray, how many it has, and for each part of
// packing the number of samples of its rays. Once the rays up to some ray have more than `max_total_samples` samples
// together, the rays after it may be left out; their counts are then zero.
struct SampleSlots {
  SegmentParts parts;
  float* distances;  // (R, max_samples_per_ray)
  int max_samples_per_ray;
  int32_t* counts;
  int64_t* sums;
  int64_t max_total_samples;
  Roulette roulette;
  float* lengths;  // (R, max_samples_per_ray), or null if all samples are a step long
};

// The pixels of an image. The weights and the transmittance to the background sum to one, so the colour of a pixel is
// background + sum of weight * (colour - background). Nothing needs to be added to a pixel when its ray ends.
struct ImagePointers {
  float* rgb;
  const float* background;  // (3,)
  float *opacity, *depth;
};

template <typename Backend>
struct MarchVisibleOps {
  static TensorTuple<4> march_to_slots(const Tensor& origins, const Tensor& directions, const Tensor& near,
                                       const Tensor& far, const Tensor& offset, const Tensor& occupied,
                                       std::vector<int64_t> resolution, const Tensor& aabb_occupancy,
                                       std::vector<Tensor> levels, std::vector<OptionalTensor> blocks,
                                       const Tensor& aabb, std::vector<Tensor> density_weights, double step,
                                       double density_initial, double min_transmittance, double min_weight,
                                       int64_t max_samples_per_ray, std::vector<double> boxes,
                                       int64_t max_total_samples, double roulette) {
    const RayInputs in{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const typename Backend::Guard guard(origins);
    const PyramidInputs field{cells,  levels,          blocks,
                              aabb,   density_weights, {step, density_initial, min_transmittance, min_weight, boxes},
                              origins};
    const RayBatch rays = in.batch(step);
    STD_TORCH_CHECK(rays.count <= kMaxMarchedRays, "origins must be at most 2^30 rays, got ", rays.count);
    STD_TORCH_CHECK(max_samples_per_ray >= 1 && max_samples_per_ray <= 0x7fffffff,
                    "max_samples_per_ray must be 1 to 2^31 - 1, got ", max_samples_per_ray);
    STD_TORCH_CHECK(max_total_samples >= 0, "max_total_samples must not be negative, got ", max_total_samples);
    STD_TORCH_CHECK(roulette >= 0.0 && roulette <= 1.0, "roulette must lie in 0..1, got ", roulette);
    const SegmentParts parts{rays.count, 0};
    Tensor slots = new_empty(in.origins, {rays.count, max_samples_per_ray}, ScalarType::Float);
    Tensor lengths = new_empty(in.origins, {rays.count, roulette > 0.0 ? max_samples_per_ray : 0}, ScalarType::Float);
    Tensor counts = new_zeros(in.origins, {rays.count}, ScalarType::Int);
    Tensor sums = new_zeros(in.origins, {parts.count}, ScalarType::Long);
    if (rays.count > 0) {
      Backend::march(field, rays,
                     SampleSlots{parts,
                                 data_of(slots),
                                 static_cast<int>(max_samples_per_ray),
                                 data_of(counts),
                                 data_of(sums),
                                 max_total_samples,
                                 {static_cast<float>(roulette)},
                                 roulette > 0.0 ? static_cast<float*>(data_of(lengths)) : nullptr},
                     origins);
    }
    return {slots, counts, sums, lengths};
  }

  static void implement(Library& m) { m.impl("march_to_slots", TORCH_BOX(&MarchVisibleOps::march_to_slots)); }
};

template <typename Backend>
struct PyramidImageOps {
  static TensorTuple<3> render_pyramid_image(const Tensor& c2w, const Tensor& intrinsics, const OptionalTensor& lens,
                                             int64_t width, int64_t height, int64_t across, const Tensor& background,
                                             const Tensor& occupied, std::vector<int64_t> resolution,
                                             const Tensor& aabb_occupancy, std::vector<Tensor> levels,
                                             std::vector<OptionalTensor> blocks, const Tensor& aabb,
                                             std::vector<Tensor> density_weights, std::vector<Tensor> color_weights,
                                             double step, double density_initial, int64_t degree,
                                             double min_transmittance, double min_weight, std::vector<double> boxes) {
    const CameraInputs camera{c2w, intrinsics, lens, width, height, across, background};
    STD_TORCH_CHECK(double(width + kSquare) * double(height + kSquare) <= kMaxMarchedRays,
                    "an image must have 1 to 2^30 pixels, got ", width, " x ", height);
    STD_TORCH_CHECK(degree >= 0 && degree <= kMaxDegree, "degree must lie in 0..3, got ", degree);
    const CellInputs cells{occupied, resolution, aabb_occupancy, c2w};
    const typename Backend::Guard guard(c2w);
    const PyramidInputs field{cells, levels,          blocks,
                              aabb,  density_weights, {step, density_initial, min_transmittance, min_weight, boxes},
                              c2w};
    const int color_inputs = kMaxGeometry + sh_basis_size(static_cast<int>(degree));
    const NetworkInputs color =
        checked_network("color_weights", color_weights, color_inputs, kMaxGeometry, kMaxFieldLayers, c2w);
    STD_TORCH_CHECK(field.density.view.out() == kMaxGeometry && color.view.out() == 3,
                    "the density network must have 16 outputs and the colour network 3");
    Tensor rgb = new_empty(c2w, {height, width, 3}, ScalarType::Float);
    Tensor opacity = new_empty(c2w, {height, width}, ScalarType::Float);
    Tensor depth = new_empty(c2w, {height, width}, ScalarType::Float);
    // With nested boxes, cutting a ray clips it to the largest box, so the camera does not clip it.
    const float* clip = data_of(field.aabb);
    Backend::render(field, color, static_cast<int>(degree), camera.view(field.in_pieces() ? nullptr : clip),
                    ImagePointers{data_of(rgb), data_of(camera.background), data_of(opacity), data_of(depth)}, c2w);
    return {rgb, opacity, depth};
  }

  static void implement(Library& m) {
    m.impl("render_pyramid_image", TORCH_BOX(&PyramidImageOps::render_pyramid_image));
    m.impl("pyramid_image_fits", TORCH_BOX(&Backend::pyramid_image_fits));
  }
};

}  // namespace voxelfield
