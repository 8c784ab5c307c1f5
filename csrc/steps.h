// Points between two stores or system calls at which a process may be killed. The test build
// (KVCACHED_STEPS) counts them, and tests/kills kills a process at each. In other builds a step is
// a compiler barrier without an instruction: it keeps the stores around it in source order, which
// the survivors of a death rely on.
#pragma once

#include <atomic>

namespace kvcached {

#ifdef KVCACHED_STEPS
void step(const char* name);  // defined by the test program
#else
inline void step(const char*) { std::atomic_signal_fence(std::memory_order_acq_rel); }
#endif

}  // namespace kvcached
