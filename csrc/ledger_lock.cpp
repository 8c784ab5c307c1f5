#include "ledger_lock.h"

#include <algorithm>
#include <thread>

#include "futex.h"
#include "ledger_check.h"
#include "ledger_records.h"

namespace kvcached {

void LockUser::defer(const Return& deferred) {
  // No thread sleeps on this mutex: apply_deferred would have to wake it under the ledger's lock.
  std::unique_lock guard(deferred_mutex_, std::defer_lock);
  while (!guard.try_lock()) std::this_thread::yield();
  deferred_.push_back(deferred);
  delayed_ = true;
}

bool LockUser::apply_deferred(LedgerSegment& segment) {
  // Not waited for under the ledger's lock: a later call applies them.
  const std::unique_lock guard(deferred_mutex_, std::try_to_lock);
  if (!guard) delayed_ = true;
  if (!guard || deferred_.empty()) return false;
  for (const auto& [slot, joined, count, bytes] : deferred_) {
    ClientRecord& client = segment.clients[slot];
    if (client.used == 0 || client.joined != joined) continue;
    if (count == nullptr) {
      vacate(segment, client);
    } else {
      const uint64_t returned = std::min(client.*count, bytes);
      update(segment, client, [&](ClientRecord& c) { c.*count -= returned; });
    }
  }
  deferred_.clear();
  return true;
}

void LockUser::abandon_in_child(const Opening& opening) {
  deferred_.clear();
  delayed_ = false;
  opening_ = opening;
}

bool LedgerLock::take_slowly(LockUser& user, bool free) {
  Taken taken = Taken::clean;
  if (!free) {
    const int64_t timeout_ns = lock_timeout_ns;
    const int64_t short_ns = std::min(kShortLockTimeoutNs, timeout_ns);
    taken = wait_for(segment_.lock, user.opening_, user.delayed_ ? short_ns : timeout_ns);
  }
  // A segment that has to be repaired first gets the deferred returns from the next holder.
  from_the_dead_ = taken == Taken::from_the_dead;
  if (!from_the_dead_) user.delayed_ = taken == Taken::timed_out;
  if (taken == Taken::clean && user.apply_deferred(segment_)) announce_room();
  return taken != Taken::timed_out;
}

void LedgerLock::repair() {
  segment_.charged_bytes = total_charge(segment_);
  step("lock: repaired");
}

void LedgerLock::wake_sleepers() {
  if (room_) futex_wake_all(&segment_.room);
  for (ClientRecord* client : asked_) futex_wake_all(&client->asked);
}

Status LedgerLock::refusal() const { return held_ ? gone(segment_) : held_up_by(segment_); }

}  // namespace kvcached
