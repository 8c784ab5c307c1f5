// A file descriptor for poll, select or epoll that becomes readable when another process changes a
// shared word. A futex cannot be polled, and a socket or a FIFO needs a name that both processes
// see and that has to be removed. So a thread sleeps on the word and writes to an eventfd. Thread
// rule: any thread, except for the constructor and the destructor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "non_copyable.h"
#include "status.h"

namespace kvcached {

class WakeThread : private NonCopyable {
 public:
  // Readable from the start if the word is not `seen`. The word outlives the object.
  static Result<std::unique_ptr<WakeThread>> start(uint32_t* word, uint32_t seen);
  // Adds one to the word to stop the thread.
  ~WakeThread();

  int fd() const { return fd_; }
  // Makes the descriptor unreadable until the next change.
  void clear();
  // For a forked child, where the thread does not exist. Async-signal-safe.
  void abandon_in_child();

 private:
  WakeThread(int fd, uint32_t* word) : fd_(fd), word_(word) {}
  void run(uint32_t seen);

  int fd_;
  uint32_t* const word_;
  std::atomic<bool> stopping_ = false;
  std::atomic<uint64_t> unread_ = 0;  // written or about to be, and not read yet
  std::unique_ptr<std::thread> thread_;
};

}  // namespace kvcached
