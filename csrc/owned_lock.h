// Lock in a file that processes of several containers map. Its word names the opening of the file
// that holds it: a number whose byte the kernel keeps locked until that opening is closed, at the
// latest when its process ends. So a dead holder can be told from a live one in every pid
// namespace. A robust pthread mutex cannot do that: its word is a thread id, which two namespaces
// can both use, and the death of a waiter frees the lock of a holder with the same id.
//
// Taking and releasing a free lock take one atomic operation each. Only waiters make system calls.
// Thread rule: any thread. The threads of one opening exclude each other.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "status.h"

namespace kvcached {

// In shared memory. All zeros: free, and no opening yet.
struct OwnedLock {
  uint32_t word;      // futex: number of the holding opening, and kLockSleepers; 0: free
  uint32_t openings;  // number of the last opening
  uint64_t deaths;    // of holders
  uint64_t reserved;
  uint64_t holder;            // the last: pid, and in the lower half its opening
  uint64_t holder_namespace;  // of pids
};

inline constexpr uint32_t kLockSleepers = 1u << 31;  // bit of OwnedLock::word: a process waits
inline constexpr uint32_t kOpeningBits = kLockSleepers - 1;

// One opening of the file. `fd` belongs to the caller.
struct Opening {
  int fd = -1;
  uint32_t number = 0;
  int32_t pid = 0;
  uint64_t pid_namespace = 0;
};

// Claims an unused number for the file that is open as `fd`, and locks its byte. A forked child
// that uses the lock opens the file again and claims another number. Allocates memory only if it
// fails.
Result<Opening> claim_opening(int fd, OwnedLock* lock);

enum class Taken { clean, from_the_dead, timed_out };

// Waits for a lock that try_take did not get, for at most `timeout_ns`.
Taken wait_for(OwnedLock& lock, const Opening& opening, int64_t timeout_ns);

inline bool try_take(OwnedLock& lock, const Opening& opening) {
  uint32_t seen = 0;
  return std::atomic_ref(lock.word).compare_exchange_strong(seen, opening.number,
                                                            std::memory_order_acquire);
}

// Records the holder, for the error message of a waiter. REQUIRES: the lock is held by `opening`
inline void sign(OwnedLock& lock, const Opening& opening) {
  const uint64_t holder = uint64_t{static_cast<uint32_t>(opening.pid)} << 32 | opening.number;
  std::atomic_ref(lock.holder_namespace).store(opening.pid_namespace, std::memory_order_relaxed);
  std::atomic_ref(lock.holder).store(holder, std::memory_order_release);
}

void unlock(OwnedLock& lock);

// Holder of the lock. `known` is false until the holder has signed.
struct LockHolder {
  bool held = false;
  bool known = false;
  int32_t pid = 0;
  uint64_t pid_namespace = 0;
};
LockHolder holder_of(const OwnedLock& lock);

}  // namespace kvcached
