// Copies files into an arena, chunk by chunk in ascending order, on several lanes at once, while
// the arena's pages are still being created (Prism §5.2: parallel, streaming loads). Uses separate
// threads that never run Python. Thread rule: any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <optional>
#include <thread>

#include "non_copyable.h"
#include "weight_arena.h"
#include "weight_links.h"

namespace kvcached {

// Bytes of a file and their place in the arena.
struct WeightPiece {
  std::string path;
  uint64_t file_offset;
  uint64_t bytes;
  uint64_t arena_offset;
};

struct LoadOptions {
  uint64_t chunk_bytes = 8 << 20;
  uint64_t bytes_per_s = 0;  // of all lanes together; 0: unlimited
};

// Rate limiter: each transfer begins when the earlier ones fit the rate.
class ByteRate {
 public:
  explicit ByteRate(uint64_t bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  // Returns the time at which a transfer of `bytes` may begin.
  std::chrono::steady_clock::time_point book(uint64_t bytes);

 private:
  const uint64_t bytes_per_s_;
  std::chrono::steady_clock::time_point next_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
};

class WeightLoad : private NonCopyable {
 public:
  // Starts at once. The arena's client cannot close until the threads end. Code::invalid_argument
  // for a piece outside of the arena, chunks of 0 bytes or links of another device, Code::busy
  // while another load uses the links.
  static Result<std::shared_ptr<WeightLoad>> start(std::shared_ptr<WeightArena> arena,
                                                   std::vector<WeightPiece> pieces,
                                                   std::shared_ptr<WeightLinks> links,
                                                   const LoadOptions& options);
  // Cancels and waits.
  ~WeightLoad();

  uint64_t total_bytes() const { return total_bytes_; }
  // Bytes given to the lanes so far, at least as many as have arrived.
  uint64_t started_bytes() const { return std::min(started_bytes_.load(), total_bytes_); }
  // Ends the load after the chunks in progress.
  void cancel();
  // Waits at most `timeout`. Returns true if all threads have ended.
  bool wait(std::chrono::milliseconds timeout);
  // Ok if every byte is in the arena, otherwise the first failure or Code::cancelled. A failed link
  // of another GPU is not a failure, because the other links load its part again. REQUIRES: wait()
  // = true
  Status outcome() const;
  // Bytes loaded over each GPU's link, by its name (WeightLinks::link_of), without those that were
  // loaded again, and the status of failed links. REQUIRES: wait() = true
  std::map<std::string, uint64_t> carried() const;
  std::map<std::string, Status> lost() const;

 private:
  // REQUIRES: the links are acquired, and begin_load of the client
  WeightLoad(std::shared_ptr<WeightArena> arena, std::vector<WeightPiece> pieces,
             std::shared_ptr<WeightLinks> links, const LoadOptions& options);
  void cut_into_chunks(uint64_t chunk_bytes);
  Status start_threads();
  void run(size_t lane);
  void leave(size_t lanes);
  Status copy_all(size_t lane, std::vector<size_t>* taken);
  // Returns the next chunk for this lane, or nothing when all are done or the load was stopped. The
  // target's own lanes wait here for chunks that failed lanes may leave.
  std::optional<size_t> take(size_t lane, bool is_first);
  // Returns true if other lanes load these chunks again, because only this lane's link failed.
  bool hand_over(size_t lane, const std::vector<size_t>& taken, const Status& why);
  void end_help();
  void count_carried(size_t lane, const std::vector<size_t>& taken);
  Status copy(WeightLane* lane, const WeightChunk& chunk);
  Status wait_for_turn(uint64_t bytes);
  void stop(Status why);

  const std::shared_ptr<WeightArena> arena_;
  const std::vector<WeightPiece> pieces_;
  std::vector<WeightChunk> chunks_;  // ascending addresses
  uint64_t total_bytes_ = 0;
  ByteRate rate_;
  const bool is_limited_;
  const std::shared_ptr<WeightLinks> links_;
  std::atomic<size_t> next_chunk_;  // every lane begins with a different chunk
  std::atomic<uint64_t> started_bytes_ = 0;
  const int owner_pid_;
  size_t running_ = 0;
  size_t helping_ = 0;  // lanes of other GPUs among them
  bool stopped_ = false;
  Status outcome_;
  std::vector<size_t> left_over_;  // chunks of lanes whose link failed
  std::map<std::string, uint64_t> carried_;
  std::map<std::string, Status> lost_;
  mutable std::mutex mutex_;  // guards the seven above
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
};

}  // namespace kvcached
