#include "spare_keeper.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "ledger_records.h"
#include "signals_blocked.h"

namespace kvcached {

namespace {

using std::chrono::milliseconds;

// Interval between looks at the limit and the room on the device while nothing wakes the thread.
constexpr milliseconds kPoll{100};
// The same while pages wait for the engine's streams.
constexpr milliseconds kPollStreams{5};
constexpr milliseconds kShortestPause{100};
constexpr milliseconds kLongestPause{1600};
// Number of pauses without pressure after which the next pause is the shortest again.
constexpr int kQuietPauses = 8;
// Fractions of the device that must be free to fill, and to keep, spare pages.
constexpr uint64_t kFillWhileFree = 16;
constexpr uint64_t kKeepWhileFree = 32;

}  // namespace

Slack slack_of(const LedgerUsage& device, const ClientRecord& client, int64_t now_ns) {
  const uint64_t elastic = client.elastic_bytes();
  const uint64_t free = above(device.capacity_bytes, device.charged_bytes);
  const bool any_waiter =
      std::any_of(device.clients.begin(), device.clients.end(), [=](const ClientRecord& other) {
        return other.wanted_since != 0 && other.wanted_bytes > 0 && now_ns < other.wanted_until_ns;
      });
  const bool beyond_minimum = elastic > client.min_bytes;
  if (elastic > client.limit_bytes) return {0, true};
  if (any_waiter) return {0, beyond_minimum};
  if (free < device.capacity_bytes / kKeepWhileFree && beyond_minimum) return {0, true};
  const uint64_t of_device =
      above(free, device.capacity_bytes / kFillWhileFree) + above(client.min_bytes, elastic);
  return {std::min(client.limit_bytes - elastic, of_device), false};
}

void SpareKeeper::add(SpareHolder* holder) {
  const std::lock_guard lock(holders_mutex_);
  holders_.push_back(holder);
}

void SpareKeeper::remove(SpareHolder* holder) {
  const std::lock_guard step(step_mutex_);
  const std::lock_guard lock(holders_mutex_);
  std::erase(holders_, holder);
}

void SpareKeeper::give_back(const SpareHolder* asker) {
  report_pressure();
  const std::lock_guard step(step_mutex_);
  std::vector<SpareHolder*> holders;
  {
    const std::lock_guard lock(holders_mutex_);
    holders = holders_;
  }
  for (SpareHolder* holder : holders) {
    if (holder != asker) holder->give_back_spares();
  }
}

size_t SpareKeeper::spare_pages(const SpareHolder* asker) {
  const std::lock_guard lock(holders_mutex_);
  size_t pages = 0;
  for (SpareHolder* holder : holders_) {
    if (holder != asker) pages += holder->spare_pages();
  }
  return pages;
}

SpareKeeper::~SpareKeeper() {
  if (wake_fd_ >= 0) ::close(wake_fd_);
}

int SpareKeeper::create_thread() {
  const SignalsBlocked blocked;
  return pthread_create(&thread_, nullptr, thread_main, this);
}

Status SpareKeeper::start() {
  const std::lock_guard lock(thread_mutex_);
  if (!allowed_ || started_ || stopping_) return {};
  if (wake_fd_ < 0) wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd_ < 0) return system_failure("eventfd", errno);
  runs_ = true;
  if (const int error = create_thread(); error != 0) {
    runs_ = false;
    return system_failure("pthread_create of the thread that keeps spare pages", error);
  }
  started_ = true;
  return {};
}

void SpareKeeper::stop() {
  const std::lock_guard lock(thread_mutex_);
  stopping_ = true;
  if (!started_) return;
  awake_ = false;
  wake();
  pthread_join(thread_, nullptr);
  started_ = false;
}

void SpareKeeper::wake() {
  if (!runs() || awake_.exchange(true)) return;
  const uint64_t one = 1;
  // Fails only if the thread is awake already, with 2^64 - 2 wakes pending.
  [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
}

void SpareKeeper::wake_to_fill() {
  if (!waits_for_room_.load(std::memory_order_relaxed)) wake();
}

void SpareKeeper::sleep(milliseconds longest) {
  pollfd event = {wake_fd_, POLLIN, 0};
  if (poll(&event, 1, static_cast<int>(longest.count())) <= 0) return;
  uint64_t wakes = 0;
  [[maybe_unused]] const ssize_t got = read(wake_fd_, &wakes, sizeof(wakes));
}

void* SpareKeeper::thread_main(void* self) {
  static_cast<SpareKeeper*>(self)->run();
  return nullptr;
}

void SpareKeeper::back_off(Clock::time_point now) {
  if (now > fill_after_ + kQuietPauses * pause_) pause_ = {};
  pause_ = std::clamp<Clock::duration>(2 * pause_, kShortestPause, kLongestPause);
  fill_after_ = now + pause_;
  waits_for_room_ = true;
}

void SpareKeeper::run() {
  while (!stopping_) {
    awake_ = false;
    Result<Slack> slack = look_();
    if (!slack.ok()) {
      ++failed_looks_;
      back_off(Clock::now());
      sleep(std::chrono::duration_cast<milliseconds>(pause_));
      continue;
    }
    const SpareWork left = step(slack.value());
    if (left != SpareWork::more) sleep(left == SpareWork::fenced ? kPollStreams : kPoll);
  }
  runs_ = false;
}

SpareWork SpareKeeper::step(const Slack& slack) {
  const std::lock_guard lock(step_mutex_);
  const Clock::time_point now = Clock::now();
  const bool newly_scarce = slack.scarce && now >= fill_after_;
  if (pressure_.exchange(false) || newly_scarce) back_off(now);
  const bool may_fill = now >= fill_after_;
  if (may_fill) waits_for_room_ = false;
  std::vector<SpareHolder*> holders;
  {
    const std::lock_guard lock(holders_mutex_);
    holders = holders_;
  }
  SpareWork left = SpareWork::done;
  for (SpareHolder* holder : holders) {
    left = std::max(left, holder->balance_spares({may_fill ? slack.fill_bytes : 0, slack.scarce}));
  }
  if (left == SpareWork::no_room && may_fill) back_off(now);
  return left;
}

void SpareKeeper::lock_for_fork() {
  thread_mutex_.lock();
  step_mutex_.lock();
  holders_mutex_.lock();
}

void SpareKeeper::unlock_after_fork() {
  holders_mutex_.unlock();
  step_mutex_.unlock();
  thread_mutex_.unlock();
}

void SpareKeeper::abandon_in_child() {
  runs_ = false;
  stopping_ = true;
  started_ = false;
}

}  // namespace kvcached
