#include "weight_load.h"

#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "signals_blocked.h"

namespace kvcached {

namespace {

using Clock = std::chrono::steady_clock;

// Pages are created in runs of this size, so that lanes seldom wait for each other.
constexpr uint64_t kMapAheadBytes = 32 << 20;
// With a rate limit, a chunk takes at most this part of a second, for an even rate.
constexpr uint64_t kChunksPerSecond = 50;
constexpr uint64_t kSmallestChunk = 4096;

Status check_pieces(const std::vector<WeightPiece>& pieces, uint64_t arena_bytes) {
  for (const WeightPiece& piece : pieces) {
    if (piece.arena_offset <= arena_bytes && piece.bytes <= arena_bytes - piece.arena_offset) {
      continue;
    }
    return failure(Code::invalid_argument, piece.path, ": its ", piece.bytes,
                   " bytes do not fit into the arena at ", piece.arena_offset);
  }
  return {};
}

uint64_t bounded_chunk(const LoadOptions& options) {
  if (options.bytes_per_s == 0) return options.chunk_bytes;
  return std::min(options.chunk_bytes,
                  std::max(kSmallestChunk, options.bytes_per_s / kChunksPerSecond));
}

}  // namespace

Clock::time_point ByteRate::book(uint64_t bytes) {
  const std::chrono::duration<double> cost(static_cast<double>(bytes) /
                                           static_cast<double>(bytes_per_s_));
  const std::lock_guard lock(mutex_);
  const Clock::time_point begin = std::max(next_, Clock::now());
  next_ = begin + std::chrono::duration_cast<Clock::duration>(cost);
  return begin;
}

Result<std::shared_ptr<WeightLoad>> WeightLoad::start(std::shared_ptr<WeightArena> arena,
                                                      std::vector<WeightPiece> pieces,
                                                      std::shared_ptr<WeightLinks> links,
                                                      const LoadOptions& options) {
  if (options.chunk_bytes == 0) return failure(Code::invalid_argument, "chunk_bytes must be > 0");
  KV_TRY(check_pieces(pieces, arena->bytes()));
  if (!links->lead_to(*arena->client())) {
    return failure(Code::invalid_argument, "these links are for another device than the arena's");
  }
  if (!links->acquire()) return failure(Code::busy, "another load uses these links; wait for it");
  if (Status status = arena->client()->begin_load(); !status.ok()) {
    links->release();
    return status;
  }
  std::shared_ptr<WeightLoad> load(
      new WeightLoad(std::move(arena), std::move(pieces), std::move(links), options));
  KV_TRY(load->start_threads());
  return load;
}

Status WeightLoad::start_threads() {
  const SignalsBlocked blocked;
  const size_t lanes = links_->lanes();
  try {
    while (threads_.size() < lanes) threads_.emplace_back(&WeightLoad::run, this, threads_.size());
  } catch (const std::system_error& error) {
    leave(lanes - threads_.size());
    return system_failure("start of a thread", error.code().value());
  }
  return {};
}

WeightLoad::WeightLoad(std::shared_ptr<WeightArena> arena, std::vector<WeightPiece> pieces,
                       std::shared_ptr<WeightLinks> links, const LoadOptions& options)
    : arena_(std::move(arena)),
      pieces_(std::move(pieces)),
      rate_(options.bytes_per_s),
      is_limited_(options.bytes_per_s != 0),
      links_(std::move(links)),
      next_chunk_(links_->lanes()),
      owner_pid_(getpid()),
      running_(links_->lanes()) {
  for (size_t lane = 0; lane < running_; ++lane) helping_ += links_->is_relayed(lane) ? 1 : 0;
  cut_into_chunks(std::min(bounded_chunk(options), links_->chunk_bytes_max()));
}

WeightLoad::~WeightLoad() {
  const bool is_forked = getpid() != owner_pid_;  // the threads exist in the parent only
  if (!is_forked) cancel();
  for (std::thread& thread : threads_) {
    if (is_forked) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void WeightLoad::cut_into_chunks(uint64_t chunk_bytes) {
  const uint64_t base = arena_->region()->address();
  for (const WeightPiece& piece : pieces_) {
    for (uint64_t at = 0; at < piece.bytes; at += chunk_bytes) {
      chunks_.push_back({&piece.path, piece.file_offset + at,
                         std::min(chunk_bytes, piece.bytes - at), base + piece.arena_offset + at});
    }
    total_bytes_ += piece.bytes;
  }
  std::sort(chunks_.begin(), chunks_.end(),
            [](const WeightChunk& a, const WeightChunk& b) { return a.address < b.address; });
}

void WeightLoad::cancel() { stop(failure(Code::cancelled, "the load of weights was cancelled")); }

void WeightLoad::stop(Status why) {
  const std::lock_guard lock(mutex_);
  if (stopped_ || running_ == 0) return;
  stopped_ = true;
  outcome_ = std::move(why);
  changed_.notify_all();
}

bool WeightLoad::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return running_ == 0; });
}

