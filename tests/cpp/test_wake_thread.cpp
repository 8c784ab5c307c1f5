#include <poll.h>

#include "check.h"
#include "futex.h"
#include "wake_thread.h"

namespace kvcached::testing {

namespace {

bool readable(int fd, int wait_ms) {
  pollfd watched = {.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&watched, 1, wait_ms) == 1;
}

void what_is_cleared_is_not_readable_again() {
  constexpr int kOften = 20'000;  // its thread is between two instructions at some of these
  uint32_t word = 0;
  const auto waker = value_of(WakeThread::start(&word, 0));
  for (int i = 0; i < kOften; ++i) {
    std::atomic_ref(word).fetch_add(1);
    futex_wake_all(&word);
    CHECK(readable(waker->fd(), 30'000));
    waker->clear();
    CHECK(!readable(waker->fd(), 0));
  }
}

void a_change_before_the_start_is_told() {
  uint32_t word = 7;
  const auto waker = value_of(WakeThread::start(&word, 6));
  CHECK(readable(waker->fd(), 30'000));
}

}  // namespace

void test_wake_thread() {
  what_is_cleared_is_not_readable_again();
  a_change_before_the_start_is_told();
}

}  // namespace kvcached::testing
