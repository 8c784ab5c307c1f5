#include "streams.h"

#include <algorithm>
#include <set>
#include <utility>

namespace test_libcuda {

namespace {

constexpr uint64_t kFirstDefault = 0x100;  // plus the device

}  // namespace

uint64_t Streams::name(uint64_t stream, int device) {
  return stream != 0 ? stream : kFirstDefault + static_cast<uint64_t>(device);
}

const Streams::Queue* Streams::find(uint64_t name) const {
  for (const auto* queues : {&streams_, &defaults_}) {
    if (const auto found = queues->find(name); found != queues->end()) return &found->second;
  }
  return nullptr;
}

Streams::Queue* Streams::find(uint64_t name) {
  return const_cast<Queue*>(std::as_const(*this).find(name));
}

uint64_t Streams::make(int device, bool is_blocking) {
  streams_.emplace(next_, Queue{device, 0, {}, is_blocking});
  return next_++;
}

// CUDA lets a destroyed stream finish its work.
bool Streams::remove(uint64_t stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) return false;
  complete(found->second, UINT64_MAX);
  streams_.erase(found);
  return true;
}

bool Streams::exists(uint64_t stream, int device) const {
  if (stream == 0) return true;
  const auto found = streams_.find(stream);
  return found != streams_.end() && found->second.device == device;
}

void Streams::launch(uint64_t stream, int device, Work work) {
  if (stream == 0) defaults_.try_emplace(name(0, device), Queue{device});
  find(name(stream, device))->pending.push_back(std::move(work));
  count_busy_devices();
}

void Streams::count_busy_devices() {
  std::set<int> busy;
  for (const auto* queues : {&streams_, &defaults_}) {
    for (const auto& [name, queue] : *queues) {
      if (!queue.pending.empty()) busy.insert(queue.device);
    }
  }
  busy_devices_max_ = std::max(busy_devices_max_, busy.size());
}

void Streams::complete(uint64_t stream, int device, uint64_t count) {
  Queue* queue = find(name(stream, device));
  if (queue == nullptr) return;
  complete(*queue, count);
}

void Streams::complete(Queue& queue, uint64_t count) {
  for (; count > 0 && !queue.pending.empty(); --count) {
    const Work work = std::move(queue.pending.front());
    queue.pending.pop_front();
    if (const auto awaited = awaited_.find(work.after_event); awaited != awaited_.end()) {
      Queue* other = find(awaited->second.stream);
      const uint64_t until = awaited->second.work;
      awaited_.erase(awaited);
      if (other != nullptr && other->completed < until) complete(*other, until - other->completed);
    }
    if (work.run) work.run();
    ++queue.completed;
  }
}

void Streams::complete_until(uint64_t event, uint64_t count) {
  const Event& found = events_.at(event);
  Queue* queue = find(found.stream);
  if (queue != nullptr && queue->completed < found.work) {
    complete(*queue, std::min(count, found.work - queue->completed));
  }
}

void Streams::wait_for(uint64_t stream, int device, uint64_t event) {
  awaited_.emplace(next_, events_.at(event));
  Work work;
  work.after_event = next_++;
  launch(stream, device, std::move(work));
}

bool Streams::is_blocking(uint64_t stream) const {
  const auto found = streams_.find(stream);
  return found != streams_.end() && found->second.is_blocking;
}

bool Streams::has_work(uint64_t stream, int device) const {
  const Queue* queue = find(name(stream, device));
  return queue != nullptr && !queue->pending.empty();
}

void Streams::complete_device(int device) {
  for (auto* queues : {&streams_, &defaults_}) {
    for (auto& [name, queue] : *queues) {
      if (queue.device == device) complete(queue, UINT64_MAX);
    }
  }
}

bool Streams::is_touched(uint64_t address, uint64_t bytes) const {
  return is_touched_elsewhere(address, bytes, 0, -1);
}

bool Streams::is_touched_elsewhere(uint64_t address, uint64_t bytes, uint64_t stream,
                                   int device) const {
  const uint64_t own = name(stream, device);
  const auto touches = [=](const Work& work) {
    return work.address < address + bytes && address < work.address + work.bytes;
  };
  const auto touched = [&](const auto& entry) {
    if (entry.first == own) return false;
    return std::any_of(entry.second.pending.begin(), entry.second.pending.end(), touches);
  };
  return std::any_of(streams_.begin(), streams_.end(), touched) ||
         std::any_of(defaults_.begin(), defaults_.end(), touched);
}

uint64_t Streams::make_event(int device) {
  events_.emplace(next_, Event{device});
  return next_++;
}

bool Streams::remove_event(uint64_t event) { return events_.erase(event) != 0; }

bool Streams::record(uint64_t event, uint64_t stream, int device) {
  const auto found = events_.find(event);
  if (found == events_.end() || found->second.device != device || !exists(stream, device)) {
    return false;
  }
  const Queue* queue = find(name(stream, device));
  found->second.stream = name(stream, device);
  found->second.work = queue == nullptr ? 0 : queue->completed + queue->pending.size();
  return true;
}

bool Streams::has_passed(uint64_t event) const {
  const Event& found = events_.at(event);
  const Queue* queue = find(found.stream);
  return queue == nullptr || queue->completed >= found.work;
}

}  // namespace test_libcuda
