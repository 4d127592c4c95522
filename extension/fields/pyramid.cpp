// Marches rays through a pyramid on the CPU. A thread marches several rays side by side, one in each lane, and
// evaluates the networks for the current samples of all lanes at once, in loops over lanes that compilers can
// vectorise. As on CUDA, a ray ends once its transmittance falls below the threshold, and its lane takes another ray. A
// ray does not depend on those in the other lanes.
#include <vector>

#include "common/backend.h"
#include "fields/pyramid_ops.h"

namespace voxelfield {
namespace {

constexpr int kLanes = 32;
constexpr int64_t kRaysPerTask = 256;

using Lanes = float[kLanes];

template <typename scalar_t>
VOXELFIELD_HOST_DEVICE void round_lanes(Lanes& values) {
  if constexpr (std::is_same_v<scalar_t, Half>) {
    Half rounded[kLanes];
    const Half* row = rounded;
    float16_rows.narrow(values, kLanes, rounded);
    float16_rows.widen(&row, 1, kLanes, values);
  } else {
    VOXELFIELD_VECTORIZE
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = widen(narrow_to<scalar_t>(values[lane]));
  }
}

// A network in float32 whose weights are rounded to the dtype of the levels.
template <typename scalar_t>
struct CpuNetwork {
  struct Layer {
    std::vector<float> weights;  // (rows, columns)
    int rows, columns;
  };
  std::vector<Layer> layers;

  explicit CpuNetwork(const NetworkInputs& network) {
    for (const Tensor& own : network.weights) {
      const Tensor rounded = torch::stable::to(torch::stable::to(own, scalar_type_of<scalar_t>()), ScalarType::Float);
      const float* begin = data_of(rounded);
      layers.push_back(
          {{begin, begin + rounded.numel()}, static_cast<int>(rounded.size(0)), static_cast<int>(rounded.size(1))});
    }
  }

  // Evaluates all layers but the last. Returns the input of the last layer, which is in `scratch`.
  VOXELFIELD_HOST_DEVICE const Lanes* hidden(const Lanes* input, Lanes (&scratch)[2][kMaxWidth]) const {
    for (size_t l = 0; l + 1 < layers.size(); ++l) {
      apply<true>(layers[l], 0, layers[l].rows, input, scratch[l % 2]);
      input = scratch[l % 2];
    }
    return input;
  }

  VOXELFIELD_HOST_DEVICE void outputs(const Lanes* hidden, int first, int end, Lanes* out) const {
    apply<false>(layers.back(), first, end, hidden, out);
  }

 private:
  template <bool kRelu>
  VOXELFIELD_HOST_DEVICE static void apply(const Layer& layer, int first, int end, const Lanes* in, Lanes* out) {
    for (int row = first; row < end; ++row) {
      const float* weights = layer.weights.data() + row * layer.columns;
      Lanes sum = {};
      for (int column = 0; column < layer.columns; ++column) {
        const float weight = weights[column];
        VOXELFIELD_VECTORIZE
        for (int lane = 0; lane < kLanes; ++lane) sum[lane] += weight * in[column][lane];
      }
      VOXELFIELD_VECTORIZE
      for (int lane = 0; lane < kLanes; ++lane) {
        out[row][lane] = kRelu && sum[lane] < 0.0f ? 0.0f : sum[lane];  // NaN stays NaN
      }
      round_lanes<scalar_t>(out[row]);
    }
  }
};

// A ray that is marched, and its current sample. It points to itself, so it must not be moved.
template <typename scalar_t, typename Result>
struct MarchedLane {
  int64_t number = -1;  // of the ray; -1 if the lane has none
  bool walking = false, begun = false;
  Ray ray{};
  RayView view;
  SampleWalk<CellsView> walk;
  CubeRay cube;
  RayPieces pieces;
  VisibleLight<float> light;
  PyramidSample sample{};
  Result result{};

