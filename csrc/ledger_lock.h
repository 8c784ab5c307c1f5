// The lock of a ledger's segment, held for the length of a scope.
//
// A process that is stopped while it holds the lock stops all others, so nothing between lock and
// unlock makes a system call: no wait, no file, no read of /proc (tests/kills checks that).
//
// If the last holder died with the lock, every record is whole all the same, because each change is
// one store that counts. Only the total of the charges is summed up again.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "ledger_segment.h"
#include "non_copyable.h"
#include "owned_lock.h"
#include "status.h"
#include "steps.h"

namespace kvcached {

// How long a call waits for a lock that another process holds: the holder may be stopped, or not
// exist at all in a damaged segment. After a wait that failed, calls of this process wait for
// kShortLockTimeoutNs only, until one gets the lock again. Tools that only read set a shorter time
// (set_lock_timeout of the bindings), and so do tests.
inline std::atomic<int64_t> lock_timeout_ns = 10'000'000'000;
inline constexpr int64_t kShortLockTimeoutNs = 100'000'000;

// One opening of a ledger as a user of the lock, with the returns of memory that it could not
// record because the lock was not to be had.
class LockUser : private NonCopyable {
 public:
  explicit LockUser(const Opening& opening) : opening_(opening) {}

  const Opening& opening() const { return opening_; }

  // A return of memory. One whose `joined` differs from the record's is for an earlier client of
  // the record, and is dropped.
  struct Return {
    int slot;
    uint64_t joined;
    uint64_t ClientRecord::* count;  // null: the client has left
    uint64_t bytes;
  };
  // Keeps a return for the next time that a thread of this process gets the lock.
  void defer(const Return& deferred);

  void lock_for_fork() { deferred_mutex_.lock(); }
  void unlock_after_fork() { deferred_mutex_.unlock(); }
  // `opening` is the child's. What the parent deferred, the parent records.
  void abandon_in_child(const Opening& opening);

 private:
  friend class LedgerLock;

  // Records what was deferred. Returns whether there was any. REQUIRES: the lock is held
  bool apply_deferred(LedgerSegment& segment);

  Opening opening_;  // its descriptor keeps its number
  // The last wait for the lock failed, or a return is deferred.
  std::atomic<bool> delayed_ = false;
  std::mutex deferred_mutex_;
  std::vector<Return> deferred_;
};

class LedgerLock : private NonCopyable {
 public:
  LedgerLock(LedgerSegment& segment, LockUser& user) : segment_(segment) {
    if (!take(user)) return;
    held_ = true;
    step("lock: taken");
    sign(segment_.lock, user.opening());
    charged_bytes_ = segment_.charged_bytes;
    if (from_the_dead_) repair();
  }
  // Wakes sleepers after the unlock. If this process dies before that, they look again by
  // themselves (kLookAgainNs).
  ~LedgerLock() {
    if (held_) {
      if (segment_.charged_bytes < charged_bytes_) announce_room();
      step("lock: before its release");
      unlock(segment_.lock);
    }
    step("lock: released");
    if (room_ || !asked_.empty()) wake_sleepers();
  }

  bool timed_out() const { return !held_; }
  // Code::corrupt, naming the holder, if the lock was not had in time.
  Status held() const { return held_ ? Status{} : refusal(); }
  // The same, and Code::gone if the device was destroyed.
  Status check() const {
    if (held_ && segment_.destroyed == 0) [[likely]]
      return {};
    return refusal();
  }

  // Clients that wait for room may find some now. The destructor does it where the charges have
  // become less. REQUIRES: the lock is held
  void announce_room() {
    if ((segment_.room & kSleepers) == 0) return;
    std::atomic_ref(segment_.room).store((segment_.room & ~kSleepers) + 2 * kSleepers);
    room_ = true;
  }

  // The client has a new reason to shrink. REQUIRES: the lock is held
  void announce_ask(ClientRecord& client) {
    std::atomic_ref(client.asked).fetch_add(1);
    asked_.push_back(&client);
  }

 private:
  bool take(LockUser& user) {
    const bool free = try_take(segment_.lock, user.opening_);
    if (free && !user.delayed_.load(std::memory_order_relaxed)) [[likely]]
      return true;
    return take_slowly(user, free);
  }

  // Out of line, so that a lock that is free costs no more than one atomic operation.
  [[gnu::cold, gnu::noinline]] bool take_slowly(LockUser& user, bool free);
  [[gnu::cold, gnu::noinline]] Status refusal() const;
  [[gnu::cold, gnu::noinline]] void repair();
  [[gnu::cold, gnu::noinline]] void wake_sleepers();

  LedgerSegment& segment_;
  bool held_ = false;
  bool from_the_dead_ = false;
  uint64_t charged_bytes_ = 0;
  bool room_ = false;
  std::vector<ClientRecord*> asked_;
};

}  // namespace kvcached
