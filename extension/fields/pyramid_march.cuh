// Marching rays through a pyramid of grids followed by a density network. Each thread of a warp marches its own ray, or
// several threads share one. The warp evaluates the network on tensor cores for the 32 current samples of its threads.
// A ray ends once its transmittance falls below the threshold, so few samples beyond that point are evaluated, and its
// threads start another ray.
#pragma once

#include "fields/pyramid_plan.h"
#include "fields/pyramid_scene.h"
#include "mlp/network.cuh"
#include "volume/keep_rule.cuh"

namespace voxelfield {

// After this many strides or beginnings of pieces, the warp no longer waits for threads that have not reached a sample.
constexpr int kMaxStrides = 32;

using HalfScene = PyramidScene<torch::headeronly::Half>;

// The features of a level at a point, summed in float16. Zeros where a block is not stored.
template <bool Sparse>
__device__ __forceinline__ uint2 read_level(const PyramidLevel<torch::headeronly::Half>& level, const float* point) {
  Stencil<float, int32_t> s;
  if (!level.template find<Sparse>(point, s)) return make_uint2(0, 0);
  uint2 corner[kCorners];
#pragma unroll
  for (int k = 0; k < kCorners; ++k) corner[k] = __ldg(reinterpret_cast<const uint2*>(level.features + s.offset(k)));
  __half2 sum[2] = {};
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    const __half2 weight = __float2half2_rn(s.value(k));
    sum[0] = __hfma2(weight, as_half2(corner[k].x), sum[0]);
    sum[1] = __hfma2(weight, as_half2(corner[k].y), sum[1]);
  }
  // An empty stencil may have read NaN, and NaN times zero is NaN, not zero.
  return s.empty ? make_uint2(0, 0) : make_uint2(as_bits(sum[0]), as_bits(sum[1]));
}

// The ray that a thread marches.
template <typename Result>
struct MarchedRay {
  int number;  // -1 if the thread has no ray yet
  CubeRay cube;
  Result result;
};

// A field's networks, with at most kFieldInputs inputs. Weights are in shared memory or packed.
template <int Width>
using StagedField = StagedWeights<Width, kFieldInputs>;
template <int Width>
using PackedField = PackedWeights<Width, kFieldInputs>;

// 16 * M rows of inputs in shared memory.
template <int M>
__device__ __forceinline__ Activations<M, kFieldInputs> load_rows(const SharedMatrix& inputs, int row) {
  Activations<M, kFieldInputs> x;
  for_each_tile<M, kFieldInputs>([&](int i, int m) { x.tile[i][m] = load_fragment(inputs, row + 16 * m, 16 * i); });
  return x;
}

__device__ __forceinline__ void clear_row(unsigned char* rows) {
  uint4* own = reinterpret_cast<uint4*>(rows + lane_of_warp() * kRowBytes);
#pragma unroll
  for (int i = 0; i < kRowBytes / 16; ++i) own[i] = make_uint4(0, 0, 0, 0);
}

// Returns to each thread the first column of its row, of 32 rows, rounded to float16.
__device__ __forceinline__ float first_column(const Panel<2>& panel) {
  const int lane = lane_of_warp(), source = lane % 8 * 4;
  float found = 0.0f;
#pragma unroll
  for (int eight = 0; eight < 4; ++eight) {
    const float value = __shfl_sync(kFullWarp, panel.sum[eight / 2][0][eight % 2 * 2], source);
    if (lane / 8 == eight) found = value;
  }
  return __half2float(__float2half_rn(found));
}

// A team of `Lanes` threads that share a ray. Each takes one of as many consecutive samples.
template <int Lanes>
struct RayTeam {
  static_assert(Lanes >= 1 && Lanes <= kWarp && (Lanes & (Lanes - 1)) == 0, "a team is a power of two of threads");
  int seat, first;  // the thread's index in the team; the lane of the team's first thread

  __device__ __forceinline__ RayTeam() : seat(lane_of_warp() % Lanes), first(lane_of_warp() - seat) {}

  // Keeps the bit of the first thread of each team, given bits that are equal for all threads of a team.
  static __device__ __forceinline__ unsigned teams(unsigned lanes) {
    return Lanes == kWarp ? lanes & 1u : lanes & (kFullWarp / ((1ull << Lanes) - 1));
  }

  // The bits of this team's threads.
  __device__ __forceinline__ unsigned own(unsigned lanes) const {
    return lanes >> first & static_cast<unsigned>((1ull << Lanes) - 1);
  }
};

