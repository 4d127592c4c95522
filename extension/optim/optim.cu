// The ops of this folder on CUDA. Warps walk over the vertices of grids in launches whose size does not depend on the
// number of listed tiles, and a few threads test each tile.
#include "common/backend.cuh"
#include "common/sums.cuh"
#include "optim/optim_ops.h"

namespace voxelfield {
namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// How the lanes of a warp share vertices of `vectors` vectors each: as many whole vertices as fit in the warp, or one
// vertex that all lanes process together.
struct VertexLanes {
  int vectors;     // per vertex
  int vertices;    // per warp at once
  int vertex;      // index of the vertex of this lane among those; `vertices` if it has none
  int first;       // the first vector of this lane, which also processes every 32nd vector after it
  unsigned peers;  // lanes that share the vertex

  __host__ __device__ static int vertices_per_warp(int vectors) { return vectors < kWarp ? kWarp / vectors : 1; }

  __device__ __forceinline__ VertexLanes(int vectors, int lane)
      : vectors(vectors), vertices(vertices_per_warp(vectors)), vertex(0), first(lane), peers(kFullWarp) {
    if (vectors >= kWarp) return;
    vertex = lane / vectors;
    first = lane - vertex * vectors;
    peers = ((1u << vectors) - 1) << (vertex * vectors);
    if (vertex >= vertices) peers = 1u << lane;
  }
};

// Calls f(l, visit, id, lanes), where `visit` is a visit of grid_of(l), or -1 for lanes without one, and `id` is the id
// of its tile if tiles are listed. All lanes of a warp call f together.
//
// A warp takes a few vertices of a whole grid at a time, or one listed tile at a time. Neighbouring warps then read the
// same row of neighbouring tiles, which are adjacent along z, so that accesses form longer runs than within one tile.
template <int Width, typename GridOf, typename F>
__device__ __forceinline__ void walk_vertices(int grids, const GridOf& grid_of, const F& f) {
  const int lane = threadIdx.x % kWarp;
  const int warps = gridDim.x * (blockDim.x / kWarp);
  int task = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  // Tasks are numbered across grids. A warp that has finished one grid continues with the next, so small grids leave no
  // warp idle.
  for (int l = 0; l < grids; ++l) {
    const VertexGrid& grid = grid_of(l);
    const VertexLanes lanes(grid.channels / Width, lane);
    const bool has_vertex = lanes.vertex < lanes.vertices;
    const int64_t visits = grid.visits();
    const int64_t per_task = grid.tiles == nullptr ? lanes.vertices : kOptimizerTileVertices;
    const int tasks = static_cast<int>((visits + per_task - 1) / per_task);
    if (grid.tiles == nullptr) {
      for (; task < tasks; task += warps) {
        const int64_t visit = task * per_task + lanes.vertex;
        f(l, has_vertex && visit < visits ? visit : -1, 0, lanes);
      }
    } else {
      // An id is fetched one iteration before it is needed, so that its latency does not add to the latency of the
      // vertices.
      int32_t id = task < tasks ? grid.tiles[task] : 0;
      for (; task < tasks; task += warps) {
        const int32_t ahead = task + warps < tasks ? grid.tiles[task + warps] : 0;
        for (int within = lanes.vertex; within - lanes.vertex < kOptimizerTileVertices; within += lanes.vertices) {
          f(l, has_vertex && within < kOptimizerTileVertices ? task * per_task + within : -1, id, lanes);
        }
        id = ahead;
      }
    }
    task -= tasks;
  }
}

// The size of a launch. It does not depend on the number of listed tiles, which is known only on the device.
struct WalkSize {
  int64_t tasks = 0;
  bool has_list = false;

  void add(const VertexGrid& grid, int width) {
    const int64_t per_task =
        grid.tiles == nullptr ? VertexLanes::vertices_per_warp(grid.channels / width) : kOptimizerTileVertices;
    tasks += (grid.max_visits() + per_task - 1) / per_task;
    has_list = has_list || grid.tiles != nullptr;
  }

  // If all vertices take the same work, many short-lived thread blocks are launched in memory order. Otherwise fewer
  // blocks stay resident, because many blocks might have nothing to do. (On an H200, this reaches 97 % instead of 93 %
  // of the bandwidth of a copy for whole grids, and 80 % instead of 70 % for lists.)
  unsigned thread_blocks(bool uneven) const {
    STD_TORCH_CHECK(tasks < (int64_t{1} << 30), "grids must have fewer than 2^30 tasks of a warp, got ", tasks);
    const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount);
    const int64_t per_processor = uneven || has_list ? 32 : 512;
    return static_cast<unsigned>(
        std::min<int64_t>((tasks + kThreads / kWarp - 1) / (kThreads / kWarp), per_processor * processors));
  }
};

