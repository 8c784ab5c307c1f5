#include "owned_lock.h"

#include <unistd.h>

#include <algorithm>

#include "futex.h"
#include "liveness.h"

namespace kvcached {

namespace {

// First byte of openings. The ledger's other locked bytes precede it (ledger_file.h).
constexpr off_t kFirstOpeningByte = 1 << 16;
constexpr int kClaims = 1 << 16;

// First and longest sleep of a waiter between checks that the holder lives.
constexpr int64_t kFirstLookNs = 1'000'000;
constexpr int64_t kLastLookNs = 100'000'000;

off_t byte_of(uint32_t number) { return kFirstOpeningByte + static_cast<off_t>(number); }

uint32_t read_word(const OwnedLock& lock) {
  return std::atomic_ref(const_cast<uint32_t&>(lock.word)).load(std::memory_order_acquire);
}

bool replace(OwnedLock& lock, uint32_t seen, uint32_t word) {
  return std::atomic_ref(lock.word).compare_exchange_strong(seen, word, std::memory_order_acquire);
}

}  // namespace

Result<Opening> claim_opening(int fd, OwnedLock* lock) {
  for (int attempt = 0; attempt < kClaims; ++attempt) {
    const uint32_t number = (std::atomic_ref(lock->openings).fetch_add(1) + 1) & kOpeningBits;
    if (number == 0) continue;
    Status locked = lock_byte(fd, byte_of(number), false);
    if (locked.code == Code::busy) continue;
    if (!locked.ok()) return locked;
    // A holder of that number died. Leave the number to the waiters, which detect the death.
    if ((read_word(*lock) & kOpeningBits) != number) {
      return Opening{fd, number, getpid(), this_pid_namespace()};
    }
    unlock_byte(fd, byte_of(number));
  }
  return failure(Code::busy, "the ledger has too many openings; close some");
}

Taken wait_for(OwnedLock& lock, const Opening& opening, int64_t timeout_ns) {
  const int64_t until_ns = monotonic_ns() + timeout_ns;
  int64_t look_ns = kFirstLookNs;
  for (;;) {
    const uint32_t seen = read_word(lock);
    const uint32_t holder = seen & kOpeningBits;
    if (holder == 0) {
      // Other processes may sleep as well.
      if (replace(lock, seen, opening.number | kLockSleepers)) return Taken::clean;
      continue;
    }
    const int64_t now_ns = monotonic_ns();
    if (now_ns >= until_ns) return Taken::timed_out;
    if ((seen & kLockSleepers) == 0 && !replace(lock, seen, seen | kLockSleepers)) continue;
    futex_wait(&lock.word, holder | kLockSleepers, std::min(until_ns, now_ns + look_ns));
    if (monotonic_ns() - now_ns < look_ns) continue;
    look_ns = std::min(2 * look_ns, kLastLookNs);
    const bool dead = holder != opening.number && !is_byte_locked(opening.fd, byte_of(holder));
    if (dead && replace(lock, holder | kLockSleepers, opening.number | kLockSleepers)) {
      std::atomic_ref(lock.deaths).fetch_add(1, std::memory_order_relaxed);
      return Taken::from_the_dead;
    }
  }
}

void unlock(OwnedLock& lock) {
  const uint32_t word = std::atomic_ref(lock.word).exchange(0, std::memory_order_release);
  if ((word & kLockSleepers) != 0) futex_wake(&lock.word, 1);
}

LockHolder holder_of(const OwnedLock& lock) {
  const uint32_t number = read_word(lock) & kOpeningBits;
  if (number == 0) return {};
  auto& signed_by = const_cast<uint64_t&>(lock.holder);
  const uint64_t holder = std::atomic_ref(signed_by).load(std::memory_order_acquire);
  if (static_cast<uint32_t>(holder) != number) return {.held = true};
  return {true, true, static_cast<int32_t>(holder >> 32), lock.holder_namespace};
}

}  // namespace kvcached
