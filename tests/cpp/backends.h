// The backends of the conformance suite, and how a test reads memory on each.
#pragma once

#include <string>
#include <vector>

#include "vmm.h"

namespace kvcached::testing {

struct Backend {
  std::string name;
  bool on_gpu;
  std::shared_ptr<Vmm> (*make)();
  bool (*is_readable)(uint64_t address);
  void (*fill)(uint64_t address, uint64_t bytes, int value);  // done when it returns
  int (*read_at)(uint64_t address);
  // Physical memory that the Vmm holds, as the OS or the driver counts it. REQUIRES: every page
  // was filled (the host device takes memory at the first touch), and one Vmm at a time.
  uint64_t (*held_bytes)(const Vmm& vmm);
};

// Host and, where a driver can be loaded, cuda:0; each bare and below the fault decorator.
std::vector<Backend> backends();

// Checks the rules of vmm.h for windows (test_windows.cpp).
void windows_conform(const Backend& backend);
// Checks the rules of vmm.h for blocks (test_blocks.cpp).
void blocks_conform(const Backend& backend);

// Bound of the error of `held_bytes`, since a driver also takes and frees memory itself. 0 on the
// host and on the test libcuda.
uint64_t slack_bytes(const Backend& backend);
// Returns whether the Vmm holds `bytes`, up to `slack_bytes`. Prints what it holds otherwise.
bool holds(const Backend& backend, const Vmm& vmm, uint64_t bytes);

// The library that implements "cuda:0" (cuda_driver.h), or null. backends() makes its primary
// context current in the main thread, nothing_leaked() drops it.
void* cuda_library();
// Returns whether it is the test library, with its control functions and pages of kPage bytes.
bool can_steer_cuda();
// Returns false, and prints the leaks, if anything was not released.
bool nothing_leaked();

// Returns where this process reads memory at that address of a host device or of the test
// libcuda's devices. The CPU cannot access those devices' own addresses.
uint64_t cpu_view(uint64_t address);
// Returns whether the device can read the byte there.
bool is_accessible(uint64_t address);

void* find_cuda_symbol(const char* name);

template <class Function>
Function* cuda_function(const char* name) {
  return reinterpret_cast<Function*>(find_cuda_symbol(name));
}

}  // namespace kvcached::testing
