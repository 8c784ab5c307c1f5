// Lock in a file that processes of several containers map. Its word names the opening of the file
// that holds it: a number whose byte the kernel keeps locked until that opening is closed, which it
// is when its process ends. So a holder that died is told from one that lives, in every pid
// namespace. A robust pthread mutex cannot do that: its word is the number of a thread, which two
// namespaces give out twice, and the death of a waiter frees the lock of a holder of that number.
//
// Taking and releasing a lock that is free are one atomic operation each. The system is asked only
// by those who wait. Thread rule: any thread; the threads of one opening exclude each other.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "status.h"

namespace kvcached {

// In shared memory; all zeros: free, and no opening yet.
struct OwnedLock {
  uint32_t word;  // a futex: the number of the opening that holds it, and kLockSleepers; 0: free
  uint32_t openings;  // the number of the last opening
  uint64_t deaths;    // of holders, so far
  uint64_t reserved;
  uint64_t holder;            // of the last who took it: pid and, in the lower half, its opening
  uint64_t holder_namespace;  // of pids
};

inline constexpr uint32_t kLockSleepers = 1u << 31;  // bit of OwnedLock::word: somebody waits
inline constexpr uint32_t kOpeningBits = kLockSleepers - 1;

// One opening of the file. `fd` is the caller's.
struct Opening {
  int fd = -1;
  uint32_t number = 0;
  int32_t pid = 0;
  uint64_t pid_namespace = 0;
};

// A number of its own for the file that is open as `fd`, with its byte locked. A forked child that
// uses the lock opens the file again and claims another one. Allocates nothing unless it fails.
Result<Opening> claim_opening(int fd, OwnedLock* lock);

enum class Taken { clean, from_the_dead, timed_out };

// The cold part of `take`.
Taken wait_for(OwnedLock& lock, const Opening& opening, int64_t patience_ns);

inline bool try_take(OwnedLock& lock, const Opening& opening) {
  uint32_t seen = 0;
  return std::atomic_ref(lock.word).compare_exchange_strong(seen, opening.number,
                                                            std::memory_order_acquire);
}

// For those who wait in vain. REQUIRES: the lock is held by `opening`
inline void sign(OwnedLock& lock, const Opening& opening) {
  const uint64_t holder = uint64_t{static_cast<uint32_t>(opening.pid)} << 32 | opening.number;
  std::atomic_ref(lock.holder_namespace).store(opening.pid_namespace, std::memory_order_relaxed);
  std::atomic_ref(lock.holder).store(holder, std::memory_order_release);
}

void unlock(OwnedLock& lock);

// Who holds the lock. `known` is false where the holder has not signed yet, or never will.
struct LockHolder {
  bool held = false;
  bool known = false;
  int32_t pid = 0;
  uint64_t pid_namespace = 0;
};
LockHolder holder_of(const OwnedLock& lock);

}  // namespace kvcached