  VOXELFIELD_HOST_DEVICE explicit MarchedLane(const PyramidScene<scalar_t>& scene)
      : view(ray.view(scene.step, scene.steps_per_length)),
        walk(scene.cells, view),
        cube(view, scene.aabb),
        light(scene.rule) {}

  VOXELFIELD_HOST_DEVICE void start(const PyramidScene<scalar_t>& scene, bool in_pieces, int64_t index,
                                    const Ray& whole) {
    number = index;
    ray = whole;
    walking = ray.near < ray.far;
    begun = false;
    if (in_pieces) pieces = RayPieces(scene.boxes, ray);
    walk.end();
    light = VisibleLight<float>(scene.rule);
    result = {};
  }

  // Advances to the next sample. Returns false if there is none.
  VOXELFIELD_HOST_DEVICE bool next(const PyramidScene<scalar_t>& scene, bool in_pieces) {
    while (!walk.next(sample.t)) {
      if (in_pieces ? !pieces.next(scene.boxes, scene.step, ray) : begun) return false;
      begun = true;
      view = ray.view(scene.step, scene.steps_per_length);
      walk = SampleWalk(scene.cells, view);
      cube = CubeRay(view, scene.aabb);
    }
    return true;
  }
};

// Writes the features at a point to a lane of the network's inputs.
template <typename scalar_t>
VOXELFIELD_HOST_DEVICE void read_levels(const PyramidScene<scalar_t>& scene, const float* point, int lane,
                                        Lanes* inputs) {
  for (int l = 0; l < scene.levels; ++l) {
    float sum[kLevelChannels] = {};
    Stencil<float, int32_t> stencil;
    if (scene.level[l].template find<true>(point, stencil) && !stencil.empty) {
      const scalar_t* rows[kCorners];
      for (int k = 0; k < kCorners; ++k) rows[k] = scene.level[l].features + stencil.offset(k);
      float corner[kCorners][kLevelChannels];
      if constexpr (std::is_same_v<scalar_t, Half>) {
        float16_rows.widen(rows, kCorners, kLevelChannels, corner[0]);
      } else {
        for (int k = 0; k < kCorners; ++k) {
          for (int c = 0; c < kLevelChannels; ++c) corner[k][c] = widen(rows[k][c]);
        }
      }
      for (int k = 0; k < kCorners; ++k) {
        const float weight = stencil.value(k);
        VOXELFIELD_VECTORIZE
        for (int c = 0; c < kLevelChannels; ++c) sum[c] += weight * corner[k][c];
      }
    }
    for (int c = 0; c < kLevelChannels; ++c) inputs[kLevelChannels * l + c][lane] = sum[c];
  }
}

template <typename scalar_t>
struct CpuField {
  PyramidScene<scalar_t> scene;
  CpuNetwork<scalar_t> density;
  bool in_pieces;

