// The ledger of one device: how much of it each client holds, in memory that all its processes
// share.
//
// A hard reservation exists before any physical page does, so that two engines can never race into
// out-of-memory: reserve, then create the pages and commit, or cancel.
// For each client charge = static + max(pages reserved, minimum). The sum of all charges never
// exceeds the capacity at any moment, even if processes die at any point.
//
// Liveness is a file lock that the kernel drops with the process (liveness.h). The record of a dead
// client is freed by the next call that lacks room, reads usage or is reap. The check takes one
// system call for each client, so `available` and refused reservations of pages repeat it after
// kProbeInterval only: they find the room that a death left at most that much later.
// A holder that dies with the ledger's lock is detected (owned_lock.h), and the next one rebuilds
// the only derived number from the records. A call that waits for the lock for too long fails and
// names the holder (ledger_lock.h).
// Thread rule: any thread. Calls that name a slot come from the process that joined it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fork_guard.h"
#include "ledger_lock.h"
#include "ledger_segment.h"
#include "liveness.h"
#include "status.h"

namespace kvcached {

struct LedgerOptions {
  std::string path;
  std::optional<uint64_t> capacity_bytes;  // absent: attach only
  std::optional<uint64_t> page_bytes;      // absent: that of the ledger
};

struct ClientOptions {
  std::string name;
  uint64_t min_bytes = 0;
  uint64_t limit_bytes = kNoLimit;
};

// Longest sleep without another look: the process that should wake the sleeper may have died.
inline constexpr int64_t kLookAgainNs = 100'000'000;
inline constexpr std::chrono::milliseconds kProbeInterval{1};       // between checks for deaths
inline constexpr std::chrono::milliseconds kFileLookInterval{100};  // between checks of the file

// Names a client for an administrator. An absent part matches every client. Only `joined` tells
// clients of one name in one process apart.
struct ClientQuery {
  std::optional<std::string> name;
  std::optional<int32_t> pid;
  std::optional<uint64_t> joined = {};
};

// Resident memory of a client's pages, as the OS counts it. For a client without a memory file (on
// a GPU) its committed bytes. Code::permission if this user may not read it.
Result<uint64_t> resident_bytes(const ClientRecord& client);

// The client's name, cut at the end of its field if the record is damaged.
std::string name_of(const ClientRecord& client);

struct LedgerUsage {
  uint64_t capacity_bytes;
  uint64_t page_bytes;
  uint64_t charged_bytes;
  std::vector<ClientRecord> clients;
};

// Part of a plan: the bytes that one client shall give back.
struct Ask {
  int slot;
  uint64_t joined;  // of the client in that slot
  uint64_t bytes;
};

struct ShrinkRequest {
  uint32_t number;
  uint64_t bytes;  // to give back; kNoLimit: all that can be
};

// Answer of a client to a request.
struct ShrinkAnswer {
  uint64_t given_bytes = 0;
  uint64_t evicted_tokens = 0;  // of prefix cache
  uint64_t evicted_bytes = 0;   // part of given_bytes that these evictions freed
};

// One coherent read, to plan which clients shall shrink.
struct BalloonView {
  int64_t now_ns;
  uint64_t asks;        // LedgerSegment::asks
  uint64_t free_bytes;  // charged to no client
  uint32_t seen;        // argument of sleep
  std::vector<int> slots;
  std::vector<ClientRecord> clients;  // of `slots`, in the same order
};

class Ledger final : private ForkGuarded {
 public:
  // Creates a ledger or attaches to it. Replaces one that cannot be used any more (of an earlier
  // boot, unfinished, destroyed). Code::corrupt for contents that are not possible.
  static Result<std::shared_ptr<Ledger>> open(const LedgerOptions& options);
  ~Ledger() override;

  uint64_t capacity_bytes() const { return segment_->capacity_bytes; }
  uint64_t page_bytes() const { return segment_->page_bytes; }

  // Takes a free record and locks its byte with lock_fd (from open_lock_fd), which the client
  // keeps open as long as it holds memory. Returns the slot.
  Result<int> join(const ClientOptions& options, int lock_fd, int memory_fd);
  // Succeeds where a stopped process holds the lock, as cancel and release do.
  Status leave(int slot);
  Result<int> open_lock_fd() const;

  // Pages. Code::no_room carries the bytes that were asked for and those that this client could
  // have.
  Status reserve(int slot, uint64_t bytes);
  // Part of the reserved pages now exists.
  Status commit(int slot, uint64_t bytes);
  // Part of the reserved pages will not exist (cancel), or part of the committed ones exists no
  // more (release). Both also succeed where a stopped process holds the lock: the count follows.
  Status cancel(int slot, uint64_t bytes);
  Status release(int slot, uint64_t bytes);
  // Bytes that reserve would grant now, given the limit, the others' minimums and the unused own
  // minimum. With `given_back_bytes`: once that much of the committed bytes were released.
  Result<uint64_t> available(int slot, uint64_t given_back_bytes = 0);

  // Memory that is not elastic: weights, activations, contexts. The limit does not apply.
  Status reserve_static(int slot, uint64_t bytes);
  Status release_static(int slot, uint64_t bytes);

  // A limit below the bytes held only prevents growth.
  Status set_limit(int slot, uint64_t bytes);
  Status set_min(int slot, uint64_t bytes);
  // The same for an administrator, from any process. The client sees it at its next reservation.
  // Code::unknown_client, Code::ambiguous_client
  Status set_limit(const ClientQuery& query, uint64_t bytes);
  Status set_min(const ClientQuery& query, uint64_t bytes);

