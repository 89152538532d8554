// A GPU of one threadgroup, on one CPU thread: enough to run a Metal kernel for its meaning.
//
// Every GPU thread is a fiber, which runs until it reaches an operation that needs others: a
// barrier, or one of its simdgroup. A simdgroup runs as far as barriers let it before the next one
// starts, so what lacks a barrier is read too early or too late in one order or another. Threads
// that wait for different things end the run with a message and the kernel's line.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, size)
#define ASAN_UNPOISON_MEMORY_REGION(start, size)
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

namespace gpu {

constexpr int kLanes = 32;                  // of a simdgroup, on every Apple GPU
constexpr size_t kSharedBytes = 32 * 1024;  // threadgroup memory that one threadgroup may have
constexpr size_t kGap = 256;                // between its arrays, for the address sanitiser
constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kMostThreads = 1024;

struct Size {
  unsigned x, y, z;
  unsigned volume() const { return x * y * z; }
};

// What threads may wait for together. Simdgroup operations differ by kind and by line.
enum class Meeting { none, threadgroup, simdgroup };

struct Thread {
  jmp_buf registers;
  char* stack = nullptr;
  bool begun = false, finished = false;
  Meeting waits_for = Meeting::none;
  const char* operation = "";
  int line = 0;
  unsigned index = 0;                // in the threadgroup
  Size position{}, in_group{};       // in the grid, in the threadgroup
  size_t shared_used = 0, num_shared = 0;  // threadgroup memory that it has declared: bytes, arrays
  alignas(16) unsigned char given[2][16];  // what it shows to its simdgroup, by turns
  int turn = 0;
  unsigned lane() const { return index % kLanes; }
  unsigned simdgroup() const { return index / kLanes; }
};

struct Group {
  Size grid{}, groups{}, size{}, position{};
  std::vector<Thread> threads;
  std::vector<unsigned> lanes, simdgroups;  // in the order in which they run
  unsigned current = 0;
  jmp_buf scheduler;
  void (*kernel)(char** buffers) = nullptr;
  char** buffers = nullptr;
  alignas(64) unsigned char shared[kSharedBytes + 16 * kGap];
  const void* main_stack = nullptr;
  size_t main_stack_bytes = 0;
};

inline Group group;

inline Thread& self() { return group.threads[group.current]; }

[[noreturn]] inline void fail(const char* what, const Thread& thread) {
  std::fprintf(
      stderr, "%s: %s at line %d (lane %u, simdgroup %u, threadgroup %u %u %u)\n", what,
      thread.operation, thread.line, thread.lane(), thread.simdgroup(), group.position.x,
      group.position.y, group.position.z);
  std::_Exit(3);
}

inline char* allocate_stack() { return static_cast<char*>(std::malloc(kStackBytes)); }

// ---- fibers -----------------------------------------------------------------------------------

inline void leave() {
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, group.main_stack, group.main_stack_bytes);
  if (_setjmp(self().registers) == 0) _longjmp(group.scheduler, 1);
  __sanitizer_finish_switch_fiber(fake, &group.main_stack, &group.main_stack_bytes);
}

inline void begin() {
  __sanitizer_finish_switch_fiber(nullptr, &group.main_stack, &group.main_stack_bytes);
  group.kernel(group.buffers);
  self().finished = true;
  leave();
}

inline void resume(unsigned index) {
  group.current = index;
  Thread& thread = group.threads[index];
  void* fake = nullptr;
  if (_setjmp(group.scheduler) == 0) {
    __sanitizer_start_switch_fiber(&fake, thread.stack, kStackBytes);
    if (thread.begun) _longjmp(thread.registers, 1);
    thread.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = thread.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, begin, 0);
    setcontext(&context);
  }
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

// ---- meetings ---------------------------------------------------------------------------------

inline void meet(Meeting meeting, const char* operation, int line) {
  Thread& thread = self();
  thread.waits_for = meeting, thread.operation = operation, thread.line = line;
  leave();
}

// Let threads `first` to `last` - 1 go on if all of them are at the same operation.
inline bool release(unsigned first, unsigned last, Meeting meeting) {
  if (first >= last) return false;
  const Thread& leader = group.threads[first];
  for (unsigned i = first; i < last; i++) {
    const Thread& thread = group.threads[i];
    if (thread.waits_for != meeting) return false;
    if (meeting == Meeting::simdgroup &&
        (thread.line != leader.line || std::strcmp(thread.operation, leader.operation) != 0))
      fail("the lanes of a simdgroup are at different operations", thread);
  }
  for (unsigned i = first; i < last; i++) group.threads[i].waits_for = Meeting::none;
  return true;
}

// ---- one threadgroup --------------------------------------------------------------------------

// Run the lanes of a simdgroup, in `order`, until none of them can go on without other simdgroups.
inline void run_simdgroup(unsigned simdgroup) {
  const unsigned first = simdgroup * kLanes;
  const unsigned last = std::min(first + kLanes, unsigned(group.threads.size()));
  do {
    for (unsigned lane : group.lanes) {
      const unsigned index = first + lane;
      if (index >= last) continue;
      const Thread& thread = group.threads[index];
      if (!thread.finished && thread.waits_for == Meeting::none) resume(index);
    }
  } while (release(first, last, Meeting::simdgroup));
}

