#include "futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace kvcached {

namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t now_ns(clockid_t clock) {
  timespec now = {};
  clock_gettime(clock, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

}  // namespace

int64_t monotonic_ns() { return now_ns(CLOCK_MONOTONIC); }

int64_t coarse_ns() { return now_ns(CLOCK_MONOTONIC_COARSE); }

void futex_wait(uint32_t* word, uint32_t seen, int64_t until_ns) {
  const timespec until = {until_ns / kSecond, until_ns % kSecond};
  // The bitset variant takes a time of the monotonic clock instead of a duration.
  (void)syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, until_ns == INT64_MAX ? nullptr : &until,
                nullptr, FUTEX_BITSET_MATCH_ANY);
}

void futex_wake(uint32_t* word, int count) {
  (void)syscall(SYS_futex, word, FUTEX_WAKE, count, nullptr, nullptr, 0);
}

void futex_wake_all(uint32_t* word) { futex_wake(word, INT_MAX); }

}  // namespace kvcached
