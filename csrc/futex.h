// Sleeping on a word that processes share, until another changes it and wakes. The word may lie in
// a file that processes of different containers map.
#pragma once

#include <cstdint>

namespace kvcached {

// Nanoseconds of the clock that all processes of the machine share; no wall-clock time.
int64_t monotonic_ns();
// The same, behind by up to a tick of the kernel, for a few nanoseconds.
int64_t coarse_ns();

// Returns when the word is no longer `seen`, when woken, when `until_ns` has passed (INT64_MAX:
// never), or for no reason: look again.
void futex_wait(uint32_t* word, uint32_t seen, int64_t until_ns);

// Wakes that many sleepers at most.
void futex_wake(uint32_t* word, int count);
void futex_wake_all(uint32_t* word);

}  // namespace kvcached
