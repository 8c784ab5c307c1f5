#include "streams.h"

#include <algorithm>
#include <thread>

namespace kvcached {

Result<bool> Fence::has_passed() {
  while (!events_.empty()) {
    Result<bool> passed = events_.back()->has_passed();
    if (!passed.ok() && passed.status().code != Code::closed) return passed;
    if (passed.ok() && !passed.value()) return false;
    events_.pop_back();
  }
  return true;
}

void Pause::sleep() {
  std::this_thread::sleep_for(next_);
  next_ = std::min(2 * next_, longest_);
}

Status Streams::set(std::vector<Stream> streams, Clock::duration max_wait) {
  if (max_wait < Clock::duration::zero()) {
    return failure(Code::invalid_argument, "the wait for streams is negative");
  }
  for (const Stream stream : streams) {
    // Refuses a stream that cannot be waited for now, not at the first free.
    KV_ASSIGN(std::unique_ptr<StreamEvent> event, vmm_->record_event(stream));
  }
  const std::lock_guard lock(mutex_);
  streams_ = std::move(streams);
  max_wait_ = max_wait;
  any_ = !streams_.empty();
  return {};
}

Streams::Clock::duration Streams::max_wait() const {
  const std::lock_guard lock(mutex_);
  return max_wait_;
}

Result<Fence> Streams::make_fence() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::unique_ptr<StreamEvent>> events;
  for (const Stream stream : streams_) {
    Result<std::unique_ptr<StreamEvent>> event = vmm_->record_event(stream);
    if (event.ok()) {
      events.push_back(std::move(event.value()));
    } else if (event.status().code != Code::closed) {
      return event.status();
    }
  }
  return Fence(std::move(events));
}

Status Streams::wait() const {
  KV_ASSIGN(Fence fence, make_fence());
  const Clock::time_point deadline = Clock::now() + max_wait();
  for (Pause pause;; pause.sleep()) {
    KV_ASSIGN(bool passed, fence.has_passed());
    if (passed) return {};
    if (Clock::now() >= deadline) break;
  }
  return failure(Code::in_use,
                 "the engine's streams still have work that may touch the pages; synchronise them "
                 "and try again, or pass a longer wait to set_streams");
}

}  // namespace kvcached
