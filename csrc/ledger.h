// The ledger of one device: who holds how much of it, in memory shared by all its processes.
//
// The one rule: a hard reservation exists before any physical page does, so that two engines can
// never race into out-of-memory. reserve, then create the pages and commit, or cancel.
// For each client charge = static + max(pages reserved, minimum), and the sum of all charges never
// exceeds the capacity at any moment, even if processes die at any point.
//
// Liveness is a file lock that dies with its process (liveness.h); a dead client's record is freed
// by the next caller that lacks room, reads usage or calls reap. Looking takes a system call for
// each client, so `available` and refusals of pages look again after kProbeInterval only: that much
// later at most they find room that a death left. The lock is its holder's (owned_lock.h): if that is killed
// inside, the next one rebuilds the only derived number from the records. A holder that is stopped
// inside stops all others, so nothing is asked of the system there; who waits for too long is told
// the holder (ledger_lock.h). Thread rule: any thread. Calls that name a slot come from the process
// that joined it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fork_guard.h"
#include "ledger_segment.h"
#include "liveness.h"
#include "status.h"

namespace kvcached {

struct LedgerOptions {
  std::string path;
  std::optional<uint64_t> capacity_bytes;  // absent: attach only
  std::optional<uint64_t> page_bytes;      // absent: whatever the ledger has
};

struct ClientOptions {
  std::string name;
  uint64_t min_bytes = 0;
  uint64_t limit_bytes = kNoLimit;
};

// How long a sleeper trusts in being woken: its waker may have died before that.
inline constexpr int64_t kLookAgainNs = 100'000'000;
inline constexpr std::chrono::milliseconds kProbeInterval{1};
inline constexpr std::chrono::milliseconds kFileLookInterval{100};

// Which client an administrator means. An absent part matches every client. `joined` alone tells
// apart the clients of one name in one process.
struct ClientQuery {
  std::optional<std::string> name;
  std::optional<int32_t> pid;
  std::optional<uint64_t> joined = {};
};

// Memory behind a client's pages, as the OS counts it; for a client without a memory file (on a
// GPU) what it committed. Code::permission if this user may not look.
Result<uint64_t> resident_bytes(const ClientRecord& client);

// Ends with the field, should the record be damaged.
std::string name_of(const ClientRecord& client);

struct LedgerUsage {
  uint64_t capacity_bytes;
  uint64_t page_bytes;
  uint64_t charged_bytes;
  std::vector<ClientRecord> clients;
};

// Part of a plan: this client of this record shall give back so much.
struct Ask {
  int slot;
  uint64_t joined;
  uint64_t bytes;
};

struct ShrinkRequest {
  uint32_t number;
  uint64_t bytes;  // to give back; kNoLimit: whatever can go
};

// What a client answers to a request. `evicted_tokens` of prefix cache made `evicted_bytes` of the
// `given_bytes` free.
struct ShrinkAnswer {
  uint64_t given_bytes = 0;
  uint64_t evicted_tokens = 0;
  uint64_t evicted_bytes = 0;
};

// One coherent read, to plan which clients shall shrink; `slots` go with `clients`.
struct BalloonView {
  int64_t now_ns;
  uint64_t asks;
  uint64_t free_bytes;
  uint32_t seen;  // for sleep
  std::vector<int> slots;
  std::vector<ClientRecord> clients;
};

class Ledger final : private ForkGuarded {
 public:
  // Creates or attaches. A ledger that cannot be used any more (of an earlier boot, half made,
  // destroyed) is replaced; one whose contents cannot be right is Code::corrupt.
  static Result<std::shared_ptr<Ledger>> open(const LedgerOptions& options);
  ~Ledger() override;

  uint64_t capacity_bytes() const { return segment_->capacity_bytes; }
  uint64_t page_bytes() const { return segment_->page_bytes; }

  // Takes a free record and locks its byte with lock_fd (from open_lock_fd), which the client
  // keeps open as long as it holds memory. Returns the slot.
  Result<int> join(const ClientOptions& options, int lock_fd, int memory_fd);
  // Succeeds as cancel and release do.
  Status leave(int slot);
  Result<int> open_lock_fd() const;