struct AdamLevels {
  AdamLevel level[kMaxLevels];
  int count;
};

// Updates the vector of values at index `at`. Its first value belongs to `channel`.
template <int Width, typename moment_t, bool ByChannel>
__device__ __forceinline__ void update_vector(const AdamLevel& level, const AdamRule& rule, const AdamStep& step,
                                              int64_t at, int channel) {
  using Floats = Vector<float, Width>;
  moment_t* const vector_exp_avg = static_cast<moment_t*>(level.exp_avg) + at;
  moment_t* const vector_exp_avg_sq = static_cast<moment_t*>(level.exp_avg_sq) + at;
  const Floats grad = load<Width>(level.grad + at);
  Floats param = load<Width>(level.param + at);
  Floats exp_avg = narrow<float>(load<Width>(vector_exp_avg));
  Floats exp_avg_sq = narrow<float>(load<Width>(vector_exp_avg_sq));
  [[maybe_unused]] Floats rates;
  if constexpr (ByChannel) rates = load_constant<Width>(level.channel_rates + channel);
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    AdamStep channel_step = step;
    if constexpr (ByChannel) channel_step = step.times(rates.lane[i]);
    adam_update(rule, channel_step, grad.lane[i], param.lane[i], exp_avg.lane[i], exp_avg_sq.lane[i]);
  }
  store_global(level.param + at, param);
  store_global(vector_exp_avg, narrow<moment_t>(exp_avg));
  store_global(vector_exp_avg_sq, narrow<moment_t>(exp_avg_sq));
  if (rule.clear_grad) store_global(level.grad + at, Floats{});
  for (int copy = 0; copy < level.copies; ++copy) {
    if (level.working_type == WorkingType::kHalf) {
      store_global(static_cast<Half*>(level.working[copy]) + at, narrow<Half>(param));
    } else {
      store_global(static_cast<BFloat16*>(level.working[copy]) + at, narrow<BFloat16>(param));
    }
  }
}

template <int Width>
__device__ __forceinline__ bool any_nonzero(const Vector<float, Width>& x) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < Width; ++i) any = any || x.lane[i] != 0.0f;
  return any;
}

__device__ void clear_gradients(const AdamLevels& levels) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int l = 0; l < levels.count; ++l) {
    for (int64_t i = thread; i < levels.level[l].values(); i += threads) levels.level[l].grad[i] = 0.0f;
  }
}

// Which vertices are not updated: none; those whose gradient is zero; those that are not in a table.
enum class Skipped { kNone, kWithoutGradient, kNotInTable };

template <int Width, typename moment_t, Skipped kSkipped, bool ByChannel>
__global__ void __launch_bounds__(kThreads) adam_kernel(const __grid_constant__ AdamLevels levels, AdamRule rule) {
  if (rule.skips_step()) {
    if (rule.clear_grad) clear_gradients(levels);
    return;
  }
  __shared__ AdamStep steps[kMaxLevels];
  if (threadIdx.x < levels.count) steps[threadIdx.x] = levels.level[threadIdx.x].step(rule);
  __syncthreads();
  walk_vertices<Width>(
      levels.count, [&](int l) -> const VertexGrid& { return levels.level[l].grid; },
      [&](int l, int64_t visit, int32_t id, const VertexLanes& lanes) {
        const AdamLevel& level = levels.level[l];
        const int64_t vertex = visit < 0 ? -1 : level.grid.index_of_visit(visit, id);
        const int64_t start = vertex * level.grid.channels;
        const int vectors = vertex < 0 ? 0 : lanes.vectors;
        if (kSkipped == Skipped::kNotInTable && (vertex < 0 || !level.touched.has(visit))) return;
        if (kSkipped == Skipped::kWithoutGradient) {
          bool any = false;
          for (int j = lanes.first; j < vectors; j += kWarp) {
            any = any || any_nonzero(load<Width>(level.grad + start + j * Width));
          }
          if ((__ballot_sync(kFullWarp, any) & lanes.peers) == 0) return;
        }
        for (int j = lanes.first; j < vectors; j += kWarp) {
          update_vector<Width, moment_t, ByChannel>(level, rule, steps[l], start + j * Width, j * Width);
        }
      });
}

