// One thread's way from a file into device memory. A load has several (weight_load.h): on a host
// device each thread reads straight into the pages; on a GPU each has pinned buffers and a stream.
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
  // Waits until everything has arrived, or will never touch the device again.
  virtual Status drain() = 0;
  // After a failure: whether nothing of this lane will touch the target's memory any more.
  virtual bool is_quiet() = 0;
};

// `count` lanes onto a host device.
std::vector<std::unique_ptr<WeightLane>> host_lanes(size_t count);

// Fills `target` from the file. Code::weight_file if it is missing or ends too early: it is read,
// never mapped, so that a file that shrinks is an error and not a SIGBUS.
Status read_exactly(const std::string& path, uint64_t offset, std::span<char> target);

}  // namespace kvcached
