// Spare pages of one client: their holders, giving them back when the client needs the room
// elsewhere, and a thread that keeps them between their watermarks, so that the engine's thread
// waits neither for a map nor for an unmap.
//
// The thread works in batches, and only while no other thread is inside the holder. It takes memory
// from the device only while much of it is free, and gives all spares back when little is
// (slack_of). After memory pressure it takes none for a while, longer each time. It fills up to the
// low watermark and gives back above the high one, so the two never undo each other. The first
// watermark above 0 starts it, if a thread is allowed at all. It never calls Python. A forked child
// has no such thread. Thread rule: any thread.
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

// Work on a holder that is left after a batch, in ascending order of importance.
enum class SpareWork {
  done,
  no_room,  // more could be filled with more room
  fenced,   // pages wait for the engine's streams
  more,     // another batch can run now
};

// Room on the device for spare pages.
struct Slack {
  uint64_t fill_bytes = 0;  // may be taken ahead of need
  bool scarce = false;      // all spare pages are to be given back
};

// Holder of pages that a client can do without.
class SpareHolder : private NonCopyable {
 public:
  virtual ~SpareHolder() = default;
  // Gives the spare pages back, unless another thread is inside the holder. Never waits for it.
  virtual void give_back_spares() = 0;
  // Pages that give_back_spares would give back now.
  virtual size_t spare_pages() = 0;
  // Runs one batch that moves the spares towards their watermarks, or gives them back if memory is
  // scarce. Never waits for another thread's calls to the driver.
  virtual SpareWork balance_spares(const Slack& slack) = 0;
};

// Room for a client's spare pages. Within the client's own minimum, which no other client can have,
// they may always be filled. Beyond it, they are filled while at least 1/16 of the device stays
// free, and kept while 1/32 does, no client waits for memory, and this one is within its limit.
Slack slack_of(const LedgerUsage& device, const ClientRecord& client, int64_t now_ns);

class SpareKeeper : private NonCopyable {
 public:
  // The keeper's thread calls `look`, and calls it again after an error, each time later.
  explicit SpareKeeper(std::function<Result<Slack>()> look) : look_(std::move(look)) {}
  // REQUIRES: stopped, or abandoned
  ~SpareKeeper();

  // A holder is added once and removed before it dies.
  void add(SpareHolder* holder);
  void remove(SpareHolder* holder);
  // Stops filling for a while, because the room is needed elsewhere.
  void report_pressure() { pressure_ = true; }
  // Asks every holder but `asker`, which may hold its own lock, to give its spares back.
  void give_back(const SpareHolder* asker);
  // Pages that give_back would give back.
  size_t spare_pages(const SpareHolder* asker);

  // The thread. start does nothing unless the thread is allowed and does not run yet.
  void allow() { allowed_ = true; }
  bool is_allowed() const { return allowed_; }
  Status start();
  void stop();
  // Number of calls of `look` that failed, for example because another process kept the ledger
  // locked.
  uint64_t failed_looks() const { return failed_looks_; }
  bool runs() const { return runs_.load(std::memory_order_acquire); }
  // Wakes the thread to give a surplus back, or to fill. The second is ignored while the thread
  // waits for room. Both cost little while it is awake, and nothing while it does not run.
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
  SpareWork step(const Slack& slack);
  void back_off(Clock::time_point now);
  void sleep(std::chrono::milliseconds longest);

  const std::function<Result<Slack>()> look_;
  bool allowed_ = false;
  std::atomic<bool> runs_ = false;
  std::atomic<uint64_t> failed_looks_ = 0;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> awake_ = false;
  std::atomic<bool> waits_for_room_ = false;  // wake_to_fill is ignored
  std::atomic<bool> pressure_ = false;        // reported since the last step
  int wake_fd_ = -1;  // open from start to destruction: a wake may come at any time
  bool started_ = false;
  pthread_t thread_ = {};
  // Locked in this order.
  std::mutex thread_mutex_;  // of starting and stopping
  std::mutex step_mutex_;    // its holder may be inside SpareHolders
  std::mutex holders_mutex_;
  std::vector<SpareHolder*> holders_;
  // Used by the thread only.
  Clock::duration pause_ = {};  // the last pause
  Clock::time_point fill_after_ = {};
};

}  // namespace kvcached
