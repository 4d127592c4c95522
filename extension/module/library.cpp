// The schema of every operator of voxelfield. The .cpp and .cu files of each family register the kernels for CPU and
// CUDA; Python registers shapes for torch.compile and derivatives (voxelfield/ops/). Only the op `constants`, which
// returns the shared constants to Python, is implemented here.
#include "cameras/lens.h"
#include "common/constants.h"
#include "common/tensors.h"

namespace voxelfield {
namespace {

// In the order of `_NAMES` in voxelfield/foundation/constants.py.
std::vector<int64_t> constants() {
  constexpr int64_t kBrickCells = 1 << kBrickShift, kTileX = 1 << kOptimizerTileShiftXY, kTileY = kTileX;
  constexpr int64_t kTileZ = 1 << kOptimizerTileShiftZ, kMaxTilesAlong = 1 << kTileBits;
  constexpr auto kAutomatic = static_cast<int64_t>(SplatMethod::kAutomatic);
  constexpr auto kDeterministic = static_cast<int64_t>(SplatMethod::kDeterministic);
  constexpr auto kLensModels = static_cast<int64_t>(LensModel::kCount);
  return {kMaxLevels,     kMaxLayers,        kMaxWidth,    kMaxFieldLevels,
          kLevelChannels, kMaxFieldLayers,   kMaxGeometry, kHighestRaw,
          kMaxDegree,     kBrickCells,       kPartRays,    kPartSegments,
          kMaxParts,      kStepRanges,       kTileX,       kTileY,
          kTileZ,         kMaxTilesAlong,    kAutomatic,   kDeterministic,
          kBlockVertices, kMaxAtlasVertices, kLensNumbers, kLensModels};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CompositeExplicitAutograd, m) { m.impl("constants", TORCH_BOX(&constants)); }

}  // namespace voxelfield

// Arguments that several ops have in common.
#define RAYS "Tensor origins, Tensor directions, Tensor near, Tensor far, Tensor offset"
#define LINES "Tensor origins, Tensor directions, Tensor? near, Tensor? far, SymInt columns"
#define CELLS "Tensor occupied, int[] resolution, Tensor aabb_occupancy"
#define CAMERA "Tensor c2w, Tensor intrinsics, Tensor? lens, int width, int height, int across"
#define PYRAMID "Tensor[] levels, Tensor?[] blocks, Tensor aabb, Tensor[] density_weights"
#define SH_FIELD                                                                         \
  "Tensor aabb_grid, float step, int degree, float density_scale, float density_shift, " \
  "float min_transmittance, float min_weight"

STABLE_TORCH_LIBRARY(voxelfield, m) {
  // Limits and layouts that Python must know, in the order of voxelfield/foundation/constants.py.
  m.def("constants() -> int[]");

  // Trilinear sampling of grids (X, Y, Z, C) of one or several resolutions at points (N, 3) of the unit cube. Channels
  // are concatenated, or summed over grids with `sum`. Grids (B, X, Y, Z, C) take points (B, N, 3). `with_gradient`
  // stacks the value and its three derivatives in a leading dimension of 4. `accumulate` adds to existing sums, or to
  // slabs of sums: `slabs` are the first plane along x of each tensor and the planes of its grid, or none. padding: 0
  // border, 1 zeros, 2 reflection, 3 periodic, 4 periodic with a further vertex along each axis, a copy of the first
  // one. Sums of periodic grids need padding 4. Grids of integers can be sampled with `nearest`, without derivatives. A
  // grid expanded over the batch is not copied. `sizes` are X, Y, Z, C of each level. method: 0 automatic, 1 atomic, 2
  // tiled, 3 tiled with a fixed order of summation.
  m.def(
      "sample_trilinear(Tensor[] grids, Tensor points, int padding, bool align_corners, bool nearest, bool sum, bool "
      "with_gradient) -> Tensor");
  // sample_trilinear of one grid over the box `aabb` with aligned corners at world positions; also returns the
  // positions in the unit cube. Calling a VoxelGrid would otherwise take five ops, whose host overhead exceeds the
  // sampling time.
  m.def("sample_in_box(Tensor grid, Tensor points, Tensor aabb, int padding) -> (Tensor, Tensor)");
  // Where points (N, 3) are in the unit cube of a box, and their distances to it, 0 for those that are not finite.
  m.def("place_in_box(Tensor points, Tensor aabb) -> (Tensor unit, Tensor distance)");
  m.def(
      "splat_trilinear(Tensor values, Tensor points, int[] sizes, int padding, bool align_corners, bool nearest, bool "
      "sum, bool with_gradient, int method) -> Tensor[]");
  m.def(
      "accumulate_trilinear_(Tensor(a!)[] sums, Tensor values, Tensor points, int padding, bool align_corners, bool "
      "nearest, int[] slabs, int column) -> ()");
  m.def(
      "point_gradient_trilinear(Tensor values, Tensor[] grids, Tensor points, int padding, bool align_corners, bool "
      "nearest, bool sum, bool with_gradient) -> Tensor");

  // The same along one, two or three axes (the last dimension of points) by kernels of one, two or four vertices along
  // each of them, for one grid (X, C), (X, Y, C) or (X, Y, Z, C), or a batch. kernel: 0 nearest, 1 linear, 2 cubic
  // convolution, 3 cubic B-splines; 0 and 1 not along three axes. `planar`: the channels come before the axes, and
  // before the points in values. `normalized`: points are those of F.grid_sample, in [-1, 1] and in the opposite order
  // of the axes. `scale`: on CUDA, sum whole numbers, of which this many make one, so that the order does not matter.
  m.def(
      "sample_separable(Tensor grid, Tensor points, int kernel, int padding, bool align_corners, bool planar, bool "
      "normalized, bool with_gradient) -> Tensor");
  m.def(
      "splat_separable(Tensor values, Tensor points, int[] size, int kernel, int padding, bool align_corners, bool "
      "planar, bool normalized, bool with_gradient, Tensor? scale) -> Tensor");
  m.def(
      "point_gradient_separable(Tensor values, Tensor grid, Tensor points, int kernel, int padding, bool "
      "align_corners, bool planar, bool normalized, bool with_gradient) -> Tensor");
  // The coefficients of cubic B-splines that take the values of grids (..., X, C) to (..., X, Y, Z, C) at the vertices;
  // `transposed` is the adjoint.

  // Sparse grids (stencil/sparse_grid.h): the positions of points of the unit cube in the atlas of stored blocks, NaN
  // if the block is not stored; and a sum over the copies of each vertex, for gradients of an atlas. If a table of
  // touched vertices says which copies are not zero (touched_vertices_), it then has all copies of these vertices.
  m.def("atlas_coordinates(Tensor points, Tensor blocks, int[] atlas) -> Tensor");
  m.def("sum_duplicates_(Tensor(a!) sums, Tensor copies, Tensor begins, Tensor(b!)? touched) -> ()");

  // The same for points that each have their own cell: feats (N, 8, C), points (N, 3) in [-1, 1].
  m.def("interpolate_cells(Tensor feats, Tensor points, bool with_gradient) -> Tensor");
  m.def("splat_cells(Tensor values, Tensor points, bool with_gradient) -> Tensor");
  m.def("point_gradient_cells(Tensor values, Tensor feats, Tensor points, bool with_gradient) -> Tensor");

  // The integrals of grids (X, Y, Z, C) along rays (N, 3) through the unit cube, over t |direction| from near (or 0) to
  // far; or of a batch, (B, X, Y, Z, C) and (B, N, 3). `columns` is the length of a row of the images that the rays
  // form, or 1. With `labels` (X, Y, Z) int32, one integral for each of the first `label_count` labels, (N, L, C), of
  // the vertices that have it; without, label_count is 1. Then the adjoint in the grid, whose `size` is X, Y, Z
  // (`scale` is as for splat_separable), and the derivatives in origins, directions, near and far (N, 8), summed over
  // values.
  m.def("integrate_rays(Tensor grid, " LINES ", Tensor? labels, int label_count) -> Tensor");
  m.def("backproject_rays(Tensor values, " LINES
        ", Tensor? labels, int label_count, int[] size, Tensor? scale) -> "
        "Tensor");
  m.def("line_gradient(Tensor values, Tensor grid, " LINES ", Tensor? labels, int label_count) -> Tensor");
  // Where rays first meet a level of a grid of one channel: t, infinite if they do not, and whether they do.
  m.def("first_crossing(Tensor grid, " LINES ", float level) -> (Tensor t, Tensor hit)");

  // Packs a grid of bools into words of 4 x 4 x 4 bits.
  m.def("pack_occupancy(Tensor occupied) -> Tensor");
  // The distance of each cell to the nearest occupied one in the maximum norm, capped at max_distance, 1 to 255.
  m.def("empty_distance(Tensor occupied, int max_distance) -> Tensor");

  // Lenses as rows of numbers (cameras/lens.h), either (1, 14) for all points or (N, 14) for each. The axes of rays (N,
  // 3) point right, down and forward; points (N, 2) are offsets from the principal point in focal lengths.
  m.def("lens_rays(Tensor points, Tensor lens) -> Tensor");
  m.def("lens_points(Tensor rays, Tensor lens) -> Tensor");
  // Rays through pixels of images (N, H, W, 4), whose indices run over all images, `supersampling` squared per pixel:
  // origins, directions, near, far, and the pixels' colours. Without `lens`, cameras are pinhole cameras.
  m.def(
      "pixel_rays(Tensor images, Tensor index, Tensor c2w, Tensor intrinsics, Tensor? lens, Tensor aabb, int "
      "supersampling) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Cuts world rays by nested boxes (10 numbers, rays/cut_rays_ops.h) into 2 * count - 1 pieces in warped coordinates.
  // The pieces of a ray are contiguous, from near to far; unused pieces have near and far of 0.
  m.def("cut_rays(" RAYS ", float[] boxes, float step) -> (Tensor, Tensor, Tensor, Tensor)");

  // Samples along rays through occupied space: first the number for each ray, then their positions, in `capacity` rows.
  m.def("count_ray_samples(" RAYS ", " CELLS ", float step, int segments_per_ray) -> (Tensor, Tensor, Tensor)");
  m.def("place_ray_samples(" RAYS ", " CELLS
        ", float step, int segments_per_ray, Tensor counts, Tensor step_ranges, Tensor sums, int capacity) -> (Tensor, "
        "Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Intervals along rays through the first box (count, X, Y, Z) of several that contains their midpoint, where its cell
  // is occupied (rays/march_levels_ops.h): first the number for each ray and where it stops, then where they begin and
  // end, and their rays. aabbs: (count, 6).
  m.def(
      "count_level_intervals(Tensor origins, Tensor directions, Tensor near, Tensor far, Tensor occupied, Tensor "
      "aabbs, float step, float cone_angle, int max_count) -> (Tensor, Tensor)");
  m.def(
      "place_level_intervals(Tensor origins, Tensor directions, Tensor near, Tensor far, Tensor occupied, Tensor "
      "aabbs, float step, float cone_angle, int max_count, Tensor ray_offsets, int samples) -> (Tensor, Tensor, "
      "Tensor)");

  // The visible samples: first their indices and number for each ray, then copies of them, in `capacity` rows.
  m.def(
      "count_visible_samples(Tensor density, Tensor dt, Tensor ray_offsets, float min_transmittance, float min_weight) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "pack_visible_samples(Tensor positions, Tensor t, Tensor dt, Tensor ray_offsets, Tensor kept, Tensor counts, "
      "Tensor sums, int capacity) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // Emission and absorption along packed rays (ray_offsets is CSR). Without `dt`, `density` holds alphas, the fraction
  // of the arriving light that each sample absorbs. ray_light returns the transmittance in front of each sample, or its
  // weight. Gradients are (M,) of the density, or, if they are wanted, (2, M) of density and dt, and (3, M) of density,
  // t and dt ((2, M) without dt).
  m.def(
      "ray_light(Tensor density, Tensor? dt, Tensor ray_offsets, float min_transmittance, bool transmittance) -> "
      "Tensor");
  m.def(
      "ray_light_backward(Tensor grad, Tensor density, Tensor? dt, Tensor ray_offsets, float min_transmittance, bool "
      "transmittance, bool of_lengths) -> Tensor");
  m.def(
      "composite(Tensor density, Tensor rgb, Tensor t, Tensor? dt, Tensor ray_offsets, float min_transmittance, bool "
      "distortion) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "composite_backward(Tensor? grad_rgb, Tensor? grad_opacity, Tensor? grad_depth_sum, Tensor? grad_weights, "
      "Tensor? grad_distortion, Tensor density, Tensor rgb, Tensor t, Tensor? dt, Tensor ray_offsets, Tensor ray_rgb, "
      "Tensor opacity, Tensor depth_sum, Tensor distortion, float min_transmittance, bool of_distances) -> (Tensor, "
      "Tensor)");

  // The sum of each ray's rows, (M, C) to (R, C), and its adjoint, which copies its ray's row to each of the M samples;
  // and the recurrence y_i = values_i + factors_i y_{i-1} along each ray, (M, C) to (M, C), from y = 0, or without
  // values from y = 1. Its forms: 0 y_{i-1}, 1 y_i, 2 the adjoint of form 1 if the direction is reversed.
  m.def("sum_along_rays(Tensor values, Tensor ray_offsets) -> Tensor");
  m.def("scan_along_rays(Tensor? values, Tensor? factors, Tensor ray_offsets, int form, bool reverse) -> Tensor");
  m.def("spread_along_rays(Tensor values, Tensor ray_offsets, int samples) -> Tensor");

  // Colours of pixels over a background (pixels, 3) or (3,), each from `rays_per_pixel` consecutive
  // rays: the mean of linear light if image values are encoded as `srgb`, otherwise the mean of the values.
  m.def("pixel_colors(Tensor rgb, Tensor opacity, Tensor background, int rays_per_pixel, bool srgb) -> Tensor");
  m.def(
      "pixel_colors_backward(Tensor grad, Tensor rgb, Tensor opacity, Tensor background, int rays_per_pixel, bool "
      "srgb) -> (Tensor grad_rgb, Tensor grad_opacity)");

  // Mean squared error of colours: of pixels, over pixels and channels, or with the `weights` and `ray_index` of
  // samples, over rays. Only the first `rays_kept` rays (one integer) count, and only pixels whose rays all count. For
  // samples, `rays_kept` is only the divisor of the mean.
  m.def(
      "color_error(Tensor colors, Tensor truth, Tensor? weights, Tensor? ray_index, int rays_per_pixel, Tensor? "
      "rays_kept) -> Tensor");
  m.def(
      "color_error_backward(Tensor grad, Tensor colors, Tensor truth, Tensor? weights, Tensor? ray_index, int "
      "rays_per_pixel, Tensor? rays_kept) -> (Tensor grad_colors)");

  // Lists tiles of 4 x 4 x 8 vertices of a grid that samples in occupied cells (X, Y, Z) of the same box touch: their
  // ids into the first `count` of `ids`, in ascending order.
  m.def("active_tiles_(Tensor occupied, int[] resolution, Tensor(a!) ids, Tensor(b!) count) -> ()");

  // Which vertices of tiles a step has changed, and copies of these alone. Tiles have such `ids` (K,), or are 128
  // vertices each that follow one another in memory from vertex `first` on. Rows of `table` (K, 5) int32 are a bit for
  // each vertex of a tile whose gradient is not zero (for all, with `all`), then their number; to copy, then the number
  // of those in earlier tiles. Bits belong to rows of `packed` (R, C) in this order, of which the last ones may be
  // missing.
  m.def("touched_vertices_(Tensor grad, Tensor? ids, bool all, Tensor(a!) table) -> ()");
  m.def("pack_vertices_(Tensor grid, Tensor? ids, int first, Tensor table, Tensor(a!) packed) -> ()");
  m.def("unpack_vertices_(Tensor packed, Tensor? ids, int first, Tensor table, Tensor(a!) grid) -> ()");

  // One step of Adam for grids (X, Y, Z, C) float32, in place: every vertex, or those of the first `tile_counts` of
  // such `tiles`; with `skip_untouched`, those of them with a gradient, or those that a table `touched` has
  // (touched_vertices_). `working` are 16-bit copies to keep up to date, equally many for each grid, one after the
  // other; `lrs`, `steps` and `channel_rates` (C,), factors on `lrs`, lie on the device, so that a captured graph uses
  // their current values. `grad_scale` is divided out of the gradients; if `found_inf` is not 0, gradients are only
  // cleared, those of all vertices.
  m.def(
      "grid_adam_(Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] grads, "
      "Tensor(e!)?[] working, Tensor[] lrs, Tensor[] steps, Tensor?[] tiles, Tensor?[] tile_counts, Tensor?[] touched, "
      "Tensor?[] channel_rates, Tensor? grad_scale, Tensor? found_inf, float beta1, float beta2, float eps, float "
      "weight_decay, float l2_penalty, bool skip_untouched, bool clear_grad) -> ()");

  // Adds the gradient of a grid's total variation to `grad`, at the same vertices; `weights` (3,) of the axes.
  m.def(
      "grid_total_variation_grad_(Tensor(a!) grad, Tensor param, Tensor weights, float delta, Tensor? tiles, Tensor? "
      "tile_count) -> ()");

  // The input of a colour network, geometry (N, G) and the spherical harmonics of each sample's viewing direction side
  // by side, and the geometry's first column, float32, from which density is made.
  m.def("append_view(Tensor geometry, Tensor directions, Tensor ray_index, int degree) -> (Tensor inputs, Tensor raw)");
  m.def("append_view_backward(Tensor grad_inputs, Tensor grad_raw, int geometry_size) -> (Tensor grad_geometry)");

  // A multilayer perceptron, ReLU between layers: input (N, in), weights[l] (out_l, in_l). Rows from `count` (one
  // integer) on are ignored, and their outputs are zero. In the backward op, grad_weights are float32 (float64 for
  // float64 inputs).
  m.def("mlp(Tensor input, Tensor[] weights, Tensor? count) -> (Tensor output)");
  m.def(
      "mlp_backward(Tensor grad_output, Tensor input, Tensor[] weights, Tensor? count) -> (Tensor grad_input, Tensor[] "
      "grad_weights)");

  // Renders a grid (X, Y, Z, C) of raw density and spherical harmonics along rays: colour, opacity and the sum of
  // weights times distances, and the gradient with respect to the grid. `density` (X, Y, Z) is read instead of the
  // grid's first channel, if given. `occupied` holds the words of pack_occupancy for `resolution` cells, or empty
  // distances (X', Y', Z') uint8.
  m.def("render_grid(" RAYS ", " CELLS ", Tensor grid, Tensor? density, " SH_FIELD
        ") -> (Tensor rgb, Tensor opacity, Tensor depth_sum)");
  m.def(
      "render_grid_backward(Tensor grad_rgb, Tensor grad_opacity, Tensor grad_depth_sum, Tensor rgb, Tensor opacity, "
      "Tensor depth_sum, " RAYS ", " CELLS ", Tensor grid, " SH_FIELD ") -> (Tensor grad_grid)");
  // Renders every pixel of a camera over a background: image, opacity and mean depth.
  m.def("render_grid_image(" CAMERA ", Tensor background, " CELLS ", Tensor grid, Tensor? density, " SH_FIELD
        ") -> (Tensor, Tensor, Tensor)");

  // Visible samples of rays in a field whose density is initial * exp(network's first output): `levels` (X, Y, Z, 4)
  // are read side by side, each of them an atlas where `blocks` has its table. At most the first `max_samples_per_ray`
  // of each, their distances in slots (R, max_samples_per_ray), how many each ray has, and sums of these counts for
  // pack_slots, which packs the samples into `capacity` rows. `occupied` is as for render_grid. With nested `boxes` (as
  // for cut_rays), rays are in the world, and everything else, including distances, is in warped coordinates. Once the
  // rays up to some ray have more than `max_total_samples` samples together, the rays after it may be left out, as if
  // they had none. Samples of a weight below `roulette` are kept at random; the last result is then the lengths of all
  // samples, in slots like their distances.
  m.def("march_to_slots(" RAYS ", " CELLS ", " PYRAMID
        ", float step, float density_initial, float min_transmittance, float min_weight, int max_samples_per_ray, "
        "float[] boxes, int max_total_samples, float roulette) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("pack_slots(" RAYS
        ", Tensor slots, Tensor counts, Tensor sums, float step, float[] boxes, int capacity, Tensor lengths) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // Renders every pixel of a camera for such a field over a background: image, opacity and mean depth. A second network
  // computes the colour from the first one's outputs and the viewing direction.
  m.def("render_pyramid_image(" CAMERA ", Tensor background, " CELLS ", " PYRAMID
        ", Tensor[] color_weights, float step, float density_initial, int degree, float min_transmittance, float "
        "min_weight, float[] boxes) -> (Tensor, Tensor, Tensor)");
  // Sums what a baked field stores over the samples of every pixel's ray: the image of diffuse colours over a
  // background, opacity and mean depth, and the inputs of the colour network (H W, 24 or 32).
  m.def("render_baked_image(" CAMERA ", " CELLS
        ", Tensor density, float log_low, float log_step, Tensor values, Tensor first, Tensor side, Tensor ranges, "
        "Tensor low, Tensor extent, Tensor blocks, Tensor aabb, Tensor? clip, Tensor background, int degree, float "
        "step, float min_transmittance, float min_weight, float[] boxes) -> (Tensor, Tensor, Tensor, Tensor)");
  // Whether render_pyramid_image can run on the device of `like`, for hidden layers of a given width.
  m.def("pyramid_image_fits(Tensor like, int width) -> bool");
}