int width_of(const AdamLevel& level) {
  int width = vector_width(4, {level.grid.channels}, level.param, level.grad, level.channel_rates);
  for (const void* moments : {level.exp_avg, level.exp_avg_sq}) {
    width = level.narrow_moments ? vector_width(width, {}, static_cast<const uint16_t*>(moments))
                                 : vector_width(width, {}, static_cast<const float*>(moments));
  }
  for (const void* copy : level.working) width = vector_width(width, {}, static_cast<const uint16_t*>(copy));
  return width;
}

// Splits a grid into parts that are updated as separate grids. If all values of a grid are updated alike, the grid is
// treated as one row that consists of whole vectors and a remainder.
std::vector<AdamLevel> parts_of(const AdamLevel& level, const AdamRule& rule) {
  if (level.grid.tiles != nullptr || level.channel_rates != nullptr || rule.skip_untouched) return {level};
  const int64_t values = level.grid.vertices * level.grid.channels, whole = values / 4 * 4;
  AdamLevel body = level, rest = level;
  body.grid.channels = 4;
  body.grid.vertices = whole / 4;
  rest.grid.channels = 1;
  rest.grid.vertices = values - whole;
  for (float** array : {&rest.param, &rest.grad}) *array += whole;
  for (void** moments : {&rest.exp_avg, &rest.exp_avg_sq}) {
    const size_t size = level.narrow_moments ? sizeof(BFloat16) : sizeof(float);
    *moments = static_cast<char*>(*moments) + whole * size;
  }
  for (int copy = 0; copy < level.copies; ++copy) {
    rest.working[copy] = static_cast<uint16_t*>(level.working[copy]) + whole;
  }
  if (whole == 0) return {rest};
  return whole == values ? std::vector<AdamLevel>{body} : std::vector<AdamLevel>{body, rest};
}

template <int Width>
__device__ __forceinline__ void add_slopes(const TotalVariation& task, float factor, const Vector<float, Width>& center,
                                           const float* neighbour, Vector<float, Width>& sum) {
  const Vector<float, Width> other = load_constant<Width>(neighbour);
#pragma unroll
  for (int i = 0; i < Width; ++i) sum.lane[i] += factor * task.slope(center.lane[i] - other.lane[i]);
}

template <int Width>
__global__ void __launch_bounds__(kThreads) total_variation_kernel(const __grid_constant__ TotalVariation task) {
  const VertexGrid& grid = task.grid;
  walk_vertices<Width>(
      1, [&](int) -> const VertexGrid& { return task.grid; },
      [&](int, int64_t visit, int32_t id, const VertexLanes& lanes) {
        int32_t vertex[3];
        if (visit < 0 || !grid.find(visit, id, vertex)) return;
        const int64_t start = grid.index_of(vertex) * grid.channels;
        for (int j = lanes.first; j < lanes.vectors; j += kWarp) {
          const float* value = task.param + start + j * Width;
          float* out = task.grad + start + j * Width;
          Vector<float, Width> sum = load<Width>(out);
          const Vector<float, Width> center = load_constant<Width>(value);
          int64_t stride = grid.channels;
#pragma unroll
          for (int axis = 2; axis >= 0; --axis) {
            const float factor = task.factor(axis);
            if (vertex[axis] > 0) add_slopes<Width>(task, factor, center, value - stride, sum);
            if (vertex[axis] < grid.size[axis] - 1) add_slopes<Width>(task, factor, center, value + stride, sum);
            stride *= grid.size[axis];
          }
          store_global(out, sum);
        }
      });
}

// Tiles are listed in two passes: the first finds the active tiles and counts those of each part, and in the second
// each block adds up the counts of the parts before its own to place its tiles. The list is therefore in ascending
// order.
struct TileParts {
  static constexpr int64_t kMaxCount = 2048;
  int64_t length;   // tiles per part, a multiple of those of a block
  uint8_t* active;  // for each tile
  int32_t* counts;  // for each part

  static int64_t length_for(int64_t tiles) {
    return (tiles + kMaxCount * kThreads - 1) / (kMaxCount * kThreads) * kThreads;
  }
};

// `lanes` consecutive threads, a power of two, share a tile.
__global__ void __launch_bounds__(kThreads)
    find_active_tiles_kernel(const __grid_constant__ OccupiedCells cells, int lanes,
                             const __grid_constant__ TileParts parts) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int lane = threadIdx.x % kWarp;
  const int first = lane % lanes;
  const int64_t number = thread / lanes;
  const bool valid = number < cells.tile_total();
  const bool found = valid && cells.any(cells[number], first, lanes);
  const unsigned peers = (lanes == kWarp ? kFullWarp : (1u << lanes) - 1) << (lane - first);
  const unsigned finders = __ballot_sync(kFullWarp, found);
  const bool active = first == 0 && (finders & peers) != 0;
  if (valid && first == 0) parts.active[number] = active;
  // The tiles of a warp lie in one part.
  const unsigned listed = __ballot_sync(kFullWarp, active);
  if (lane == 0 && listed != 0) atomicAdd(parts.counts + number / parts.length, __popc(listed));
}

