// The parts that all CPU backends share: the device guard, and how work is distributed over threads.
#pragma once

#include <algorithm>
#include <atomic>

#include "common/tensors.h"

namespace voxelfield {

// The most threads that for_each_task uses.
inline int64_t threads_for(int64_t tasks) {
  return std::clamp<int64_t>(torch::stable::get_num_threads(), 1, std::max<int64_t>(tasks, 1));
}

// Calls f(task, thread) for every task. A thread that finishes a task takes the next one, so that uneven tasks, or a
// core that is busy elsewhere, leave the other threads little to wait for. Results must not depend on which thread runs
// which task.
template <typename F>
void for_each_task(int64_t tasks, const F& f) {
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads_for(tasks), 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t task = next++; task < tasks; task = next++) f(task, thread);
    }
  });
}

// Calls f(begin, end) for ranges that cover [0, n).
template <typename F>
void for_each_range(int64_t n, int64_t length, const F& f) {
  for_each_task((n + length - 1) / length,
                [&](int64_t task, int64_t /*thread*/) { f(task * length, std::min((task + 1) * length, n)); });
}

struct CpuBackend {
  // The host is one device, so there is nothing to switch.
  struct Guard {
    explicit Guard(const Tensor& /*like*/) {}
  };

  // Calls f(i) for every i in [0, n), in parallel.
  template <typename F>
  static void for_each(int64_t n, const F& f) {
    constexpr int64_t kPerTask = 1024;
    for_each_range(n, kPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) f(i);
    });
  }
};

}  // namespace voxelfield
