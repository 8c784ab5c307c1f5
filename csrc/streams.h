// The streams that a client's engine works on, and fences: points behind everything that all of
// them were given so far. A page may be unmapped once a fence has passed that was made after the
// last work on it was submitted.
// Thread rule: any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

#include "vmm.h"

namespace kvcached {

// One that was made without streams has passed.
class Fence {
 public:
  Fence() = default;
  explicit Fence(std::vector<std::unique_ptr<StreamEvent>> events) : events_(std::move(events)) {}

  // Never waits. What once has passed stays so. A driver that has shut down has nothing to do.
  Result<bool> has_passed();

 private:
  std::vector<std::unique_ptr<StreamEvent>> events_;  // those that had not passed
};

class Streams {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kDefaultWait{1000};

  explicit Streams(std::shared_ptr<Vmm> vmm) : vmm_(std::move(vmm)) {}

  // All or none. `max_wait` bounds each wait for them. The streams outlive their stay here.
  Status set(std::vector<Stream> streams, Clock::duration max_wait = kDefaultWait);
  bool any() const { return any_; }
  Clock::duration max_wait() const;

  Result<Fence> make_fence() const;
  // Makes a fence and waits until it has passed; Code::in_use if it does not within max_wait.
  Status wait() const;

 private:
  const std::shared_ptr<Vmm> vmm_;
  std::atomic<bool> any_ = false;
  std::vector<Stream> streams_;
  Clock::duration max_wait_ = kDefaultWait;
  mutable std::mutex mutex_;
};

// A pause between two tries: short at first, then longer and longer.
class Pause {
 public:
  explicit Pause(std::chrono::microseconds longest = std::chrono::microseconds(1000))
      : longest_(longest) {}
  void sleep();

 private:
  const std::chrono::microseconds longest_;
  std::chrono::microseconds next_{20};
};

}  // namespace kvcached
