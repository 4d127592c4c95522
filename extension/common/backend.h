// Shared by all CPU backends: the device guard, the distribution of work over threads, and large pages.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "common/tensors.h"

namespace voxelfield {

// The maximum number of threads that for_each_task uses.
inline int64_t threads_for(int64_t tasks) {
  return std::clamp<int64_t>(torch::stable::get_num_threads(), 1, std::max<int64_t>(tasks, 1));
}

// Calls f(task, thread) for every task. A thread that finishes a task takes the next one, so the load stays balanced if
// tasks differ in cost or other processes occupy a core. Results must not depend on which thread runs which task.
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

// Advises the system to use large pages for memory that will be written in full. New memory is otherwise supplied in
// pages of 4 KiB, which takes longer than summing a grid. Ignoring the advice is harmless.
inline void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr int64_t kWorthwhile = 4 << 20;
  if (bytes < kWorthwhile) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / page * page;
  static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#endif
}

template <typename F>
VOXELFIELD_MULTIVERSION void visit_range(const F& f, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) f(i);
}

struct CpuBackend {
  // The host is one device, so there is nothing to switch.
  struct Guard {
    explicit Guard(const Tensor& /*like*/) {}
  };

  template <typename F>
  static void for_each(int64_t n, const F& f, int64_t per_task = 1024) {
    for_each_range(n, per_task, [&](int64_t begin, int64_t end) { visit_range(f, begin, end); });
  }
};

}  // namespace voxelfield
