// The spare pages of one client: who holds them, how they go back when the client needs the room
// elsewhere, and a thread that keeps them between their watermarks, so that the engine's thread
// waits neither for a map nor for an unmap.
//
// The thread works in batches and only where no other thread is inside the holder. It takes memory
// from the device only while much of it is free, gives all spares back when little is (slack_of),
// and after anything that pressed for room it takes none for a while, longer each time. Filling
// goes up to the low watermark and giving back starts above the high one, so the two never undo
// each other. It starts with the first watermark that needs it, if it was allowed at all, and never
// calls Python. A forked child has no such thread. Thread rule: any thread.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <mutex>
#include <vector>

#include "ledger.h"
#include "non_copyable.h"

namespace kvcached {

// What a batch of background work on a holder left to do, in ascending order of importance:
// nothing, what there is no room for, pages that the engine's streams may still touch, more now.
enum class Tended { content, starved, waiting, more };

// What spare pages may do to the device now.
struct Slack {
  uint64_t fill_bytes = 0;  // may be taken ahead of need
  bool scarce = false;      // spare pages are to go back
};

// Holds pages of a client that it could do without.
class SpareHolder : private NonCopyable {
 public:
  virtual ~SpareHolder() = default;
  // Gives them back, unless another thread is inside the holder. Never waits for it.
  virtual void give_back_spares() = 0;
  // What give_back_spares would give back now.
  virtual size_t spare_pages() = 0;
  // One batch of bringing them between their watermarks, or of giving all back where memory is
  // scarce. Never waits for another thread's calls to the driver.
  virtual Tended tend_spares(const Slack& slack) = 0;
};

// Beyond the client's own minimum, which nobody else can have, spare pages are filled while at
// least 1/16 of the device stays free, and kept while 1/32 does, nobody waits for memory, and the
// client is within its limit.
Slack slack_of(const LedgerUsage& device, const ClientRecord& client, int64_t now_ns);

class SpareKeeper : private NonCopyable {
 public:
  // `look` answers on the keeper's thread, which tries again after an error, each time later.
  explicit SpareKeeper(std::function<Result<Slack>()> look) : look_(std::move(look)) {}
  // REQUIRES: stopped, or abandoned
  ~SpareKeeper();

  // A holder is added once and removed before it dies.
  void add(SpareHolder* holder);
  void remove(SpareHolder* holder);
  // Spares are to go and to stay away for a while.
  void press() { pressed_ = true; }
  // Asks every holder but `asker`, who may hold its own lock.
  void give_back(const SpareHolder* asker);
  // Pages that give_back would find.
  size_t spare_pages(const SpareHolder* asker);

  // The thread. start does nothing unless it was allowed and once it runs.
  void allow() { allowed_ = true; }
  bool is_allowed() const { return allowed_; }
  Status start();
  void stop();
  // Looks that failed so far, for example because another process kept the ledger locked.
  uint64_t failed_looks() const { return failed_looks_; }
  bool runs() const { return runs_.load(std::memory_order_acquire); }
  // There is a surplus to give back, or something to fill; the second is no news while the thread
  // is waiting for room. Both cost little when it is awake, and nothing when it does not run.
  void wake();
  void wake_to_fill();

  void lock_for_fork();
  void unlock_after_fork();
  void abandon_in_child();

 private:
  using Clock = std::chrono::steady_clock;

  static void* thread_main(void* self);
  int create_thread();
  void run();
  Tended step(const Slack& slack);
  void back_off(Clock::time_point now);
  void sleep(std::chrono::milliseconds longest);

  const std::function<Result<Slack>()> look_;
  bool allowed_ = false;
  std::atomic<bool> runs_ = false;
  std::atomic<uint64_t> failed_looks_ = 0;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> awake_ = false;
  std::atomic<bool> deaf_ = false;     // to wake_to_fill
  std::atomic<bool> pressed_ = false;  // something needed the spares' room since the last step
  int wake_fd_ = -1;  // from start to the end of the object: a wake may come at any time
  bool started_ = false;
  pthread_t thread_ = {};
  std::mutex thread_mutex_;  // of starting and stopping; before step_mutex_
  std::mutex step_mutex_;    // its holder may be inside SpareHolders; before holders_mutex_
  std::mutex holders_mutex_;
  std::vector<SpareHolder*> holders_;
  // Of the thread alone.
  Clock::duration pause_ = {};  // the last
  Clock::time_point fill_after_ = {};
};

}  // namespace kvcached
