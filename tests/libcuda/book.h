// File of the memory that every process holds on each GPU, which all processes map.
//
// A process has a slot with a lock, which the kernel drops at any end of the process. The slot of
// a dead process is kept for the time that the driver takes to free memory, and then cleared.
// Within a process: called with one lock held.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace test_libcuda {

inline constexpr int kBookGpus = 16;

struct ProcessUse {
  pid_t pid;
  uint64_t bytes;
};

class Book {
 public:
  // `joins`: takes a slot. Returns false if the OS refuses, or no slot is free.
  bool open(const std::string& path, uint64_t teardown_ms, bool joins);
  // Returns false without a change if the GPU would hold more than `capacity_bytes`.
  bool take(int gpu, uint64_t bytes, uint64_t capacity_bytes);
  void give(int gpu, uint64_t bytes);

  // Memory that several processes may hold: counted once, until the last of them drops it.
  uint64_t name_shared();
  bool hold_shared(uint64_t name, int gpu, uint64_t bytes);
  void drop_shared(uint64_t name);

  // These count all processes.
  uint64_t used_bytes(int gpu);
  std::vector<ProcessUse> processes(int gpu);

  // For the child of a fork: the slot stays its parent's.
  void abandon();

 private:
  struct Shared;
  struct Slot;
  struct File;
  class Locked;

  bool lock_byte(int64_t byte, int16_t type, bool waits) const;
  bool is_alive(int slot) const;
  void bury_dead();
  bool take_slot();
  uint64_t sum(int gpu) const;
  Slot& own();

  int fd_ = -1;
  int slot_ = -1;
  uint64_t teardown_ns_ = 0;
  File* file_ = nullptr;
};

}  // namespace test_libcuda