  // Pages. no_room carries what was asked and what this client could have.
  Status reserve(int slot, uint64_t bytes);
  Status commit(int slot, uint64_t bytes);  // part of what was reserved now exists
  // Part of what was reserved will not exist; part of what was committed exists no more. Both
  // succeed, and the count follows, where a stopped process holds the lock.
  Status cancel(int slot, uint64_t bytes);
  Status release(int slot, uint64_t bytes);
  // What reserve would grant now: the limit, others' minimums and unused own minimum counted.
  // With `given_back_bytes`, what it would grant once that much of the committed were released.
  Result<uint64_t> available(int slot, uint64_t given_back_bytes = 0);

  // Memory that does not come and go: weights, activations, contexts. No limit applies.
  Status reserve_static(int slot, uint64_t bytes);
  Status release_static(int slot, uint64_t bytes);

  Status set_limit(int slot, uint64_t bytes);  // may be below what is held: no growth then
  Status set_min(int slot, uint64_t bytes);
  // The same for an administrator: any process, a client found by name, by pid or by both. The
  // client sees it at its next reservation. Code::unknown_client, Code::ambiguous_client.
  Status set_limit(const ClientQuery& query, uint64_t bytes);
  Status set_min(const ClientQuery& query, uint64_t bytes);

  // --- the balloon: waiting for memory, and asking those who have some (ledger_balloon.cpp) ---

  // From here until end_wait or `until_ns` this client waits for what reserve (reserve_static if
  // `is_static`) would take: memory that comes free is kept for it, after those who wait for
  // longer, unless its limit or the others' guarantees forbid it for good. Nothing if reserve would
  // grant it now; else what to sleep on. Again after each sleep. Code::gone.
  Result<std::optional<uint32_t>> want(int slot, uint64_t bytes, bool is_static, int64_t until_ns);
  // Returns when room may have come free or an answer was given since `seen` was read, when
  // kLookAgainNs have passed or `until_ns` has. Dead clients are found by looking again.
  void sleep(uint32_t seen, int64_t until_ns);
  void end_wait(int slot);
  Result<BalloonView> balloon_view();
  // Posts requests, wakes their clients, and gives the number of each (ClientRecord::asked),
  // nothing for a client that is gone. Code::busy, and nothing is posted, unless `asks` is still
  // that of the view that the plan was made from.
  Result<std::vector<std::optional<uint32_t>>> ask(std::span<const Ask> plan, uint64_t asks,
                                                   int64_t until_ns);

  // For the asked client. has_request is a read of shared memory without the lock.
  bool has_request(int slot);
  // Nothing if what was asked for is no longer wanted.
  Result<std::optional<ShrinkRequest>> shrink_request(int slot);
  Status answer(int slot, const ShrinkRequest& request, const ShrinkAnswer& answer);
  // The word that changes with each request (a futex), and what it was at the last answer.
  uint32_t* request_word(int slot) { return &record(slot).asked; }
  uint32_t answered_request(int slot) { return std::atomic_ref(record(slot).answered).load(); }
  // What this client could give back. Without the lock.
  void publish_evictable(int slot, uint64_t bytes);
  void add_spare(int slot, int64_t bytes);
  void touch(int slot);

  void count_maps(int slot, uint64_t maps, uint64_t unmaps);

  // One coherent read, dead clients freed first.
  Result<LedgerUsage> usage();
  // resident_bytes of all clients. No reservation is granted while it looks, so that a page moving
  // from one client to another is not counted twice; a look that takes too long is begun again.
  Result<uint64_t> resident_bytes();
  Result<ClientRecord> client(int slot);
  Result<int> reap();

  // Removes the segment. Code::busy while any client lives, unless `force`.
  Status destroy(bool force);

 private:
  class Lock;

