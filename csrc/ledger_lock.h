// The lock of a ledger segment, held for the length of a scope; private to the ledger's files.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "futex.h"
#include "ledger.h"
#include "ledger_check.h"
#include "ledger_file.h"
#include "non_copyable.h"
#include "owned_lock.h"
#include "steps.h"

namespace kvcached {

// How long a lock that another holds is waited for: its holder may be stopped, or not exist at all
// in a damaged segment. Once a wait was in vain, calls wait for a moment only, until a lock is had
// again. Tools that only look wait less (set_lock_patience of the bindings), and so do tests.
inline std::atomic<int64_t> lock_patience_ns = 10'000'000'000;
inline constexpr int64_t kShortLockPatienceNs = 100'000'000;

// A process that is stopped inside stops all others, so there is no call to the system between
// lock and unlock: no waiting, no file, no look at /proc (tests/kills checks that).
//
// If the last holder died inside, every record is whole all the same (each change is one store that
// counts), and only the total has to be summed up again. Sleepers are woken after the unlock; those
// whose waker dies before that look again by themselves (kLookAgainNs).
class Ledger::Lock : private kvcached::NonCopyable {
 public:
  explicit Lock(Ledger& ledger) : segment_(*ledger.segment_) {
    if (!take(ledger)) return;
    held_ = true;
    step("lock: taken");
    sign(segment_.lock, ledger.opening_);
    charged_bytes_ = segment_.charged_bytes;
    if (!from_the_dead_) return;
    segment_.charged_bytes = total_charge(segment_);
    step("lock: repaired");
  }
  ~Lock() {
    if (held_) {
      if (segment_.charged_bytes < charged_bytes_) announce_room();
      step("lock: before its release");
      unlock(segment_.lock);
    }
    step("lock: released");
    if (room_) futex_wake_all(&segment_.room);
    for (ClientRecord* client : asked_) futex_wake_all(&client->asked);
  }

  bool timed_out() const { return !held_; }
  // Whether the lock is held at all, be the device destroyed or not.
  Status held() const { return held_ ? Status{} : held_up_by(segment_); }

  Status check() const {
    KV_TRY(held());
    return segment_.destroyed == 0 ? Status{} : gone(segment_);
  }

  // A client that waits for room may find it now. Not needed when the charges have become less:
  // the destructor does it. REQUIRES: the lock is held.
  void announce_room() {
    if ((segment_.room & kSleepers) == 0) return;
    std::atomic_ref(segment_.room).store((segment_.room & ~kSleepers) + 2 * kSleepers);
    room_ = true;
  }

  // The client has a new reason to shrink. REQUIRES: the lock is held.
  void announce_ask(ClientRecord& client) {
    std::atomic_ref(client.asked).fetch_add(1);
    asked_.push_back(&client);
  }

 private:
  bool take(Ledger& ledger) {
    const bool free = try_take(segment_.lock, ledger.opening_);
    if (free && !ledger.held_up_.load(std::memory_order_relaxed)) [[likely]]
      return true;
    return take_slowly(ledger, free);
  }

  // Out of line, so that a lock which is free costs no more than one atomic operation.
  [[gnu::cold, gnu::noinline]] bool take_slowly(Ledger& ledger, bool free) {
    Taken taken = Taken::clean;
    if (!free) {
      const int64_t patience_ns = lock_patience_ns;
      const int64_t short_ns = std::min(kShortLockPatienceNs, patience_ns);
      taken = wait_for(segment_.lock, ledger.opening_, ledger.held_up_ ? short_ns : patience_ns);
    }
    // A segment that has to be repaired first is paid by the next one who locks.
    from_the_dead_ = taken == Taken::from_the_dead;
    if (!from_the_dead_) ledger.held_up_ = taken == Taken::timed_out;
    if (taken == Taken::clean && ledger.pay_owed()) announce_room();
    return taken != Taken::timed_out;
  }

  LedgerSegment& segment_;
  bool held_ = false;
  bool from_the_dead_ = false;
  uint64_t charged_bytes_ = 0;
  bool room_ = false;
  std::vector<ClientRecord*> asked_;
};

// Longer than a look at /proc takes, and short for those who wait for a process stopped in it.
inline constexpr int64_t kLookNs = 100'000'000;

// Inline, and the look at the clock out of line: this is the way of every reservation.
template <class Act>
[[gnu::always_inline]] inline Status Ledger::while_nobody_looks(Act act) {
  if (coarse_ns() >= file_look_ns_.load(std::memory_order_relaxed)) look_at_file();
  for (;; std::this_thread::sleep_for(std::chrono::microseconds(50))) {
    const Lock lock(*this);
    KV_TRY(lock.check());
    if (segment_->look_until_ns == 0 || look_is_over()) [[likely]]
      return act();
  }
}

// A copy; what clients write without the lock may be of another moment than the rest.
// REQUIRES: the lock is held
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
