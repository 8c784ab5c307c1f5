// The streams that a client's engine works on, and fences: points after all work submitted to them
// so far. A page may be unmapped once a fence has passed that was made after the last work on the
// page was submitted. Thread rule: any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

#include "vmm.h"

namespace kvcached {

// A fence that was made without streams has passed.
class Fence {
 public:
  Fence() = default;
  explicit Fence(std::vector<std::unique_ptr<StreamEvent>> events) : events_(std::move(events)) {}

  // Never waits. A fence that has passed stays so. True if the driver has shut down.
  Result<bool> has_passed();

 private:
  std::vector<std::unique_ptr<StreamEvent>> events_;  // not passed yet
};

class Streams {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kDefaultWait{1000};

  explicit Streams(std::shared_ptr<Vmm> vmm) : vmm_(std::move(vmm)) {}

  // Sets all streams or none. `max_wait` bounds each wait for them. REQUIRES: a stream outlives its
  // use here
  Status set(std::vector<Stream> streams, Clock::duration max_wait = kDefaultWait);
  bool any() const { return any_; }
  Clock::duration max_wait() const;

  Result<Fence> make_fence() const;
  // Makes a fence and waits until it has passed. Code::in_use if it does not within max_wait.
  Status wait() const;

 private:
  const std::shared_ptr<Vmm> vmm_;
  std::atomic<bool> any_ = false;
  std::vector<Stream> streams_;
  Clock::duration max_wait_ = kDefaultWait;
  mutable std::mutex mutex_;
};

// A pause between two tries, longer each time.
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