  // --- the balloon: waiting for memory, and asking other clients for some ---

  // Registers this client as waiting for a reserve (reserve_static if `is_static`) of `bytes`,
  // until end_wait or `until_ns`. Memory that comes free is kept for it, after clients that have
  // waited for longer, unless its limit or the others' guarantees rule the grant out permanently.
  // Returns nothing if reserve would grant the bytes now, otherwise the argument of sleep. Called
  // again after each sleep. Code::gone
  Result<std::optional<uint32_t>> want(int slot, uint64_t bytes, bool is_static, int64_t until_ns);
  // Returns when room may have come free or an answer was given since `seen` was read, or after
  // kLookAgainNs or at `until_ns`. A dead client is found by the next `want`, not by sleep.
  void sleep(uint32_t seen, int64_t until_ns);
  void end_wait(int slot);
  Result<BalloonView> balloon_view();
  // Posts requests and wakes their clients. Returns the number of each request
  // (ClientRecord::asked), nothing for a client that is gone. Code::busy, with nothing posted, if
  // `asks` differs from that of the view that the plan was made from.
  Result<std::vector<std::optional<uint32_t>>> ask(std::span<const Ask> plan, uint64_t asks,
                                                   int64_t until_ns);

  // For the asked client. Reads shared memory without the lock.
  bool has_request(int slot);
  // Nothing if the requested bytes are no longer wanted.
  Result<std::optional<ShrinkRequest>> shrink_request(int slot);
  Status answer(int slot, const ShrinkRequest& request, const ShrinkAnswer& answer);
  // Futex word that changes with each request, and its value at the last answer.
  uint32_t* request_word(int slot) { return &record(slot).asked; }
  uint32_t answered_request(int slot) { return std::atomic_ref(record(slot).answered).load(); }
  // What this client could give back. These three write without the lock.
  void publish_evictable(int slot, uint64_t bytes);
  void add_spare(int slot, int64_t bytes);
  void touch(int slot);

  void count_maps(int slot, uint64_t maps, uint64_t unmaps);

  // One coherent read, after dead clients were freed.
  Result<LedgerUsage> usage();
  // Sum of resident_bytes of all clients. Grants wait for the scan, so that a page that moves from
  // one client to another is not counted twice. A scan that takes too long is repeated.
  Result<uint64_t> resident_bytes();
  Result<ClientRecord> client(int slot);
  // Frees the records of dead clients. Returns how many.
  Result<int> reap();

  // Removes the segment. Code::busy while any client lives, unless `force`.
  Status destroy(bool force);

 private:
  // Room of a client whose reservation is refused.
  struct Refusal {
    uint64_t free_bytes;
    bool limited;  // by the client's own limit
  };
  // A client that may be dead. Asking the system needs its owner, and no lock held.
  struct Suspect {
    int slot;
    uint64_t joined;
    ProcessId owner;
  };

  Ledger(std::string path, const Opening& opening, LedgerSegment* segment);
  void lock_for_fork() override { lock_user_.lock_for_fork(); }
  void unlock_after_fork() override { lock_user_.unlock_after_fork(); }
  // The child opens the file again, so that it holds the lock, and dies, apart from its parent.
  void abandon_in_child() override;
  Status check_segment();
  Status check_usable();
  LedgerLock lock() { return {*segment_, lock_user_}; }
  ClientRecord& record(int slot) { return segment_->clients[slot]; }

  // Runs `act` under the lock while no scan of resident memory is active. For all that grants
  // memory.
  template <class Act>
  Status grant(Act act);
  // The same, and once more after Code::no_room if a client had died.
  template <class Act>
  Status grant_or_reap(Act act);
  // Subtracts from one of a record's counts, at once or, if the lock is not to be had, when a
  // thread of this process next gets it.
  Status give_back(int slot, uint64_t ClientRecord::* count, uint64_t bytes, const char* what);

  // Frees dead clients, unless that was tried `at_most_every` ago. Returns whether there were any.
  // REQUIRES: the lock is not held
  bool free_the_dead(std::chrono::nanoseconds at_most_every = {});
  bool may_have_died(int slot) const;
  std::vector<Suspect> find_dead();
  int reap_dead();
  // Once per kFileLookInterval: if the file was removed other than by destroy, grants end for all
  // processes.
  void look_at_file();
  Status mark_destroyed(bool force);

  // Copies the records and stops grants, until the returned time or end_scan.
  Result<int64_t> begin_scan(std::vector<ClientRecord>* clients);
  // Returns whether grants were stopped for the whole of the scan.
  Result<bool> end_scan(int64_t until_ns);

  // REQUIRES, for each: the lock is held
  bool scan_is_over() const;
  uint32_t announce_sleeper();
  std::optional<Refusal> try_reserve(int slot, uint64_t bytes);
  Status reserve_static_locked(int slot, uint64_t bytes);
  Status set_limit_locked(LedgerLock& lock, int slot, uint64_t bytes);
  Status set_min_locked(int slot, uint64_t bytes);

  const std::string path_;
  LedgerSegment* const segment_;
  LockUser lock_user_;
  std::atomic<int64_t> probed_ns_ = 0;     // time of the last check for deaths
  std::atomic<int64_t> file_look_ns_ = 0;  // time of the next look_at_file
};

}  // namespace kvcached
