// What a forked child must not share with its parent: device memory and the liveness lock.
// The child drops both at once (closing descriptors, replacing mappings by holes), so that a
// client's memory still dies with the process that opened it. exec and vfork need nothing of this:
// the descriptors are close-on-exec.
#pragma once

#include "non_copyable.h"

namespace kvcached {

class ForkGuarded : private NonCopyable {
 public:
  virtual ~ForkGuarded() = default;
  virtual void lock_for_fork() = 0;
  virtual void unlock_after_fork() = 0;
  // Runs in the child between the two above; only async-signal-safe calls, no allocation.
  virtual void abandon_in_child() = 0;
};

// Neither may be called while holding what lock_for_fork locks. A fork locks the newest object
// first, so an object may take the locks of those made before it while holding its own.
void guard_against_fork(ForkGuarded* object);
void unguard_against_fork(ForkGuarded* object);

}  // namespace kvcached
