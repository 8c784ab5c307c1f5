#include "host_stream.h"

#include <atomic>
#include <map>
#include <mutex>

namespace kvcached {

struct HostStream::Progress {
  std::atomic<uint64_t> submitted = 0;
  std::atomic<uint64_t> completed = 0;
};

struct HostStream::Registry {
  std::mutex mutex;
  std::map<Stream, std::shared_ptr<Progress>> streams;
  Stream next_handle = 1;

  Stream add(std::shared_ptr<Progress> progress) {
    const std::lock_guard lock(mutex);
    streams.emplace(next_handle, std::move(progress));
    return next_handle++;
  }
};

class HostStream::Event final : public StreamEvent {
 public:
  Event(std::shared_ptr<const Progress> progress, uint64_t work)
      : progress_(std::move(progress)), work_(work) {}
  Result<bool> has_passed() override {
    return progress_ == nullptr || progress_->completed >= work_;
  }

 private:
  const std::shared_ptr<const Progress> progress_;
  const uint64_t work_;
};

HostStream::Registry& HostStream::registry() {
  static auto* instance = new Registry;  // outlives every client
  return *instance;
}

HostStream::HostStream()
    : progress_(std::make_shared<Progress>()), handle_(registry().add(progress_)) {}

HostStream::~HostStream() {
  complete_all();
  const std::lock_guard lock(registry().mutex);
  registry().streams.erase(handle_);
}

void HostStream::submit() { ++progress_->submitted; }

void HostStream::complete() {
  uint64_t done = progress_->completed;
  while (done < progress_->submitted &&
         !progress_->completed.compare_exchange_weak(done, done + 1)) {
  }
}

void HostStream::complete_all() { progress_->completed = progress_->submitted.load(); }

uint64_t HostStream::pending() const { return progress_->submitted - progress_->completed; }

Result<std::unique_ptr<StreamEvent>> HostStream::record(Stream handle) {
  if (handle == 0) return std::unique_ptr<StreamEvent>(new Event(nullptr, 0));
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().streams.find(handle);
  if (found == registry().streams.end()) {
    return failure(Code::invalid_argument, "stream ", handle,
                   " is not a live stream of a host device; pass the "
                   "handle of a HostStream that still exists");
  }
  const std::shared_ptr<Progress>& progress = found->second;
  return std::unique_ptr<StreamEvent>(new Event(progress, progress->submitted));
}

}  // namespace kvcached
