// Distributes the vertices of several grids over the warps of a launch whose size does not depend on the lists'
// lengths.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "common/backend.cuh"
#include "optim/vertex_grid.h"

namespace voxelfield {

// How the lanes of a warp share vertices of `vectors` vectors each: as many whole vertices as fit, or one vertex that
// the lanes go through together.
struct VertexLanes {
  int vectors;     // of a vertex
  int vertices;    // of a warp at once
  int vertex;      // of this lane, among those; `vertices` if it has none
  int first;       // vector that this lane starts with, followed by every 32nd
  unsigned peers;  // lanes that have the same vertex

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

// Calls f(l, visit, id, lanes) with a visit of grid_of(l), -1 for lanes that have none, and the id of its tile if
// tiles are listed. All lanes of a warp call it together.
//
// A warp takes a few vertices at a time of a whole grid, or one listed tile at a time. Neighbouring warps then read the
// same row of neighbouring tiles, which follow one another along z, so that accesses form longer runs than one tile's.
template <int Width, typename GridOf, typename F>
__device__ __forceinline__ void walk_vertices(int grids, const GridOf& grid_of, const F& f) {
  const int lane = threadIdx.x % kWarp;
  const int warps = gridDim.x * (blockDim.x / kWarp);
  int task = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  // Tasks are numbered across grids: a warp that has finished with one grid continues with the next, so that small
  // grids leave no warp idle.
  for (int l = 0; l < grids; ++l) {
    const VertexGrid& grid = grid_of(l);
    const VertexLanes lanes(grid.channels / Width, lane);
    const bool has_vertex = lanes.vertex < lanes.vertices;
    const int64_t visits = grid.visits();
    const int64_t per_task = grid.tiles == nullptr ? lanes.vertices : kTileVertices;
    const int tasks = static_cast<int>((visits + per_task - 1) / per_task);
    if (grid.tiles == nullptr) {
      for (; task < tasks; task += warps) {
        const int64_t visit = task * per_task + lanes.vertex;
        f(l, has_vertex && visit < visits ? visit : -1, 0, lanes);
      }
    } else {
      // An id is fetched one round before it is needed, so that its latency does not add to that of the vertices.
      int32_t id = task < tasks ? grid.tiles[task] : 0;
      for (; task < tasks; task += warps) {
        const int32_t ahead = task + warps < tasks ? grid.tiles[task + warps] : 0;
        for (int within = lanes.vertex; within - lanes.vertex < kTileVertices; within += lanes.vertices) {
          f(l, has_vertex && within < kTileVertices ? task * per_task + within : -1, id, lanes);
        }
        id = ahead;
      }
    }
    task -= tasks;
  }
}

// The size of a launch, which the number of listed tiles does not influence: it is known on the device only.
struct WalkSize {
  int64_t tasks = 0;
  bool has_list = false;

  void add(const VertexGrid& grid, int width) {
    const int64_t per_task =
        grid.tiles == nullptr ? VertexLanes::vertices_per_warp(grid.channels / width) : kTileVertices;
    tasks += (grid.max_visits() + per_task - 1) / per_task;
    has_list = has_list || grid.tiles != nullptr;
  }

  // If all vertices take the same work, many short-lived blocks of threads are started in the order of memory.
  // Otherwise fewer blocks stay resident, because many of them might find nothing to do. (On an H200: 97 % instead of
  // 93 % of a copy's bandwidth for whole grids, 80 % instead of 70 % for lists.)
  unsigned thread_blocks(bool uneven) const {
    STD_TORCH_CHECK(tasks < (int64_t{1} << 30), "grids must have fewer than 2^30 tasks of a warp, got ", tasks);
    const int64_t processors = device_attribute(cudaDevAttrMultiProcessorCount);
    const int64_t per_processor = uneven || has_list ? 32 : 512;
    return static_cast<unsigned>(
        std::min<int64_t>((tasks + kThreads / kWarp - 1) / (kThreads / kWarp), per_processor * processors));
  }
};

}  // namespace voxelfield