__global__ void __launch_bounds__(kThreads)
    list_active_tiles_kernel(const __grid_constant__ OccupiedCells cells, const __grid_constant__ TileParts parts,
                             int32_t* __restrict__ ids, int32_t* __restrict__ count) {
  __shared__ int32_t scratch[2][kThreads / kWarp], last;
  int32_t before = 0;
  for (int part = threadIdx.x; part < static_cast<int>(blockIdx.x); part += kThreads) before += parts.counts[part];
  before = block_sum<kThreads>(before, scratch[0]);
  const int64_t begin = blockIdx.x * parts.length, end = min(begin + parts.length, cells.tile_total());
  for (int64_t chunk = begin; chunk < end; chunk += kThreads) {
    const int64_t number = chunk + threadIdx.x;
    const int32_t active = number < end ? parts.active[number] : 0;
    const int32_t through = before + block_inclusive_sum<kThreads>(active, scratch[1]);
    if (active != 0) ids[through - 1] = cells.id(number);
    if (threadIdx.x == kThreads - 1) last = through;
    __syncthreads();
    before = last;
    __syncthreads();
  }
  if (end == cells.tile_total() && threadIdx.x == 0) *count = before;
}

// A warp takes a tile, and a lane one of 32 vertices that follow each other. All values are read before any is tested,
// so that a warp waits for memory once.
template <int Width>
__global__ void __launch_bounds__(kThreads) find_touched_kernel(const __grid_constant__ FindTouched find) {
  const int64_t tile = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (tile >= find.touched.tiles) return;
  const int lane = threadIdx.x % kWarp;
  const int32_t channels = find.touched.grid.channels;
  bool found[TouchedTable::kWords];
  int64_t first[TouchedTable::kWords];
#pragma unroll
  for (int word = 0; word < TouchedTable::kWords; ++word) {
    const int64_t vertex = find.touched.vertex(tile, word * kWarp + lane);
    found[word] = find.all && vertex >= 0;
    first[word] = find.all || vertex < 0 ? -1 : vertex * channels;
  }
  for (int32_t channel = 0; channel < channels; channel += Width) {
    Vector<float, Width> values[TouchedTable::kWords];
#pragma unroll
    for (int word = 0; word < TouchedTable::kWords; ++word) {
      values[word] = first[word] < 0 ? Vector<float, Width>{} : load_constant<Width>(find.grad + first[word] + channel);
    }
#pragma unroll
    for (int word = 0; word < TouchedTable::kWords; ++word) found[word] |= any_nonzero(values[word]);
  }
  int32_t cell = 0, total = 0;
#pragma unroll
  for (int word = 0; word < TouchedTable::kWords; ++word) {
    const unsigned marks = __ballot_sync(kFullWarp, found[word]);
    if (lane == word) cell = static_cast<int32_t>(marks);
    total += __popc(marks);
  }
  if (lane == TouchedTable::kWords) cell = total;
  if (lane < TouchedTable::kColumns) find.touched.table.row(tile)[lane] = cell;
}

template <int Bytes>
__global__ void __launch_bounds__(kThreads) copy_touched_kernel(const __grid_constant__ CopyTouched copy) {
  const int64_t tile = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (tile >= copy.touched.tiles) return;
  const int lane = threadIdx.x % kWarp;
  const int32_t* const row = copy.touched.table.row(tile);
  int64_t start = row[TouchedTable::kWords];
#pragma unroll
  for (int word = 0; word < TouchedTable::kWords; ++word) {
    const unsigned marks = static_cast<unsigned>(row[word]), lane_bit = 1u << lane;
    const int64_t at = start + __popc(marks & (lane_bit - 1));
    start += __popc(marks);
    if ((marks & lane_bit) == 0 || at < 0 || at >= copy.rows) continue;
    const int64_t vertex = copy.touched.vertex(tile, word * kWarp + lane);
    if (vertex < 0) continue;
    char* const values = copy.values + vertex * copy.vertex_bytes;
    char* const packed = copy.packed + at * copy.vertex_bytes;
    const char* const from = copy.unpacks ? packed : values;
    char* const to = copy.unpacks ? values : packed;
    for (int64_t byte = 0; byte < copy.vertex_bytes; byte += Bytes) {
      store_global(to + byte, load<Bytes>(from + byte));
    }
  }
}