  Ledger(std::string path, const Opening& opening, LedgerSegment* segment);
  void lock_for_fork() override { owed_mutex_.lock(); }
  void unlock_after_fork() override { owed_mutex_.unlock(); }
  // The child opens the file again: it holds the lock, and dies, apart from its parent.
  void abandon_in_child() override;
  Status check_segment();
  ClientRecord& record(int slot) { return segment_->clients[slot]; }
  uint64_t free_bytes() const;
  // Without what those wait for who came before this client.
  uint64_t free_bytes_for(const ClientRecord& client);
  uint64_t room(const ClientRecord& client);
  uint64_t wanted_before(const ClientRecord& client);
  uint32_t sleep_on_locked();
  uint64_t shared_part(const ClientRecord& client, uint64_t bytes, bool is_static) const;
  // The client has got so much: with the same hold of the lock it wants that no more. Else whoever
  // plans before its end_wait has others asked for it again.
  static void wait_for_less(ClientRecord& client, uint64_t bytes);
  // What of a reservation that is refused its caller is told.
  struct Refusal {
    uint64_t free_bytes;
    bool limited;  // by the client's own limit
  };
  std::optional<Refusal> try_reserve(int slot, uint64_t bytes);
  bool may_have_died(int slot) const;
  // Looks for dead clients unless that was done `at_most_every` ago, and reaps them. Whether there
  // were any. REQUIRES: the lock is not held.
  bool free_the_dead(std::chrono::nanoseconds at_most_every = {});
  // A client that the system has to be asked about, without the lock.
  struct Suspect {
    int slot;
    uint64_t joined;
    ProcessId owner;
  };
  std::vector<Suspect> find_dead();
  int reap_dead();
  Status check_usable();
  // `act` under the lock, once nobody looks at what is resident: for all that grants memory.
  template <class Act>
  Status while_nobody_looks(Act act);
  // REQUIRES: the lock is held
  bool look_is_over() const;
  // Copies the records and stops grants until the time that it answers, or until end_look, which
  // says whether that was in time.
  Result<int64_t> begin_look(std::vector<ClientRecord>* clients);
  Result<bool> end_look(int64_t until_ns);
  // Once per kFileLookInterval: whether the file is still there. If it was removed other than by
  // destroy nothing is granted from then on, to any process.
  void look_at_file();
  Status mark_destroyed(bool force);
  void vacate(ClientRecord& client);
  Result<int> find_locked(const ClientQuery& query);
  Status set_limit_locked(Lock& lock, int slot, uint64_t bytes);
  Status set_min_locked(int slot, uint64_t bytes);
  Status reserve_static_locked(int slot, uint64_t bytes);
  // `attempt` under the lock, and once more if it found no room and a client had died.
  template <class Attempt>
  Status without_the_dead(Attempt attempt);
  // Code::busy if it is used. REQUIRES: its byte is locked
  Status claim_record(int slot, const ClientOptions& options, const ProcessId& self, int memory_fd);
  // Less of one of a record's counts, now or, if the lock cannot be had, by the next one of this
  // process who has it.
  Status give_back(int slot, uint64_t ClientRecord::* count, uint64_t bytes, const char* what);
  Status owe(int slot, uint64_t ClientRecord::* count, uint64_t bytes);
  // Whether anything was owed. REQUIRES: the lock is held
  bool pay_owed();
  // Applies `change` to a record and keeps the total of charges right.
  template <class Change>
  void update(ClientRecord& client, Change change);

  const std::string path_;
  Opening opening_;  // its descriptor keeps its number
  LedgerSegment* const segment_;
  std::atomic<int64_t> probed_ns_ = 0;
  std::atomic<int64_t> file_look_ns_ = 0;  // of the next look at the file
  // The last wait for the lock was in vain, or something is owed.
  std::atomic<bool> held_up_ = false;
  // What was given back while the lock could not be had; a record of another `joined` is another
  // client's by now.
  struct Owed {
    int slot;
    uint64_t joined;
    uint64_t ClientRecord::* count;  // null: the client has left
    uint64_t bytes;
  };
  std::mutex owed_mutex_;
  std::vector<Owed> owed_;
};

}  // namespace kvcached