// The position of the set bit with `rank` set bits below it, which must exist.
__device__ __forceinline__ int place_of_bit(unsigned bits, int rank) {
  int place = 0;
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    const int below = __popc(bits & ((1u << half) - 1u));
    if (rank >= below) {
      rank -= below;
      place += half;
      bits >>= half;
    }
  }
  return place;
}

// Distributes the ray numbers [0, rays.count()) to the teams of a warp, in ascending order, until rays.enough(). A warp
// claims Rays::kBatch numbers at a time.
template <typename Rays>
class RaySupply {
  static constexpr int kLanes = Rays::kLanes;

 public:
  __device__ __forceinline__ RaySupply(int* next_ray, const Rays& rays)
      : next_ray_(next_ray), rays_(rays), count_(rays.count()) {}

  // A ray number for each requesting team, or -1. A call may return fewer than requested, and none once none is left.
  __device__ __forceinline__ int next(unsigned asking, const RayTeam<kLanes>& team) {
    if (next_ == end_ && next_ < count_) {
      int first = 0;
      if (lane_of_warp() == 0) first = rays_.enough() ? count_ : atomicAdd(next_ray_, Rays::kBatch);
      next_ = min(__shfl_sync(kFullWarp, first, 0), count_);
      end_ = min(next_ + Rays::kBatch, count_);
    }
    const unsigned teams = RayTeam<kLanes>::teams(asking);
    const int number = next_ + __popc(teams & ((1u << team.first) - 1u));
    const bool given = (teams >> team.first & 1) != 0 && number < end_;
    next_ = min(next_ + __popc(teams), end_);
    return given ? number : -1;
  }

  __device__ __forceinline__ bool empty() const { return next_ == count_; }

 private:
  int* next_ray_;
  const Rays& rays_;
  int count_;
  int next_ = 0, end_ = 0;
};

// Calls `run` with two std::bool_constant: whether boxes cut rays into pieces, and whether levels may be sparse. Scenes
// with neither use specialised kernels.
template <typename Run>
auto dispatch_scene(bool in_pieces, bool sparse, const Run& run) {
  if (in_pieces) return run(std::true_type{}, std::true_type{});
  if (sparse) return run(std::false_type{}, std::true_type{});
  return run(std::false_type{}, std::false_type{});
}