struct CudaOptim : CudaBackend {
  static void adam(const std::vector<AdamLevel>& levels, const AdamRule& rule) {
    // Levels are grouped by vector width and the type of moments, by whether rates differ by channel, and by whether a
    // table says what to skip, so that grids with one rate avoid the cost of rates per channel, and those without a
    // table that of a table.
    std::map<std::tuple<int, bool, bool, bool>, std::vector<AdamLevel>> groups;
    for (const AdamLevel& level : levels) {
      for (const AdamLevel& part : parts_of(level, rule)) {
        groups[{width_of(part), part.narrow_moments, part.channel_rates != nullptr, part.touched.rows != nullptr}]
            .push_back(part);
      }
    }
    for (const auto& [kind, parts] : groups) {
      dispatch_vector_width<4, 2, 1>(std::get<0>(kind), [&, &kind = kind, &parts = parts](auto width) {
        dispatch_flag(std::get<2>(kind), [&](auto by_channel) {
          std::get<1>(kind) ? update<width.value, BFloat16, by_channel.value>(parts, rule)
                            : update<width.value, float, by_channel.value>(parts, rule);
        });
      });
    }
  }

  static void total_variation(const TotalVariation& task) {
    dispatch_vector_width<4, 2, 1>(vector_width(4, {task.grid.channels}, task.param, task.grad), [&](auto width) {
      WalkSize size;
      size.add(task.grid, width.value);
      if (size.tasks > 0) launch(total_variation_kernel<width.value>, size.thread_blocks(false), kThreads, 0, task);
    });
  }

  static void active_tiles(const OccupiedCells& cells, int32_t* ids, int32_t* count, const Tensor& like) {
    constexpr int32_t kRowsPerThread = 16;
    const int64_t tiles = cells.tile_total();
    const int64_t middle = ((int64_t{cells.tiles[0] / 2} * cells.tiles[1]) + cells.tiles[1] / 2) * cells.tiles[2];
    const int32_t share = cells[middle + cells.tiles[2] / 2].rows() / kRowsPerThread;
    int lanes = 1;
    while (lanes < kWarp && lanes < share) lanes *= 2;
    const int64_t length = TileParts::length_for(tiles);
    const unsigned count_of_parts = blocks(tiles, length);
    Tensor active = new_empty(like, {tiles}, ScalarType::Byte);
    Tensor counts = new_zeros(like, {count_of_parts}, ScalarType::Int);
    const TileParts parts{length, data_of(active), data_of(counts)};
    launch(find_active_tiles_kernel, blocks(tiles * lanes, kThreads), kThreads, 0, cells, lanes, parts);
    launch(list_active_tiles_kernel, count_of_parts, kThreads, 0, cells, parts, ids, count);
  }

  static void find_touched(const FindTouched& find) {
    dispatch_vector_width<4, 2, 1>(vector_width(4, {find.touched.grid.channels}, find.grad), [&](auto width) {
      launch(find_touched_kernel<width.value>, blocks(find.touched.tiles * kWarp, kThreads), kThreads, 0, find);
    });
  }

  static void copy_touched(const CopyTouched& copy) {
    dispatch_vector_width<16, 8, 4, 2>(
        vector_width(16, {copy.vertex_bytes}, copy.values, copy.packed), [&](auto bytes) {
          launch(copy_touched_kernel<bytes.value>, blocks(copy.touched.tiles * kWarp, kThreads), kThreads, 0, copy);
        });
  }

 private:
  template <int Width, typename moment_t, bool ByChannel>
  static void update(const std::vector<AdamLevel>& parts, const AdamRule& rule) {
    const bool skip = rule.skip_untouched;
    const auto kernel = !skip ? adam_kernel<Width, moment_t, Skipped::kNone, ByChannel>
                        : parts.front().touched.rows == nullptr
                            ? adam_kernel<Width, moment_t, Skipped::kWithoutGradient, ByChannel>
                            : adam_kernel<Width, moment_t, Skipped::kNotInTable, ByChannel>;
    for (size_t next = 0; next < parts.size();) {
      AdamLevels batch{};
      WalkSize size;
      while (next < parts.size() && batch.count < kMaxLevels) {
        size.add(parts[next].grid, Width);
        batch.level[batch.count++] = parts[next++];
      }
      if (size.tasks > 0) launch(kernel, size.thread_blocks(skip), kThreads, 0, batch, rule);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { OptimOps<CudaOptim>::implement(m); }

}  // namespace voxelfield
