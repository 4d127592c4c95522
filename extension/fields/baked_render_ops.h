// Host side of rendering baked fields, for both backends: checks tensors, allocates the image, and calls
// Backend::render<Pieces, Values>(scene, pixels).
#pragma once

#include "cameras/camera.h"
#include "fields/baked_scene.h"
#include "rays/cut_rays_ops.h"
#include "rays/ray_inputs.h"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

// The pixels of an image, and where the sums and directions of their rays go.
template <int Values>
struct BakedPixels {
  CameraView camera;
  float *sums, *opacity, *depth, *directions;

  template <bool Pieces>
  VOXELFIELD_HOST_DEVICE void render(const BakedScene& scene, int64_t x, int64_t y) const {
    const int64_t pixel = y * camera.width + x;
    const Ray ray = camera(x, y);
    for (int axis = 0; axis < 3; ++axis) directions[3 * pixel + axis] = ray.direction[axis];
    const BakedTotals<Values> totals = BakedWalk<Pieces, Values>(scene)(ray);
    VOXELFIELD_VECTORIZE
    for (int v = 0; v < Values; ++v) sums[Values * pixel + v] = totals.values[v] * (1.0f / 255.0f);
    opacity[pixel] = totals.opacity;
    depth[pixel] = totals.depth / fmaxf(totals.opacity, 1e-6f);
  }
};

template <typename Backend>
struct BakedImageOps {
  static TensorTuple<4> render_baked_image(const Tensor& c2w, const Tensor& intrinsics, const OptionalTensor& lens,
                                           int64_t width, int64_t height, const Tensor& occupied,
                                           std::vector<int64_t> resolution, const Tensor& aabb_occupancy,
                                           const Tensor& any_log_density, const Tensor& any_values,
                                           const Tensor& blocks, const Tensor& any_aabb, const OptionalTensor& any_clip,
                                           double step, double min_transmittance, double min_weight,
                                           std::vector<double> boxes) {
    const CameraInputs camera{c2w, intrinsics, lens, width, height, std::nullopt};
    const CellInputs cells{occupied, resolution, aabb_occupancy, c2w};
    const typename Backend::Guard guard(c2w);
    check_step(step);
    check_fraction("min_transmittance", min_transmittance);
    check_fraction("min_weight", min_weight);
    const Tensor log_density = checked("log_density", any_log_density, {kAny, kAny, kAny}, ScalarType::Half, c2w);
    const std::vector<int64_t> atlas = shape_of(log_density);
    const Tensor values = checked("values", any_values, {atlas[0], atlas[1], atlas[2], kAny}, ScalarType::Byte, c2w);
    const Tensor aabb = checked("aabb", any_aabb, {2, 3}, ScalarType::Float, c2w);
    const OptionalTensor clip = checked("clip", any_clip, {2, 3}, ScalarType::Float, c2w);
    const int64_t count = values.size(3);
    STD_TORCH_CHECK(count == 8 || count == 16, "values must be 8 or 16 for each vertex, got ", count);
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(values.data_ptr()) % count == 0, "values must start at a multiple of ",
                    count, " bytes");
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(log_density.data_ptr()) % (kBlockVertices * sizeof(Half)) == 0,
                    "log_density must start at a multiple of ", kBlockVertices * sizeof(Half), " bytes");
    STD_TORCH_CHECK(log_density.numel() < 0x7fffffff, "log_density must have fewer than 2^31 - 1 numbers, got ",
                    log_density.numel());
    BakedScene scene{};
    scene.cells = cells.either();
    scene.table = block_table("blocks", blocks, atlas, c2w);
    scene.log_density = data_of(log_density);
    scene.values = data_of(values);
    for (int axis = 0; axis < 3; ++axis) scene.atlas[axis] = static_cast<int32_t>(atlas[axis]);
    scene.aabb = data_of(aabb);
    scene.step = static_cast<float>(step);
    scene.steps_per_length = steps_per_length(step);
    scene.rule = {static_cast<float>(min_transmittance), static_cast<float>(min_weight)};
    const bool pieces = !boxes.empty();
    STD_TORCH_CHECK(pieces != clip.has_value(), "clip must be given if and only if there are no boxes, which cut rays");
    if (pieces) scene.boxes = nested_boxes(boxes);
    const Tensor sums = new_empty(c2w, {height, width, count}, ScalarType::Float);
    const Tensor opacity = new_empty(c2w, {height, width}, ScalarType::Float);
    const Tensor depth = new_empty(c2w, {height, width}, ScalarType::Float);
    const Tensor directions = new_empty(c2w, {height, width, 3}, ScalarType::Float);
    const CameraView view = camera.view(data_of(clip));
    dispatch_flag(pieces, [&](auto in_pieces) {
      dispatch_value<8, 16>(count, [&](auto number) {
        Backend::template render<decltype(in_pieces)::value>(
            scene, BakedPixels<decltype(number)::value>{view, data_of(sums), data_of(opacity), data_of(depth),
                                                        data_of(directions)});
      });
    });
    return {sums, opacity, depth, directions};
  }

  static void implement(Library& m) { m.impl("render_baked_image", TORCH_BOX(&BakedImageOps::render_baked_image)); }
};

}  // namespace voxelfield