// Marches all of `rays`:
//   Rays::kInPieces            whether the scene's boxes cut rays into pieces; otherwise rays are straight
//   Rays::kSparse              whether some of the scene's levels may be sparse
//   Rays::kWorldDistances      whether visit() gets world distances for samples in pieces
//   Rays::kLanes               threads that share a ray: more finish it sooner, but evaluate more samples past its end
//   Rays::kBatch               number of neighbouring rays that are assigned to one warp
//   Rays::kMaxIdle            threads without a ray wait until more than this many are idle, and then start rays
//                              together
//   rays.count()               number of rays
//   rays.enough()              whether rays that no warp has claimed yet may be left out
//   rays.locate(number)        the index of the ray with that number, or -1 if there is none
//   rays[ray]                  the Ray with that index
//   rays.begin(ray)            called once, by the first thread of the ray's team
//   rays.end(ray, result)      called once the ray has ended, with the Rays::Result that visit() accumulated
// `rows` is the warp's shared memory for network inputs. Whenever there are samples, all threads call
// visit(sample, panel, direction, ray, team), where `ray` is the thread's MarchedRay and `panel` holds the 16 outputs,
// of which 8 * Eights are computed, for the rows of all threads. The ray continues if visit() returns true, which must
// be the same for all threads of the ray.
template <int Width, int Eights, typename Rays, typename Visit>
__device__ __forceinline__ void march_pyramid(const HalfScene& scene, const StagedField<Width>& density,
                                              const Rays& rays, int* next_ray, unsigned char* rows,
                                              const Visit& visit) {
  constexpr int kLanes = Rays::kLanes;
  static_assert(0 <= Rays::kMaxIdle && Rays::kMaxIdle < kWarp, "a warp must start rays when all threads are idle");
  const SharedMatrix features{shared_address(rows), kRowBytes};
  clear_row(rows);

  const RayTeam<kLanes> team;
  RaySupply<Rays> supply(next_ray, rays);
  Ray ray{};
  RayView view = ray.view(scene.step, scene.steps_per_length);
  RayWalk<CellsView> walk(scene.cells, view);
  // Lattice numbers: the first position that is neither taken nor passed, and the end of the piece. Positions from
  // `next` on and before `hits_end` are hits.
  float next = 0.0f, stop = 0.0f, hits_end = 0.0f;
  MarchedRay<typename Rays::Result> own{-1, CubeRay(view, scene.aabb), {}};
  bool walking = false;
  VisibleLight<float> light(scene.rule);
  RayPieces pieces;
  bool begun = false;
  // Begins the next piece of the team's ray, or returns false if there is none. A straight ray is a single piece.
  const auto begin_piece = [&] {
    if constexpr (Rays::kInPieces) {
      if (!pieces.next(scene.boxes, scene.step, ray)) return false;
    } else {
      if (begun) return false;
      begun = true;
    }
    view = ray.view(scene.step, scene.steps_per_length);
    walk = RayWalk(scene.cells, view);
    next = hits_end = static_cast<float>(walk.range().begin);
    stop = static_cast<float>(walk.range().end);
    own.cube = CubeRay(view, scene.aabb);
    return true;
  };
  for (;;) {
    unsigned idle = __ballot_sync(kFullWarp, !walking);
    while (__popc(idle) > Rays::kMaxIdle) {
      const int number = supply.next(idle, team);
      if (!__any_sync(kFullWarp, number >= 0) && supply.empty()) break;
      if (number >= 0) {
        if (own.number >= 0 && team.seat == 0) rays.end(own.number, own.result);
        own.number = rays.locate(number);
        if (own.number >= 0) {
          if (team.seat == 0) rays.begin(own.number);
          ray = rays[own.number];
          walking = ray.near < ray.far;
          own.result = {};
        }
        if (walking) {
          if constexpr (Rays::kInPieces) pieces = RayPieces(scene.boxes, ray);
          begun = false;
          next = stop = 0.0f;
          light = VisibleLight<float>(scene.rule);
        }
      }
      idle = __ballot_sync(kFullWarp, !walking);
    }
    if (idle == kFullWarp) break;

    // Each thread of a team examines one lattice position. Beginning a piece takes many times as long as examining
    // positions, so rays whose piece has ended wait, if necessary into later rounds, until no ray that lacks samples
    // has positions left, and then begin pieces together.
    PyramidSample sample{};
    float point[3];
    int found_by_team = 0;
    for (int i = 0; i < kMaxStrides; ++i) {
      const bool lacking = walking && found_by_team < kLanes;
      const bool striding = lacking && next < stop;
      if (__any_sync(kFullWarp, striding)) {
        const float examined = next + static_cast<float>(team.seat);
        float after = fmaxf(examined, hits_end);  // the next position whose cell may be of the other kind
        const bool hit = striding && examined < stop && (examined < hits_end || walk.stride(after, stop));
        const unsigned hits = team.own(__ballot_sync(kFullWarp, hit));
        const float after_last = __shfl_sync(kFullWarp, after, kLanes - 1, kLanes);
        const auto position_of_hit = [&](int rank) {
          return kLanes == 1 ? next : next + static_cast<float>(place_of_bit(hits, rank));
        };
        const int room = kLanes - found_by_team, rank = team.seat - found_by_team, taken = min(__popc(hits), room);
        if (0 <= rank && rank < taken) {
          sample.t = view.t(position_of_hit(rank));
          own.cube.point(sample.t, point);
          if constexpr (Rays::kInPieces && Rays::kWorldDistances) sample.t = pieces.distance(scene.boxes, sample.t);
        }
        if (striding) {
          found_by_team += taken;
          if (__popc(hits) > room) {
            next = position_of_hit(room);
          } else if (hits >> (kLanes - 1) != 0) {
            next += static_cast<float>(kLanes);
            hits_end = after_last;
          } else {
            next = after_last;
          }
        }
      } else if (__any_sync(kFullWarp, lacking)) {
        if (lacking) walking = begin_piece();
      } else {
        break;
      }
    }
    const bool found = team.seat < found_by_team;
    if (!__any_sync(kFullWarp, found)) continue;

    if (found) {
      uint2* const row = reinterpret_cast<uint2*>(rows + lane_of_warp() * kRowBytes);
#pragma unroll 2
      for (int l = 0; l < scene.levels; ++l) row[l] = read_level<Rays::kSparse>(scene.level[l], point);
    }
    __syncwarp();
    const Panel<2> panel = last_two_layers<Width, Eights>(load_rows<2>(features, 0), density[0], density[1]);
    const float raw = first_column(panel);
    static_cast<EvaluatedSample<float>&>(sample) =
        light.evaluate(absorption_of_density(scene.density_of(raw), scene.step), found, ThreadTeam<kLanes>{team.seat});
    if (light.stopped()) walking = false;
    if (!visit(sample, panel, ray.direction, own, team)) walking = false;
    __syncwarp();
  }
  if (own.number >= 0 && team.seat == 0) rays.end(own.number, own.result);
}

}  // namespace voxelfield
