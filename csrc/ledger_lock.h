// The mutex of a ledger segment, held for the length of a scope; private to the ledger's files.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#include "futex.h"
#include "ledger.h"
#include "ledger_check.h"
#include "ledger_file.h"
#include "non_copyable.h"
#include "steps.h"

namespace kvcached {

// How long a lock that another holds is waited for: its holder may be stopped, or not exist at all
// in a damaged segment. Once a wait was in vain, calls wait for a moment only, until a lock is had
// again. Tests of damaged segments wait less.
inline int64_t lock_patience_ns = 10'000'000'000;
inline constexpr int64_t kShortLockPatienceNs = 100'000'000;

// A process that is stopped inside stops all others, so there is no call to the system between
// lock and unlock: no waiting, no file, no look at /proc (tests/kills checks that).
//
// If the last holder died inside, every record is whole all the same (each change is one store that
// counts), and only the total has to be summed up again. Sleepers are woken after the unlock; those
// whose waker dies before that look again by themselves (kLookAgainNs).
class Ledger::Lock : private NonCopyable {
 public:
  explicit Lock(Ledger& ledger) : segment_(*ledger.segment_) {
    error_ = take(ledger);
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

  bool timed_out() const { return error_ == ETIMEDOUT; }
  // Whether the mutex is held at all, be the device destroyed or not.
  Status held() const {
    if (error_ == 0) return {};
    if (timed_out()) return held_up_by(segment_);
    if (error_ == EINVAL || error_ == ENOTRECOVERABLE) {
      return failure(Code::corrupt,
                     "the ledger is damaged: its mutex is none; stop all engines of the device and "
                     "unlink it");
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

  // A client that waits for room may find it now. Not needed when the charges have become less:
  // the destructor does it. REQUIRES: the mutex is held.
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
  int take(Ledger& ledger) {
    if (!is_ledger_mutex(segment_.mutex)) return EINVAL;
    const int error = pthread_mutex_trylock(&segment_.mutex);
    const bool was_held_up = ledger.held_up_.load(std::memory_order_relaxed);
    if (error != EBUSY && !was_held_up) [[likely]]
      return error;
    return take_slowly(ledger, error);
  }

  // Out of line, so that a lock which is free costs no more than the mutex does.
  [[gnu::cold, gnu::noinline]] int take_slowly(Ledger& ledger, int error) {
    if (error == EBUSY) {
      const int64_t short_ns = std::min(kShortLockPatienceNs, lock_patience_ns);
      error = wait_for(segment_.mutex, ledger.held_up_ ? short_ns : lock_patience_ns);
    }
    // A segment that has to be repaired first is paid by the next one who locks.
    if (error != EOWNERDEAD) ledger.held_up_ = error == ETIMEDOUT;
    if (error == 0 && ledger.pay_owed()) announce_room();
    return error;
  }

  static int wait_for(pthread_mutex_t& mutex, int64_t patience_ns) {
    // By the wall clock, which every C library offers; one that is set forward counts for nothing.
    for (const int64_t until_ns = monotonic_ns() + patience_ns;;) {
      timespec until = {};
      clock_gettime(CLOCK_REALTIME, &until);
      const int64_t nanoseconds = until.tv_nsec + patience_ns;
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

// Longer than a look at /proc takes, and short for those who wait for a process stopped in it.
inline constexpr int64_t kLookNs = 100'000'000;

// Inline, and the look at the clock out of line: this is the way of every reservation.
template <class Act>
[[gnu::always_inline]] inline Status Ledger::while_nobody_looks(Act act) {
  for (;; std::this_thread::sleep_for(std::chrono::microseconds(50))) {
    const Lock lock(*this);
    KV_TRY(lock.check());
    if (segment_->look_until_ns == 0 || look_is_over()) [[likely]]
      return act();
  }
}

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
