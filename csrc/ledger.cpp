#include "ledger.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <thread>

#include "futex.h"
#include "ledger_check.h"
#include "ledger_file.h"
#include "ledger_records.h"

namespace kvcached {

namespace {

// A client that gave less than it was asked for is not asked again for so long.
constexpr int64_t kAskPauseNs = 100'000'000;
// Longest stop of grants for a scan of resident memory: longer than reading /proc takes, and short
// for clients that wait while the scanning process is stopped.
constexpr int64_t kScanNs = 100'000'000;
constexpr int kScanAttempts = 20;

Status underflow(const char* what) {
  return failure(Code::internal, "more bytes given back than ", what);
}

ProcessId owner_of(const ClientRecord& client) {
  return {client.pid, client.pid_namespace, client.start_ticks};
}

Result<uint64_t> resident_bytes_of(const ClientRecord& client, uint64_t pid_namespace) {
  if (client.memory_fd < 0) return uint64_t{client.committed_bytes};
  return resident_bytes(owner_of(client), client.memory_fd, pid_namespace);
}

// Reads the pid namespace once for all clients, because reservations wait for this.
Result<uint64_t> sum_of_resident_bytes(std::span<const ClientRecord> clients) {
  const uint64_t pid_namespace = this_pid_namespace();
  uint64_t total = 0;
  for (const ClientRecord& client : clients) {
    KV_ASSIGN(uint64_t bytes, resident_bytes_of(client, pid_namespace));
    total += bytes;
  }
  return total;
}

bool is_open(const ClientRecord& client) { return client.asked != client.answered; }

}  // namespace

Result<uint64_t> resident_bytes(const ClientRecord& client) {
  return resident_bytes_of(client, this_pid_namespace());
}

std::string name_of(const ClientRecord& client) {
  return {client.name, strnlen(client.name, sizeof(client.name))};
}

Result<std::shared_ptr<Ledger>> Ledger::open(const LedgerOptions& options) {
  KV_ASSIGN(LedgerFile file, open_ledger_file(options));
  std::shared_ptr<Ledger> ledger(new Ledger(options.path, file.opening, file.segment));
  KV_TRY(ledger->check_segment());
  return ledger;
}

Ledger::Ledger(std::string path, const Opening& opening, LedgerSegment* segment)
    : path_(std::move(path)), segment_(segment), lock_user_(opening) {
  guard_against_fork(this);
}

Status Ledger::check_segment() {
  const LedgerLock guard = lock();
  KV_TRY(guard.held());
  return check_records(*segment_, path_);
}

Ledger::~Ledger() {
  unguard_against_fork(this);
  munmap(segment_, sizeof(LedgerSegment));
  ::close(lock_user_.opening().fd);
}

void Ledger::abandon_in_child() {
  lock_user_.abandon_in_child(reopen(lock_user_.opening(), segment_));
}

Result<int> Ledger::open_lock_fd() const {
  const std::string path = "/proc/self/fd/" + std::to_string(lock_user_.opening().fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return system_failure("open of the ledger's lock", errno);
  return fd;
}

// Inline, and the look at the file out of line: every reservation passes here.
template <class Act>
[[gnu::always_inline]] inline Status Ledger::grant(Act act) {
  if (coarse_ns() >= file_look_ns_.load(std::memory_order_relaxed)) look_at_file();
  for (;; std::this_thread::sleep_for(std::chrono::microseconds(50))) {
    const LedgerLock guard = lock();
    KV_TRY(guard.check());
    if (segment_->scan_until_ns == 0 || scan_is_over()) [[likely]]
      return act();
  }
}

template <class Act>
Status Ledger::grant_or_reap(Act act) {
  Status status = grant(act);
  return status.code == Code::no_room && free_the_dead() ? grant(act) : status;
}

Result<int> Ledger::join(const ClientOptions& options, int lock_fd, int memory_fd) {
  if (options.name.empty() || options.name.size() >= sizeof(ClientRecord::name)) {
    return failure(Code::invalid_argument, "a client name has 1 to 63 bytes");
  }
  if (options.min_bytes > options.limit_bytes) {
    return failure(Code::invalid_argument, "min_bytes is above limit_bytes; lower it");
  }
  KV_TRY(check_usable());
  const ProcessId self = this_process();
  for (const bool retry : {false, true}) {
    if (retry && !free_the_dead()) break;
    for (int slot = 0; slot < kMaxClients; ++slot) {
      if (std::atomic_ref(record(slot).used).load(std::memory_order_acquire) != 0) continue;
      if (!lock_byte(lock_fd, liveness_byte(slot), false).ok()) continue;
      step("join: the liveness byte is locked");
      Status claimed = grant_or_reap(
          [&, this] { return claim_record(*segment_, record(slot), options, self, memory_fd); });
      if (claimed.ok()) return slot;
      unlock_byte(lock_fd, liveness_byte(slot));
      if (claimed.code != Code::busy) return claimed;
    }
  }
  return failure(Code::too_many_clients, "all ", kMaxClients,
                 " client records are taken; close some");
}

Status Ledger::leave(int slot) {
  const LedgerLock guard = lock();
  if (guard.timed_out()) {
    lock_user_.defer({slot, record(slot).joined, nullptr, 0});
    return {};
  }
  vacate(*segment_, record(slot));
  return {};
}

std::optional<Ledger::Refusal> Ledger::try_reserve(int slot, uint64_t bytes) {
  ClientRecord& client = record(slot);
  if (const uint64_t free = room_for(*segment_, client); bytes > free) {
    return Refusal{free, free == above(client.limit_bytes, client.elastic_bytes())};
  }
  update(*segment_, client, [=](ClientRecord& c) { c.pending_bytes += bytes; });
  reduce_wanted(client, bytes);
  return {};
}

Status Ledger::reserve(int slot, uint64_t bytes) {
  std::optional<Refusal> refused;
  const auto attempt = [&, this] {
    refused = try_reserve(slot, bytes);
    return Status{};
  };
  KV_TRY(grant(attempt));
  if (!refused) return {};
  if (!refused->limited && free_the_dead(kProbeInterval)) {
    KV_TRY(grant(attempt));
    if (!refused) return {};
  }
  return no_room(bytes, refused->free_bytes,
                 refused->limited ? "the client is at its limit" : "the device is full");
}

Status Ledger::commit(int slot, uint64_t bytes) {
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  ClientRecord& client = record(slot);
  if (bytes > client.pending_bytes) return underflow("were reserved");
  client.committed_bytes += bytes;
  step("commit: counted twice");
  client.pending_bytes -= bytes;
  step("commit: done");
  return {};
}

Status Ledger::cancel(int slot, uint64_t bytes) {
  return give_back(slot, &ClientRecord::pending_bytes, bytes, "were reserved");
}

Status Ledger::release(int slot, uint64_t bytes) {
  return give_back(slot, &ClientRecord::committed_bytes, bytes, "were committed");
}

Status Ledger::give_back(int slot, uint64_t ClientRecord::* count, uint64_t bytes,
                         const char* what) {
  const LedgerLock guard = lock();
  if (guard.timed_out()) {
    lock_user_.defer({slot, record(slot).joined, count, bytes});
    return {};
  }
  if (bytes > record(slot).*count) return underflow(what);
  update(*segment_, record(slot), [=](ClientRecord& c) { c.*count -= bytes; });
  return {};
}

Result<uint64_t> Ledger::available(int slot, uint64_t given_back_bytes) {
  free_the_dead(kProbeInterval);
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  return room_after_release(*segment_, record(slot), given_back_bytes);
}

Status Ledger::reserve_static(int slot, uint64_t bytes) {
  return grant_or_reap([=, this] { return reserve_static_locked(slot, bytes); });
}

Status Ledger::reserve_static_locked(int slot, uint64_t bytes) {
  if (const uint64_t free = free_bytes_for(*segment_, record(slot)); bytes > free) {
    return no_room(bytes, free, "the device is full");
  }
  update(*segment_, record(slot), [=](ClientRecord& c) { c.static_bytes += bytes; });
  reduce_wanted(record(slot), bytes);
  return {};
}

Status Ledger::release_static(int slot, uint64_t bytes) {
  return give_back(slot, &ClientRecord::static_bytes, bytes, "were leased");
}

Status Ledger::set_limit_locked(LedgerLock& guard, int slot, uint64_t bytes) {
  ClientRecord& client = record(slot);
  if (bytes < client.min_bytes) {
    return failure(Code::invalid_argument, "limit_bytes is below min_bytes; lower the minimum");
  }
  if (bytes > client.limit_bytes) guard.announce_room();
  client.limit_bytes = bytes;
  step("limit: set");
  if (client.elastic_bytes() > bytes) guard.announce_ask(client);
  return {};
}

Status Ledger::set_min_locked(int slot, uint64_t bytes) {
  ClientRecord& client = record(slot);
  if (bytes > client.limit_bytes) {
    return failure(Code::invalid_argument, "min_bytes is above limit_bytes; raise the limit");
  }
  const uint64_t extra = above(bytes, std::max(client.min_bytes, client.elastic_bytes()));
  if (const uint64_t free = free_bytes_for(*segment_, client); extra > free) {
    return no_room(extra, free, "the minimum is not free");
  }
  update(*segment_, client, [=](ClientRecord& c) { c.min_bytes = bytes; });
  return {};
}

Status Ledger::set_limit(int slot, uint64_t bytes) {
  LedgerLock guard = lock();
  KV_TRY(guard.check());
  return set_limit_locked(guard, slot, bytes);
}

Status Ledger::set_min(int slot, uint64_t bytes) {
  return grant_or_reap([=, this] { return set_min_locked(slot, bytes); });
}

Status Ledger::set_limit(const ClientQuery& query, uint64_t bytes) {
  free_the_dead();
  LedgerLock guard = lock();
  KV_TRY(guard.check());
  Result<int> slot = find_client(*segment_, query);
  return slot.ok() ? set_limit_locked(guard, slot.value(), bytes) : slot.status();
}

Status Ledger::set_min(const ClientQuery& query, uint64_t bytes) {
  free_the_dead();
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  Result<int> slot = find_client(*segment_, query);
  return slot.ok() ? set_min_locked(slot.value(), bytes) : slot.status();
}

uint32_t Ledger::announce_sleeper() {
  std::atomic_ref(segment_->room).store(segment_->room | kSleepers);
  return segment_->room;
}

Result<std::optional<uint32_t>> Ledger::want(int slot, uint64_t bytes, bool is_static,
                                             int64_t until_ns) {
  free_the_dead();
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  ClientRecord& client = record(slot);
  if (client.wanted_since == 0) client.wanted_since = ++segment_->tickets;
  client.wanted_until_ns = until_ns;
  client.wanted_bytes = shared_part(*segment_, client, bytes, is_static);
  segment_->has_waiters = 1;
  step("wait: queued");
  const uint64_t free = is_static ? free_bytes_for(*segment_, client) : room_for(*segment_, client);
  if (bytes <= free) return std::optional<uint32_t>();
  const uint32_t seen = announce_sleeper();
  step("wait: about to sleep");
  return std::optional(seen);
}

void Ledger::sleep(uint32_t seen, int64_t until_ns) {
  futex_wait(&segment_->room, seen, std::min(until_ns, monotonic_ns() + kLookAgainNs));
}

void Ledger::end_wait(int slot) {
  LedgerLock guard = lock();
  if (!guard.held().ok() || record(slot).wanted_since == 0) return;
  record(slot).wanted_since = 0;
  step("wait: over");
  record(slot).wanted_bytes = 0;
  guard.announce_room();
}

Result<BalloonView> Ledger::balloon_view() {
  free_the_dead();
  BalloonView view{};
  view.slots.reserve(kMaxClients);
  view.clients.reserve(kMaxClients);
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  view.now_ns = monotonic_ns();
  view.asks = segment_->asks;
  view.free_bytes = free_bytes(*segment_);
  view.seen = announce_sleeper();
  for (int slot = 0; slot < kMaxClients; ++slot) {
    if (record(slot).used == 0) continue;
    view.slots.push_back(slot);
    view.clients.push_back(copy_of(record(slot)));
  }
  return view;
}

Result<std::vector<std::optional<uint32_t>>> Ledger::ask(std::span<const Ask> plan, uint64_t asks,
                                                         int64_t until_ns) {
  std::vector<std::optional<uint32_t>> numbers;
  numbers.reserve(plan.size());
  LedgerLock guard = lock();
  KV_TRY(guard.check());
  if (asks != segment_->asks) return failure(Code::busy, "another client has asked meanwhile");
  ++segment_->asks;
  step("ask: counted");
  for (const Ask& part : plan) {
    numbers.emplace_back();
    if (part.slot < 0 || part.slot >= kMaxClients) continue;
    ClientRecord& client = record(part.slot);
    if (client.used == 0 || client.joined != part.joined) continue;
    const bool adds = is_open(client) && monotonic_ns() < client.asked_until_ns;
    client.asked_bytes = capped_sum(adds ? client.asked_bytes : 0, part.bytes);
    client.asked_until_ns = std::max(adds ? client.asked_until_ns : 0, until_ns);
    guard.announce_ask(client);
    step("ask: posted");
    numbers.back() = client.asked;
  }
  return numbers;
}

bool Ledger::has_request(int slot) {
  const uint32_t asked = std::atomic_ref(record(slot).asked).load(std::memory_order_acquire);
  return asked != std::atomic_ref(record(slot).answered).load(std::memory_order_relaxed);
}

Result<std::optional<ShrinkRequest>> Ledger::shrink_request(int slot) {
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  ClientRecord& client = record(slot);
  if (!is_open(client)) return std::optional<ShrinkRequest>();
  const bool wanted = monotonic_ns() < client.asked_until_ns;
  const uint64_t over_limit = above(client.elastic_bytes(), client.limit_bytes);
  const uint64_t bytes = std::max(wanted ? client.asked_bytes : 0, over_limit);
  if (bytes > 0) return std::optional(ShrinkRequest{client.asked, bytes});
  client.asked_bytes = 0;
  std::atomic_ref(client.answered).store(client.asked);
  return std::optional<ShrinkRequest>();
}

Status Ledger::answer(int slot, const ShrinkRequest& request, const ShrinkAnswer& answer) {
  LedgerLock guard = lock();
  KV_TRY(guard.held());
  ClientRecord& client = record(slot);
  const bool asked_again = client.asked != request.number;
  client.asked_bytes = asked_again ? above(client.asked_bytes, request.bytes) : 0;
  client.given_bytes += answer.given_bytes;
  client.evicted_tokens += answer.evicted_tokens;
  client.evicted_bytes += answer.evicted_bytes;
  if (answer.given_bytes < request.bytes) client.ask_not_before_ns = monotonic_ns() + kAskPauseNs;
  step("answer: counted");
  std::atomic_ref(client.answered).store(request.number);
  step("answer: given");
  guard.announce_room();
  return {};
}

void Ledger::publish_evictable(int slot, uint64_t bytes) {
  std::atomic_ref(record(slot).evictable_bytes).store(bytes, std::memory_order_relaxed);
}

void Ledger::add_spare(int slot, int64_t bytes) {
  std::atomic_ref(record(slot).spare_bytes)
      .fetch_add(static_cast<uint64_t>(bytes), std::memory_order_relaxed);
}

void Ledger::touch(int slot) {
  std::atomic_ref(record(slot).active_ns).store(monotonic_ns(), std::memory_order_relaxed);
}

void Ledger::count_maps(int slot, uint64_t maps, uint64_t unmaps) {
  const LedgerLock guard = lock();
  if (!guard.check().ok()) return;
  record(slot).maps += maps;
  record(slot).unmaps += unmaps;
}

Result<ClientRecord> Ledger::client(int slot) {
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  return copy_of(record(slot));
}

// Reads the record without the lock. A record that is being claimed has its byte locked already.
bool Ledger::may_have_died(int slot) const {
  const std::atomic_ref used(segment_->clients[slot].used);
  return used.load(std::memory_order_acquire) != 0 &&
         !is_byte_locked(lock_user_.opening().fd, liveness_byte(slot));
}

void Ledger::look_at_file() {
  file_look_ns_ = monotonic_ns() + std::chrono::nanoseconds(kFileLookInterval).count();
  struct stat info = {};
  if (fstat(lock_user_.opening().fd, &info) != 0 || info.st_nlink > 0) return;
  LedgerLock guard = lock();
  if (!guard.check().ok()) return;
  segment_->destroyed = kFileRemoved;
  guard.announce_room();
}

bool Ledger::free_the_dead(std::chrono::nanoseconds at_most_every) {
  if (coarse_ns() >= file_look_ns_.load(std::memory_order_relaxed)) look_at_file();
  if (at_most_every.count() > 0) {
    const int64_t now_ns = monotonic_ns();
    if (now_ns - probed_ns_.load(std::memory_order_relaxed) < at_most_every.count()) return false;
    probed_ns_.store(now_ns, std::memory_order_relaxed);
  }
  return reap_dead() > 0;
}

// A byte that is not locked after its record was read is never again locked by that client.
std::vector<Ledger::Suspect> Ledger::find_dead() {
  std::vector<Suspect> found;
  for (int slot = 0; slot < kMaxClients; ++slot) {
    if (may_have_died(slot)) found.push_back({slot, 0, {}});
  }
  if (found.empty()) return found;
  {
    const LedgerLock guard = lock();
    if (!guard.check().ok()) return {};
    for (Suspect& suspect : found) {
      suspect.joined = record(suspect.slot).joined;
      suspect.owner = owner_of(record(suspect.slot));
    }
  }
  std::erase_if(found, [this](const Suspect& suspect) {
    return !may_have_died(suspect.slot) || !is_over(suspect.owner);
  });
  return found;
}

int Ledger::reap_dead() {
  const std::vector<Suspect> dead = find_dead();
  if (dead.empty()) return 0;
  const LedgerLock guard = lock();
  if (!guard.check().ok()) return 0;
  int reaped = 0;
  for (const Suspect& suspect : dead) {
    ClientRecord& client = record(suspect.slot);
    if (client.used == 0 || client.joined != suspect.joined) continue;
    vacate(*segment_, client);
    ++reaped;
  }
  return reaped;
}

Status Ledger::check_usable() {
  const LedgerLock guard = lock();
  return guard.check();
}

Result<int> Ledger::reap() {
  KV_TRY(check_usable());
  return reap_dead();
}

Result<LedgerUsage> Ledger::usage() {
  free_the_dead();
  LedgerUsage usage{capacity_bytes(), page_bytes(), 0, {}};
  usage.clients.reserve(kMaxClients);
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  usage.charged_bytes = segment_->charged_bytes;
  for (ClientRecord& client : segment_->clients) {
    if (client.used != 0) usage.clients.push_back(copy_of(client));
  }
  return usage;
}

bool Ledger::scan_is_over() const {
  const int64_t now_ns = monotonic_ns();
  return segment_->scan_until_ns <= now_ns || segment_->scan_until_ns > now_ns + kScanNs;
}

Result<int64_t> Ledger::begin_scan(std::vector<ClientRecord>* clients) {
  clients->clear();
  clients->reserve(kMaxClients);
  int64_t until_ns = 0;
  KV_TRY(grant([&] {
    until_ns = monotonic_ns() + kScanNs;
    segment_->scan_until_ns = until_ns;
    step("scan: begun");
    for (ClientRecord& client : segment_->clients) {
      if (client.used != 0) clients->push_back(copy_of(client));
    }
    return Status{};
  }));
  return until_ns;
}

Result<bool> Ledger::end_scan(int64_t until_ns) {
  const LedgerLock guard = lock();
  KV_TRY(guard.check());
  const bool mine = segment_->scan_until_ns == until_ns;
  if (mine) segment_->scan_until_ns = 0;
  return mine && monotonic_ns() < until_ns;
}

Result<uint64_t> Ledger::resident_bytes() {
  free_the_dead();
  std::vector<ClientRecord> clients;
  for (int attempt = 0; attempt < kScanAttempts; ++attempt) {
    KV_ASSIGN(int64_t until_ns, begin_scan(&clients));
    Result<uint64_t> total = sum_of_resident_bytes(clients);
    KV_ASSIGN(bool in_time, end_scan(until_ns));
    if (in_time || !total.ok()) return total;
  }
  return failure(Code::system_call, "each of ", kScanAttempts,
                 " scans of the clients' memory took too long; try again when the machine is less "
                 "busy");
}

Status Ledger::mark_destroyed(bool force) {
  LedgerLock guard = lock();
  KV_TRY(guard.check());
  const bool in_use = std::any_of(std::begin(segment_->clients), std::end(segment_->clients),
                                  [](const ClientRecord& client) { return client.used != 0; });
  if (in_use && !force) {
    return failure(Code::busy, "clients still hold memory of ", path_, "; close them first");
  }
  segment_->destroyed = kDestroyed;
  step("destroy: marked");
  guard.announce_room();
  return {};
}

Status Ledger::destroy(bool force) {
  Result<FileLock> file_lock = FileLock::take(path_);
  free_the_dead();
  if (Status marked = mark_destroyed(force); !marked.ok()) {
    return marked.code == Code::gone ? Status{} : marked;
  }
  // The path may be gone or hold a newer ledger by now; that one is not ours to remove.
  if (file_lock.ok() && is_still_at(lock_user_.opening().fd, path_) &&
      ::unlink(path_.c_str()) != 0 && errno != ENOENT) {
    return system_failure("unlink of the ledger", errno);
  }
  step("destroy: unlinked");
  return {};
}

}  // namespace kvcached