  explicit CpuField(const PyramidInputs& field)
      : scene(field.scene<scalar_t>()), density(field.density), in_pieces(field.in_pieces()) {}
};

// Marches the rays [first, end) of `rays`:
//   rays[number]              the Ray
//   rays.end(number, result)  called once the ray has ended, with the Rays::Result that visit() accumulated
// Calls visit(lane, geometry, column) for each sample that is kept; `geometry` holds the first Rays::kOutputs outputs
// of the network, in the lane's column. The ray continues if visit() returns true.
template <typename scalar_t, typename Rays, typename Visit>
VOXELFIELD_HOST_DEVICE void march_pyramid(const CpuField<scalar_t>& field, const Rays& rays, int64_t first, int64_t end,
                                          const Visit& visit) {
  using Lane = MarchedLane<scalar_t, typename Rays::Result>;
  const PyramidScene<scalar_t>& scene = field.scene;
  std::vector<Lane> lanes;
  lanes.reserve(kLanes);
  for (int i = 0; i < kLanes; ++i) lanes.emplace_back(scene);
  alignas(64) Lanes inputs[kMaxFieldLevels * kLevelChannels] = {}, scratch[2][kMaxWidth], geometry[kMaxGeometry];
  Lane* found[kLanes];
  for (;;) {
    int count = 0;
    for (Lane& lane : lanes) {
      while (!(lane.walking && lane.next(scene, field.in_pieces))) {
        if (lane.number >= 0) rays.end(lane.number, lane.result);
        lane.number = -1;
        lane.walking = false;
        if (first == end) break;
        lane.start(scene, field.in_pieces, first, rays[first]);
        ++first;
      }
      if (!lane.walking) continue;
      float point[3];
      lane.cube.point(lane.sample.t, point);
      read_levels(scene, point, count, inputs);
      found[count++] = &lane;
    }
    if (count == 0) return;
    for (int i = 0; i < kLevelChannels * scene.levels; ++i) round_lanes<scalar_t>(inputs[i]);
    const Lanes* hidden = field.density.hidden(inputs, scratch);
    field.density.outputs(hidden, 0, 1, geometry);
    bool any = false;
    for (int i = 0; i < count; ++i) {
      Lane& lane = *found[i];
      static_cast<EvaluatedSample<float>&>(lane.sample) = lane.light.evaluate(
          absorption_of_density(scene.density_of(geometry[0][i]), scene.step), true, SingleThread{});
      if (lane.light.stopped()) lane.walking = false;
      any = any || lane.sample.kept;
    }
    if (!any) continue;
    field.density.outputs(hidden, 1, Rays::kOutputs, geometry);
    for (int i = 0; i < count; ++i) {
      if (found[i]->sample.kept && !visit(*found[i], geometry, i)) found[i]->walking = false;
    }
  }
}

struct SlottedRays {
  static constexpr int kOutputs = 1;
  RayBatch batch;
  SampleSlots out;

  struct Result {
    int32_t count = 0;
  };

  VOXELFIELD_HOST_DEVICE Ray operator[](int64_t ray) const { return Ray::copy(batch[ray]); }
  VOXELFIELD_HOST_DEVICE void end(int64_t ray, const Result& result) const { out.counts[ray] = result.count; }
};

template <typename scalar_t>
VOXELFIELD_MULTIVERSION void march_range(const CpuField<scalar_t>& field, const SlottedRays& rays, int64_t first,
                                         int64_t end) {
  const SampleSlots& out = rays.out;
  march_pyramid(field, rays, first, end, [&](auto& lane, const Lanes* /*geometry*/, int /*column*/) {
    const int64_t slot = lane.number * out.max_samples_per_ray + lane.result.count;
    if (out.lengths != nullptr) {
      const float stretch = out.roulette.stretch(lane.sample, chance_of(lane.number, lane.sample.t));
      if (stretch == 0.0f) return true;
      out.lengths[slot] = stretch * field.scene.step;
    }
    out.distances[slot] = lane.sample.t;
    ++lane.result.count;
    return lane.result.count < out.max_samples_per_ray;
  });
}

struct PixelRays {
  static constexpr int kOutputs = kMaxGeometry;
  CameraView camera;
  ImagePointers out;

  struct Result {
    float opacity = 0.0f, depth = 0.0f;
  };

  VOXELFIELD_HOST_DEVICE Ray operator[](int64_t pixel) const {
    for (int color = 0; color < 3; ++color) out.rgb[3 * pixel + color] = out.background[color];
    return camera[pixel];
  }

  VOXELFIELD_HOST_DEVICE void end(int64_t pixel, const Result& result) const {
    out.opacity[pixel] = result.opacity;
    out.depth[pixel] = result.depth / fmaxf(result.opacity, 1e-6f);
  }
};

// Visible samples that wait until there are enough of them for the colour network. They are added to their pixels in
// their order along the ray.
template <typename scalar_t>
class ColorQueue {
 public:
  VOXELFIELD_HOST_DEVICE ColorQueue(const CpuNetwork<scalar_t>& network, const ImagePointers& out)
      : network_(network), out_(out) {}

