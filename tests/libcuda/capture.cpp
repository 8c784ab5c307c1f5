#include "capture.h"

#include <algorithm>
#include <utility>

namespace test_libcuda {

const Captures::Sequence* Captures::of_stream(uint64_t stream) const {
  const auto member = members_.find(stream);
  return member == members_.end() ? nullptr : &sequences_.at(member->second);
}

Captures::Sequence* Captures::of_stream(uint64_t stream) {
  return const_cast<Sequence*>(std::as_const(*this).of_stream(stream));
}

Error Captures::begin(uint64_t stream, int device, bool is_blocking, CaptureMode mode) {
  if (stream == 0) return kCaptureUnsupported;
  if (of_stream(stream) != nullptr) return kIllegalState;
  const uint64_t id = next_id_++;
  Sequence sequence{id, stream, device, is_blocking, mode, std::this_thread::get_id()};
  sequence.streams[stream];
  sequences_.emplace(id, std::move(sequence));
  members_.emplace(stream, id);
  return kSuccess;
}

// The origin has waited for all that the other streams recorded.
bool Captures::is_joined(const Sequence& sequence) {
  const Clock& origin = sequence.streams.at(sequence.origin);
  return std::all_of(sequence.streams.begin(), sequence.streams.end(), [&](const auto& entry) {
    const auto& [stream, clock] = entry;
    const auto done = clock.find(stream);
    if (stream == sequence.origin || done == clock.end()) return true;
    const auto seen = origin.find(stream);
    return seen != origin.end() && seen->second == done->second;
  });
}

Error Captures::end(uint64_t stream, std::unique_ptr<Graph>& graph) {
  Sequence* sequence = of_stream(stream);
  if (sequence == nullptr) return kIllegalState;
  if (sequence->origin != stream) return kCaptureUnmatched;
  if (sequence->mode != CaptureMode::relaxed && sequence->thread != std::this_thread::get_id()) {
    return kCaptureWrongThread;
  }
  Error error = kSuccess;
  if (!sequence->is_valid) {
    error = kCaptureInvalidated;
  } else if (!is_joined(*sequence)) {
    error = kCaptureUnjoined;
  } else {
    graph = std::make_unique<Graph>(std::move(sequence->graph));
  }
  const uint64_t id = sequence->id;
  std::erase_if(members_, [=](const auto& member) { return member.second == id; });
  sequences_.erase(id);
  return error;
}

CaptureStatus Captures::status(uint64_t stream) const {
  const Sequence* sequence = of_stream(stream);
  if (sequence == nullptr) return CaptureStatus::none;
  return sequence->is_valid ? CaptureStatus::active : CaptureStatus::invalidated;
}

uint64_t Captures::id(uint64_t stream) const {
  const Sequence* sequence = of_stream(stream);
  return sequence == nullptr ? 0 : sequence->id;
}

bool Captures::blocks_default(int device) const {
  return std::any_of(sequences_.begin(), sequences_.end(), [=](const auto& entry) {
    return entry.second.is_blocking && entry.second.device == device;
  });
}

void Captures::invalidate_blocking(int device) {
  for (auto& [id, sequence] : sequences_) {
    if (sequence.is_blocking && sequence.device == device) sequence.is_valid = false;
  }
}

void Captures::invalidate(uint64_t stream) {
  if (Sequence* sequence = of_stream(stream)) sequence->is_valid = false;
}

bool Captures::forbids_unsafe(CaptureMode mode) {
  if (mode == CaptureMode::relaxed) return false;
  bool forbidden = false;
  for (auto& [id, sequence] : sequences_) {
    const bool is_own = sequence.thread == std::this_thread::get_id();
    const bool forbids = is_own
                             ? sequence.mode != CaptureMode::relaxed
                             : mode == CaptureMode::global && sequence.mode == CaptureMode::global;
    if (!forbids) continue;
    forbidden = true;
    sequence.is_valid = false;
  }
  return forbidden;
}

void Captures::record(uint64_t stream, Work work) {
  Sequence* sequence = of_stream(stream);
  ++sequence->streams[stream][stream];
  sequence->graph.push_back(std::move(work));
}

void Captures::record_event(uint64_t stream, uint64_t event) {
  const Sequence* sequence = of_stream(stream);
  events_[event] = {sequence->id, sequence->streams.at(stream)};
}

void Captures::invalidate_of_event(uint64_t event) {
  const auto sequence = sequences_.find(events_.at(event).sequence);
  if (sequence != sequences_.end()) sequence->second.is_valid = false;
}

Error Captures::wait(uint64_t stream, uint64_t event) {
  const auto captured = events_.find(event);
  Sequence* own = of_stream(stream);
  if (captured == events_.end()) {
    // Only the order within a stream crosses the beginning of its capture.
    if (own != nullptr) own->is_valid = false;
    return kCaptureIsolation;
  }
  const auto other = sequences_.find(captured->second.sequence);
  if (other == sequences_.end()) return kCapturedEvent;
  if (own != nullptr && own != &other->second) {
    own->is_valid = other->second.is_valid = false;
    return kCaptureMerge;
  }
  members_[stream] = other->first;
  Clock& clock = other->second.streams[stream];
  for (const auto& [from, count] : captured->second.clock) {
    clock[from] = std::max(clock[from], count);
  }
  return kSuccess;
}

}  // namespace test_libcuda
