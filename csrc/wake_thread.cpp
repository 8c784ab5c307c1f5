#include "wake_thread.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <system_error>

#include "futex.h"

namespace kvcached {

namespace {

// No signal of the process is handled by a thread that is started while this lives.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

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
    (void)!::write(fd_, &one, sizeof(one));  // fails only where it is readable already
    readable_ = true;
  }
}

void WakeThread::clear() {
  if (!readable_.exchange(false)) return;
  uint64_t count = 0;
  (void)!::read(fd_, &count, sizeof(count));
}

void WakeThread::abandon_in_child() {
  (void)thread_.release();
  ::close(fd_);
  fd_ = -1;
}

}  // namespace kvcached