  VOXELFIELD_HOST_DEVICE void push(const Lanes* geometry, int column, const float* direction, int degree, float weight,
                                   int64_t pixel) {
    float basis[kMaxShBasis];
    spherical_harmonics(direction, degree, basis);
    for (int i = 0; i < kMaxGeometry; ++i) inputs_[i][count_] = geometry[i][column];
    for (int i = 0; i < sh_basis_size(degree); ++i) {
      inputs_[kMaxGeometry + i][count_] = widen(narrow_to<scalar_t>(basis[i]));
    }
    weights_[count_] = weight;
    pixels_[count_++] = pixel;
  }

  VOXELFIELD_HOST_DEVICE bool full() const { return count_ == kLanes; }

  VOXELFIELD_HOST_DEVICE void flush() {
    Lanes scratch[2][kMaxWidth], logits[3];
    network_.outputs(network_.hidden(inputs_, scratch), 0, 3, logits);
    for (int i = 0; i < count_; ++i) {
      for (int color = 0; color < 3; ++color) {
        out_.rgb[3 * pixels_[i] + color] += weights_[i] * (sigmoid(logits[color][i]) - out_.background[color]);
      }
    }
    count_ = 0;
  }

 private:
  const CpuNetwork<scalar_t>& network_;
  const ImagePointers& out_;
  Lanes inputs_[kMaxGeometry + kMaxShBasis] = {};
  float weights_[kLanes];
  int64_t pixels_[kLanes];
  int count_ = 0;
};

template <typename scalar_t>
VOXELFIELD_MULTIVERSION void render_range(const CpuField<scalar_t>& field, const CpuNetwork<scalar_t>& color,
                                          int degree, const PixelRays& rays, int64_t first, int64_t end) {
  ColorQueue<scalar_t> queue(color, rays.out);
  march_pyramid(field, rays, first, end, [&](auto& lane, const Lanes* geometry, int column) {
    const PyramidSample& sample = lane.sample;
    const float t = field.in_pieces ? lane.pieces.distance(field.scene.boxes, sample.t) : sample.t;
    lane.result.opacity += sample.weight;
    lane.result.depth += sample.weight * t;
    queue.push(geometry, column, lane.ray.direction, degree, sample.weight, lane.number);
    if (queue.full()) queue.flush();
    return true;
  });
  queue.flush();
}

template <typename F>
void with_field(const PyramidInputs& inputs, const F& f) {
  dispatch_floating(inputs.dtype(), "levels", [&](auto zero) {
    using scalar_t = decltype(zero);
    if constexpr (std::is_same_v<scalar_t, double>) {
      STD_TORCH_CHECK(false, "levels must be float32, float16 or bfloat16, got float64");
    } else {
      f(CpuField<scalar_t>(inputs));
    }
  });
}

struct CpuPyramid : CpuBackend {
  // Networks of any width fit.
  static bool pyramid_image_fits(const Tensor& /*like*/, int64_t /*width*/) { return true; }

  static void march(const PyramidInputs& inputs, const RayBatch& batch, const SampleSlots& out,
                    const Tensor& /*like*/) {
    with_field(inputs, [&](const auto& field) {
      for_each_range(batch.count, kRaysPerTask,
                     [&](int64_t begin, int64_t end) { march_range(field, SlottedRays{batch, out}, begin, end); });
    });
    for (int64_t ray = 0; ray < batch.count; ++ray) out.sums[ray / out.parts.length] += out.counts[ray];
  }

  static void render(const PyramidInputs& inputs, const NetworkInputs& color_weights, int degree,
                     const CameraView& camera, const ImagePointers& out, const Tensor& /*like*/) {
    with_field(inputs, [&](const auto& field) {
      const std::decay_t<decltype(field.density)> color(color_weights);
      for_each_range(camera.width * camera.height, kRaysPerTask, [&](int64_t begin, int64_t end) {
        render_range(field, color, degree, PixelRays{camera, out}, begin, end);
      });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  MarchVisibleOps<CpuPyramid>::implement(m);
  PyramidImageOps<CpuPyramid>::implement(m);
}

}  // namespace voxelfield
