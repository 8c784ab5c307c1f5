// Path of one thread from a file into device memory. A load has several (weight_load.h). On a host
// device the thread reads directly into the pages, on a GPU it has pinned buffers and a stream.
// Thread rule: one thread at a time.
#pragma once

#include <string>
#include <vector>

#include "non_copyable.h"
#include "vmm.h"

namespace kvcached {

struct WeightChunk {
  const std::string* path;
  uint64_t file_offset;
  uint64_t bytes;
  uint64_t address;  // backed device memory
};

class WeightLane : private NonCopyable {
 public:
  virtual ~WeightLane() = default;
  // May return before the bytes have arrived. Code::weight_file, naming the file.
  virtual Status copy(const WeightChunk& chunk) = 0;
  // Waits until all bytes have arrived, or until none will touch the device any more.
  virtual Status drain() = 0;
  // After a failure: true if this lane will not touch the target's memory any more.
  virtual bool is_quiet() = 0;
};

// Returns `count` lanes to a host device.
std::vector<std::unique_ptr<WeightLane>> host_lanes(size_t count);

// Fills `target` from the file. Code::weight_file if it is missing or too short. The file is read,
// never mapped, so that a file that shrinks is an error instead of a SIGBUS.
Status read_exactly(const std::string& path, uint64_t offset, std::span<char> target);

}  // namespace kvcached