inline void run_group() {
  const auto is_finished = [](const Thread& thread) { return thread.finished; };
  auto& threads = group.threads;
  for (;;) {
    for (unsigned simdgroup : group.simdgroups) run_simdgroup(simdgroup);
    if (std::all_of(threads.begin(), threads.end(), is_finished)) return;
    if (!release(0, unsigned(threads.size()), Meeting::threadgroup))
      fail("not every thread comes to the same barrier", *std::find_if_not(
          threads.begin(), threads.end(), is_finished));
  }
}

// Ascending for order 0, descending for 1, shuffled by any other.
inline std::vector<unsigned> in_order(unsigned count, unsigned order) {
  std::vector<unsigned> indices(count);
  for (unsigned i = 0; i < count; i++) indices[i] = order == 1 ? count - 1 - i : i;
  unsigned state = order;
  for (unsigned left = count; order > 1 && left > 1; left--) {
    state = state * 1664525u + 1013904223u;
    std::swap(indices[left - 1], indices[(state >> 16) % left]);
  }
  return indices;
}

inline void start_group(Size position, Size full) {
  // A grid that the threadgroup does not divide has smaller ones at its ends.
  const auto part = [](unsigned all, unsigned at, unsigned size) {
    return std::min(size, all - at * size);
  };
  group.position = position;
  group.size = {part(group.grid.x, position.x, full.x), part(group.grid.y, position.y, full.y),
                part(group.grid.z, position.z, full.z)};
  group.threads.resize(group.size.volume());
  for (unsigned i = 0; i < group.threads.size(); i++) {
    Thread& thread = group.threads[i];
    char* stack = thread.stack;
    thread = Thread{};
    thread.stack = stack ? stack : allocate_stack();
    thread.index = i;
    thread.in_group = {i % group.size.x, i / group.size.x % group.size.y,
                       i / group.size.x / group.size.y};
    thread.position = {position.x * full.x + thread.in_group.x,
                       position.y * full.y + thread.in_group.y,
                       position.z * full.z + thread.in_group.z};
  }
  ASAN_UNPOISON_MEMORY_REGION(group.shared, sizeof group.shared);
  std::memset(group.shared, 0xff, sizeof group.shared);  // NaN in every floating type
  ASAN_POISON_MEMORY_REGION(group.shared, sizeof group.shared);
}

// Run the kernel once for every thread of `grid`; `order` decides who runs first.
inline void dispatch(Size grid, Size full, unsigned order) {
  full = {std::min(full.x, grid.x), std::min(full.y, grid.y), std::min(full.z, grid.z)};
  if (full.volume() > kMostThreads) fail("more than 1024 threads in a threadgroup", Thread{});
  const auto groups_of = [](unsigned all, unsigned size) { return (all + size - 1) / size; };
  group.grid = grid;
  group.groups = {groups_of(grid.x, full.x), groups_of(grid.y, full.y), groups_of(grid.z, full.z)};
  group.lanes = in_order(kLanes, order);
  group.simdgroups = in_order((full.volume() + kLanes - 1) / kLanes, order);
  for (unsigned number : in_order(group.groups.volume(), order)) {
    const Size& all = group.groups;
    start_group({number % all.x, number / all.x % all.y, number / all.x / all.y}, full);
    run_group();
  }
}

// The threadgroup memory of one declaration: the same for every thread, which all declare alike.
template <typename Array>
Array& shared() {
  Thread& thread = self();
  constexpr size_t kAligned = (sizeof(Array) + 15) / 16 * 16;
  if (thread.shared_used + kAligned > kSharedBytes) {
    thread.operation = "a declaration";
    fail("more than 32 KiB of threadgroup memory", thread);
  }
  unsigned char* start = group.shared + thread.shared_used + kGap * (1 + thread.num_shared++);
  thread.shared_used += kAligned;
  ASAN_UNPOISON_MEMORY_REGION(start, sizeof(Array));
  return *reinterpret_cast<Array*>(start);
}

// What every lane of the simdgroup gives: `all(lane)` reads it, until the next operation.
template <typename Value>
struct Given {
  int turn;
  unsigned first;
  Value operator()(unsigned lane) const {
    Value value;
    std::memcpy(&value, group.threads[first + lane % kLanes].given[turn], sizeof value);
    return value;
  }
};

template <typename Value>
Given<Value> exchange(const Value& value, const char* operation, int line) {
  Thread& thread = self();
  static_assert(sizeof value <= sizeof thread.given[0], "a simdgroup exchanges 16 bytes a lane");
  if (group.threads.size() % kLanes) fail("a simdgroup operation in part of a simdgroup", thread);
  const Given<Value> all{thread.turn, thread.simdgroup() * kLanes};
  std::memcpy(thread.given[thread.turn], &value, sizeof value);
  thread.turn ^= 1;
  meet(Meeting::simdgroup, operation, line);
  return all;
}

}  // namespace gpu
