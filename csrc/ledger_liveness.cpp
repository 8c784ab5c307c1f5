// Who of a ledger's clients is still there, and what they hold.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#include "ledger_lock.h"
#include "liveness.h"

namespace kvcached {

namespace {

constexpr int kLooks = 20;

ProcessId owner_of(const ClientRecord& client) {
  return {client.pid, client.pid_namespace, client.start_ticks};
}

Result<uint64_t> bytes_behind(const ClientRecord& client, uint64_t pid_namespace) {
  if (client.memory_fd < 0) return uint64_t{client.committed_bytes};
  return resident_bytes(owner_of(client), client.memory_fd, pid_namespace);
}

// Reservations wait for this: the namespace is read once for all clients.
Result<uint64_t> sum_of_resident_bytes(std::span<const ClientRecord> clients) {
  const uint64_t pid_namespace = this_pid_namespace();
  uint64_t total = 0;
  for (const ClientRecord& client : clients) {
    KV_ASSIGN(uint64_t bytes, bytes_behind(client, pid_namespace));
    total += bytes;
  }
  return total;
}

}  // namespace

Status held_up_by(const LedgerSegment& segment) {
  const LockHolder holder = holder_of(segment.lock);
  if (!holder.held) {
    return failure(Code::corrupt, "the ledger was locked for too long; it is free now: try again");
  }
  if (!holder.known) {
    return failure(Code::corrupt,
                   "the ledger is locked by a process that has not left its number; find one that "
                   "is stopped and let it go on or end it. If there is none the ledger is damaged: "
                   "stop all engines of the device and unlink it");
  }
  const std::string pid = std::to_string(holder.pid);
  if (holder.pid_namespace != this_pid_namespace()) {
    return failure(Code::corrupt, "the ledger has been locked for too long by process ", pid,
                   " of another pid namespace (a container's); let it go on or end it there");
  }
  const bool stopped = is_stopped(holder.pid);
  return failure(Code::corrupt, "the ledger has been locked for too long by process ", pid,
                 stopped ? ", which is stopped inside; let it go on (kill -CONT "
                         : ", which does not go on; wait for it or end it (kill -9 ",
                 pid, stopped ? ") or end it (kill -9 " + pid + ")" : std::string(")"));
}

Result<uint64_t> resident_bytes(const ClientRecord& client) {
  return bytes_behind(client, this_pid_namespace());
}

std::string name_of(const ClientRecord& client) {
  return {client.name, strnlen(client.name, sizeof(client.name))};
}

// Read without the lock: a record that is being made has its byte locked already.
bool Ledger::may_have_died(int slot) const {
  const std::atomic_ref used(segment_->clients[slot].used);
  return used.load(std::memory_order_acquire) != 0 &&
         !is_byte_locked(opening_.fd, liveness_byte(slot));
}

void Ledger::look_at_file() {
  file_look_ns_ = monotonic_ns() + std::chrono::nanoseconds(kFileLookInterval).count();
  struct stat info = {};
  if (fstat(opening_.fd, &info) != 0 || info.st_nlink > 0) return;
  Lock lock(*this);
  if (!lock.check().ok()) return;
  segment_->destroyed = kFileRemoved;
  lock.announce_room();
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

// A byte that is not locked after its record was read is that client's no more, and never will be.
std::vector<Ledger::Suspect> Ledger::find_dead() {
  std::vector<Suspect> found;
  for (int slot = 0; slot < kMaxClients; ++slot) {
    if (may_have_died(slot)) found.push_back({slot, 0, {}});
  }
  if (found.empty()) return found;
  {
    const Lock lock(*this);
    if (!lock.check().ok()) return {};
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
  const Lock lock(*this);
  if (!lock.check().ok()) return 0;
  int reaped = 0;
  for (const Suspect& suspect : dead) {
    ClientRecord& client = record(suspect.slot);
    if (client.used == 0 || client.joined != suspect.joined) continue;
    vacate(client);
    ++reaped;
  }
  return reaped;
}

Status Ledger::check_usable() {
  const Lock lock(*this);
  return lock.check();
}

Result<int> Ledger::reap() {
  KV_TRY(check_usable());
  return reap_dead();
}

Result<LedgerUsage> Ledger::usage() {
  free_the_dead();
  LedgerUsage usage{capacity_bytes(), page_bytes(), 0, {}};
  usage.clients.reserve(kMaxClients);
  const Lock lock(*this);
  KV_TRY(lock.check());
  usage.charged_bytes = segment_->charged_bytes;
  for (ClientRecord& client : segment_->clients) {
    if (client.used != 0) usage.clients.push_back(copy_of(client));
  }
  return usage;
}

bool Ledger::look_is_over() const {
  const int64_t now_ns = monotonic_ns();
  return segment_->look_until_ns <= now_ns || segment_->look_until_ns > now_ns + kLookNs;
}

Result<int64_t> Ledger::begin_look(std::vector<ClientRecord>* clients) {
  clients->clear();
  clients->reserve(kMaxClients);
  int64_t until_ns = 0;
  KV_TRY(while_nobody_looks([&] {
    until_ns = monotonic_ns() + kLookNs;
    segment_->look_until_ns = until_ns;
    step("look: begun");
    for (ClientRecord& client : segment_->clients) {
      if (client.used != 0) clients->push_back(copy_of(client));
    }
    return Status{};
  }));
  return until_ns;
}

Result<bool> Ledger::end_look(int64_t until_ns) {
  const Lock lock(*this);
  KV_TRY(lock.check());
  const bool mine = segment_->look_until_ns == until_ns;
  if (mine) segment_->look_until_ns = 0;
  return mine && monotonic_ns() < until_ns;
}

Result<uint64_t> Ledger::resident_bytes() {
  free_the_dead();
  std::vector<ClientRecord> clients;
  for (int look = 0; look < kLooks; ++look) {
    KV_ASSIGN(int64_t until_ns, begin_look(&clients));
    Result<uint64_t> total = sum_of_resident_bytes(clients);
    KV_ASSIGN(bool in_time, end_look(until_ns));
    if (in_time || !total.ok()) return total;
  }
  return failure(Code::system_call, "this process was held up at each of ", kLooks,
                 " looks at the clients' memory; look again when the machine has less to do");
}

}  // namespace kvcached
