// Points between two stores or system calls at which a process may be killed. The test build
// (KVCACHED_STEPS) counts them and dies at the one it was told; tests/kills does that at each.
// Elsewhere a step is a compiler barrier and no instruction: the order of the stores around it,
// which the survivors of a death rely on, is the order of the source.
#pragma once

#include <atomic>

namespace kvcached {

#ifdef KVCACHED_STEPS
void step(const char* name);  // defined by the test program
#else
inline void step(const char*) { std::atomic_signal_fence(std::memory_order_acq_rel); }
#endif

}  // namespace kvcached