Status WeightLoad::outcome() const {
  const std::lock_guard lock(mutex_);
  return outcome_;
}

std::map<std::string, uint64_t> WeightLoad::carried() const {
  const std::lock_guard lock(mutex_);
  return carried_;
}

std::map<std::string, Status> WeightLoad::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

void WeightLoad::run(size_t lane) {
  std::vector<size_t> taken;
  Status status = copy_all(lane, &taken);
  const Status drained = links_->lane(lane)->drain();
  if (status.ok()) status = drained;
  if (status.ok()) {
    count_carried(lane, taken);
  } else if (!hand_over(lane, taken, status)) {
    stop(std::move(status));
  }
  if (links_->is_relayed(lane)) end_help();
  leave(1);
}

void WeightLoad::count_carried(size_t lane, const std::vector<size_t>& taken) {
  uint64_t bytes = 0;
  for (const size_t i : taken) bytes += chunks_[i].bytes;
  const std::lock_guard lock(mutex_);
  carried_[links_->link_of(lane)] += bytes;
}

// A driver error fails the link. Any other failure (file, arena, cancellation) fails the whole
// load.
bool WeightLoad::hand_over(size_t lane, const std::vector<size_t>& taken, const Status& why) {
  if (!links_->is_relayed(lane) || why.code != Code::system_call) return false;
  if (!links_->lane(lane)->is_quiet()) return false;
  const std::lock_guard lock(mutex_);
  left_over_.insert(left_over_.end(), taken.begin(), taken.end());
  lost_.emplace(links_->link_of(lane), why);
  return true;
}

void WeightLoad::end_help() {
  const std::lock_guard lock(mutex_);
  --helping_;
  changed_.notify_all();
}

void WeightLoad::leave(size_t lanes) {
  const std::lock_guard lock(mutex_);
  running_ -= lanes;
  if (running_ == 0) {
    links_->release();
    arena_->client()->end_load();
  }
  changed_.notify_all();
}

Status WeightLoad::copy_all(size_t lane, std::vector<size_t>* taken) {
  while (const std::optional<size_t> i = take(lane, taken->empty())) {
    taken->push_back(*i);
    KV_TRY(wait_for_turn(chunks_[*i].bytes));
    KV_TRY(copy(links_->lane(lane), chunks_[*i]));
  }
  return {};
}

std::optional<size_t> WeightLoad::take(size_t lane, bool is_first) {
  const size_t next = is_first ? lane : next_chunk_++;
  if (next < chunks_.size()) return next;
  if (links_->is_relayed(lane)) return {};
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return stopped_ || helping_ == 0 || !left_over_.empty(); });
  if (stopped_ || left_over_.empty()) return {};
  const size_t found = left_over_.back();
  left_over_.pop_back();
  return found;
}

Status WeightLoad::wait_for_turn(uint64_t bytes) {
  const Clock::time_point turn = is_limited_ ? rate_.book(bytes) : Clock::time_point();
  std::unique_lock lock(mutex_);
  if (is_limited_) changed_.wait_until(lock, turn, [this] { return stopped_; });
  return stopped_ ? failure(Code::cancelled, "stopped") : Status{};
}

Status WeightLoad::copy(WeightLane* lane, const WeightChunk& chunk) {
  const uint64_t end = chunk.address + chunk.bytes - arena_->region()->address();
  if (Status backed = arena_->back(end, kMapAheadBytes); !backed.ok()) {
    stop(std::move(backed));  // not an error of the link: every link would get it
    return failure(Code::cancelled, "stopped");
  }
  KV_TRY(lane->copy(chunk));
  started_bytes_ += chunk.bytes;
  return {};
}

}  // namespace kvcached
