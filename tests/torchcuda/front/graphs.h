// CUDA graphs: while a stream captures, kernels are kept in a list with their addresses instead of
// being run. The driver has the rules: it refuses calls that would wait for the stream.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace torchcuda {

struct Touched {
  uint64_t address = 0;
  uint64_t bytes = 0;
  bool holes = false;  // not the allocator's memory: parts may be unmapped
};

struct Node {
  std::function<void()> run;
  std::vector<Touched> touched;
};

struct Graph {
  int device = 0;
  std::vector<Node> nodes;
  void* executable = nullptr;  // the driver's, which holds memory of the device
};

// The graph of the stream's capture, or null.
Graph* capturing(int device, uint64_t stream);
Graph* capturing(int device);  // the device's current stream

// A stream that waits for an event that was recorded in a capture is captured as well.
void note_recorded(const void* event, int device, uint64_t stream);
void join_capture(const void* event, int device, uint64_t stream);

}  // namespace torchcuda
