// The mutex of a ledger segment, held for the length of a scope; private to the ledger's files.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <vector>

#include "futex.h"
#include "ledger.h"
#include "ledger_check.h"
#include "ledger_file.h"
#include "steps.h"

namespace kvcached {

// A mutex that says it is held by nobody who lives would be waited for for ever. Tests of damaged
// segments wait less.
inline int64_t lock_patience_ns = 10'000'000'000;

// If the last holder died inside, every record is whole all the same (each change is one store that
// counts), and only the total has to be summed up again. Sleepers are woken after the unlock; those
// whose waker dies before that look again by themselves (kLookAgainNs).
class Ledger::Lock {
 public:
  explicit Lock(LedgerSegment& segment) : segment_(segment) {
    error_ = take(segment_.mutex);
    step("lock: taken");
    charged_bytes_ = segment_.charged_bytes;
    if (error_ != EOWNERDEAD) return;
    segment_.charged_bytes = total_charge(segment_);
    step("lock: repaired");
    error_ = pthread_mutex_consistent(&segment_.mutex);
    step("lock: consistent again");
  }
  ~Lock() {
    if (error_ == 0) {
      if (segment_.charged_bytes < charged_bytes_) announce_room();
      step("lock: before its release");
      pthread_mutex_unlock(&segment_.mutex);
    }
    step("lock: released");
    if (room_) futex_wake_all(&segment_.room);
    for (ClientRecord* client : asked_) futex_wake_all(&client->asked);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // Whether the mutex is held at all, be the device destroyed or not.
  Status held() const {
    if (error_ == 0) return {};
    if (error_ == ETIMEDOUT || error_ == EINVAL || error_ == ENOTRECOVERABLE) {
      return failure(Code::corrupt,
                     error_ == ETIMEDOUT
                         ? "the ledger has been locked for 10 s: a process that uses the device is "
                           "stopped inside, or the ledger is damaged; end it, or stop all engines "
                           "of the device and unlink it"
                         : "the ledger is damaged: its mutex is none; stop all engines of the "
                           "device and unlink it");
    }
    return system_failure("lock of the ledger", error_);
  }

  Status check() const {
    KV_TRY(held());
    if (segment_.destroyed != 0) {
      return failure(Code::gone, "the device was destroyed; close the client and open it again");
    }
    return {};
  }

  // Somebody who waits for room may find it now. Goes without saying when the charges have become
  // less. REQUIRES: the mutex is held.
  void announce_room() {
    if ((segment_.room & kSleepers) == 0) return;
    std::atomic_ref(segment_.room).store((segment_.room & ~kSleepers) + 2 * kSleepers);
    room_ = true;
  }

  // The client has a new reason to shrink. REQUIRES: the mutex is held.
  void announce_ask(ClientRecord& client) {
    std::atomic_ref(client.asked).fetch_add(1);
    asked_.push_back(&client);
  }

 private:
  static int take(pthread_mutex_t& mutex) {
    if (!is_ledger_mutex(mutex)) return EINVAL;
    if (const int error = pthread_mutex_trylock(&mutex); error != EBUSY) return error;
    // By the wall clock, which every C library offers; one that is set forward counts for nothing.
    for (const int64_t until_ns = monotonic_ns() + lock_patience_ns;;) {
      timespec until = {};
      clock_gettime(CLOCK_REALTIME, &until);
      const int64_t nanoseconds = until.tv_nsec + lock_patience_ns;
      until.tv_sec += nanoseconds / 1'000'000'000;
      until.tv_nsec = nanoseconds % 1'000'000'000;
      const int error = pthread_mutex_timedlock(&mutex, &until);
      if (error != ETIMEDOUT || monotonic_ns() >= until_ns) return error;
    }
  }

  LedgerSegment& segment_;
  int error_;
  uint64_t charged_bytes_ = 0;
  bool room_ = false;
  std::vector<ClientRecord*> asked_;
};

// A copy; what clients write without the mutex may be of another moment than the rest.
// REQUIRES: the mutex is held
inline ClientRecord copy_of(ClientRecord& record) {
  ClientRecord copy;
  constexpr size_t begin = offsetof(ClientRecord, spare_bytes);
  constexpr size_t end = offsetof(ClientRecord, evicted_tokens);
  const auto* from = reinterpret_cast<const char*>(&record);
  auto* to = reinterpret_cast<char*>(&copy);
  std::memcpy(to, from, begin);
  std::memcpy(to + end, from + end, sizeof(ClientRecord) - end);
  copy.spare_bytes = std::atomic_ref(record.spare_bytes).load(std::memory_order_relaxed);
  copy.evictable_bytes = std::atomic_ref(record.evictable_bytes).load(std::memory_order_relaxed);
  copy.active_ns = std::atomic_ref(record.active_ns).load(std::memory_order_relaxed);
  return copy;
}

// One allocation: on a full device this is what a refusal costs.
inline Status no_room(uint64_t need, uint64_t free, const char* why) {
  std::string message;
  message.reserve(128);
  message.append("need ").append(std::to_string(need)).append(" bytes, ");
  message.append(std::to_string(free)).append(" free: ").append(why);
  return {Code::no_room, std::move(message), need, free};
}

inline uint64_t capped_sum(uint64_t a, uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

inline uint64_t above(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

}  // namespace kvcached
