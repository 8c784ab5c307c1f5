// Sleeping on a word that processes share until another process changes it and wakes the sleepers.
// The word may be in a file that processes of different containers map.
#pragma once

#include <cstdint>

namespace kvcached {

// Nanoseconds of the monotonic clock that all processes of the machine share.
int64_t monotonic_ns();
// The same, late by up to a tick of the kernel, at a cost of a few nanoseconds.
int64_t coarse_ns();

// Returns when the word is no longer `seen`, when woken, at `until_ns` (INT64_MAX: never), or
// spuriously: check again.
void futex_wait(uint32_t* word, uint32_t seen, int64_t until_ns);

// Wakes at most `count` sleepers.
void futex_wake(uint32_t* word, int count);
void futex_wake_all(uint32_t* word);

}  // namespace kvcached
