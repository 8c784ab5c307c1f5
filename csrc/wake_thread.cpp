#include "wake_thread.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "futex.h"
#include "signals_blocked.h"

namespace kvcached {

Result<std::unique_ptr<WakeThread>> WakeThread::start(uint32_t* word, uint32_t seen) {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) return system_failure("eventfd", errno);
  std::unique_ptr<WakeThread> made(new WakeThread(fd, word));
  const SignalsBlocked blocked;
  try {
    made->thread_ = std::make_unique<std::thread>([self = made.get(), seen] { self->run(seen); });
  } catch (const std::system_error& error) {
    return system_failure("start of a thread", error.code().value());
  }
  return made;
}

WakeThread::~WakeThread() {
  if (thread_) {
    stopping_ = true;
    std::atomic_ref(*word_).fetch_add(1);
    futex_wake_all(word_);
    thread_->join();
  }
  if (fd_ >= 0) ::close(fd_);
}

void WakeThread::run(uint32_t seen) {
  while (!stopping_) {
    const uint32_t now = std::atomic_ref(*word_).load();
    if (now == seen) {
      futex_wait(word_, seen, INT64_MAX);
      continue;
    }
    seen = now;
    const uint64_t one = 1;
    unread_ += one;  // before the write, so that `clear` counts all that is readable
    (void)!::write(fd_, &one, sizeof(one));
  }
}

void WakeThread::clear() {
  if (unread_ == 0) return;
  uint64_t count = 0;
  if (::read(fd_, &count, sizeof(count)) == sizeof(count)) unread_ -= count;
}

void WakeThread::abandon_in_child() {
  (void)thread_.release();
  ::close(fd_);
  fd_ = -1;
}

}  // namespace kvcached
