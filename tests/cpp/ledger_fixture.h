// A ledger of its own for a test, and clients of it.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "ledger.h"
#include "ledger_segment.h"
#include "segments.h"

namespace kvcached::testing {

inline constexpr uint64_t kCapacity = 100 * kPage;

struct Member {
  explicit Member(std::shared_ptr<Ledger> joined, ClientOptions options = {.name = "member"})
      : ledger(std::move(joined)),
        lock_fd(value_of(ledger->open_lock_fd())),
        slot(value_of(ledger->join(options, lock_fd, -1))) {}
  ~Member() {
    CHECK_OK(ledger->leave(slot));
    ::close(lock_fd);
  }

  std::shared_ptr<Ledger> ledger;
  int lock_fd;
  int slot;
};

struct Fixture {
  std::string path = fresh_ledger_path();
  std::shared_ptr<Ledger> ledger = value_of(Ledger::open({path, kCapacity, kPage}));
  ~Fixture() { CHECK_OK(ledger->destroy(true)); }
  uint64_t charged() { return value_of(ledger->usage()).charged_bytes; }
};

inline LedgerSegment* map_directly(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR);
  void* memory = mmap(nullptr, sizeof(LedgerSegment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  CHECK(memory != MAP_FAILED);
  return static_cast<LedgerSegment*>(memory);
}

}  // namespace kvcached::testing
