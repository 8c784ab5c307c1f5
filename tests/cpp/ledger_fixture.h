// A separate ledger for a test, and clients of it.
#pragma once

#include <unistd.h>

#include "check.h"
#include "ledger.h"
#include "ledger_segment.h"
#include "lock_holder.h"
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

}  // namespace kvcached::testing
