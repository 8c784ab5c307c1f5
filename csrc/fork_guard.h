// Handling of fork: a child must not share device memory or the liveness lock with its parent. The
// child drops both at once (closes descriptors, replaces mappings by holes), so that a client's
// memory still dies with the process that opened it. exec and vfork are safe because the
// descriptors are close-on-exec.
#pragma once

#include "non_copyable.h"

namespace kvcached {

class ForkGuarded : private NonCopyable {
 public:
  virtual ~ForkGuarded() = default;
  virtual void lock_for_fork() = 0;
  virtual void unlock_after_fork() = 0;
  // Runs in the child between the two above. Only async-signal-safe calls, no allocation.
  virtual void abandon_in_child() = 0;
};

// Neither may be called while holding the mutexes that lock_for_fork locks. A fork locks the newest
// object first, so an object may take the locks of older objects while holding its own.
void guard_against_fork(ForkGuarded* object);
void unguard_against_fork(ForkGuarded* object);

}  // namespace kvcached
