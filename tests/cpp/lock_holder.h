// The lock of a ledger, held by a test.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "ledger_segment.h"

namespace kvcached::testing {

inline LedgerSegment* map_directly(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR);
  void* memory = mmap(nullptr, sizeof(LedgerSegment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  CHECK(memory != MAP_FAILED);
  return static_cast<LedgerSegment*>(memory);
}

// Takes the lock of the ledger at `path` permanently, as an opening of this process does.
inline LedgerSegment* hold_lock(const std::string& path) {
  LedgerSegment* segment = map_directly(path);
  const Opening opening =
      value_of(claim_opening(::open(path.c_str(), O_RDWR | O_CLOEXEC), &segment->lock));
  CHECK(try_take(segment->lock, opening));
  sign(segment->lock, opening);
  return segment;
}

}  // namespace kvcached::testing
