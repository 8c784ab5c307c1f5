// Who of a ledger's clients is still there, and what they hold.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "ledger_lock.h"
#include "liveness.h"

namespace kvcached {

namespace {

ProcessId owner_of(const ClientRecord& client) {
  return {client.pid, client.pid_namespace, client.start_ticks};
}

}  // namespace

Result<uint64_t> resident_bytes(const ClientRecord& client) {
  if (client.memory_fd < 0) return uint64_t{client.committed_bytes};
  return resident_bytes(owner_of(client), client.memory_fd);
}

std::string name_of(const ClientRecord& client) {
  return {client.name, strnlen(client.name, sizeof(client.name))};
}

bool Ledger::is_alive(int slot) const {
  return is_byte_locked(fd_, liveness_byte(slot)) || !is_over(owner_of(segment_->clients[slot]));
}

// Read without the mutex: a record that is being made has its byte locked already.
bool Ledger::may_have_died(int slot) const {
  const std::atomic_ref used(segment_->clients[slot].used);
  return used.load(std::memory_order_acquire) != 0 && !is_byte_locked(fd_, liveness_byte(slot));
}

bool Ledger::free_the_dead(std::chrono::nanoseconds at_most_every) {
  if (at_most_every.count() > 0) {
    const int64_t now_ns = monotonic_ns();
    if (now_ns - probed_ns_.load(std::memory_order_relaxed) < at_most_every.count()) return false;
    probed_ns_.store(now_ns, std::memory_order_relaxed);
  }
  bool suspected = false;
  for (int slot = 0; slot < kMaxClients && !suspected; ++slot) suspected = may_have_died(slot);
  if (!suspected) return false;
  const Lock lock(*segment_);
  return lock.check().ok() && reap_locked() > 0;
}

int Ledger::reap_locked() {
  int reaped = 0;
  for (int slot = 0; slot < kMaxClients; ++slot) {
    ClientRecord& client = record(slot);
    if (client.used == 0 || is_alive(slot)) continue;
    vacate(client);
    ++reaped;
  }
  return reaped;
}

Result<int> Ledger::reap() {
  const Lock lock(*segment_);
  if (Status status = lock.check(); !status.ok()) return status;
  return reap_locked();
}

Result<LedgerUsage> Ledger::usage() {
  free_the_dead();
  const Lock lock(*segment_);
  if (Status status = lock.check(); !status.ok()) return status;
  LedgerUsage usage{capacity_bytes(), page_bytes(), segment_->charged_bytes, {}};
  for (ClientRecord& client : segment_->clients) {
    if (client.used != 0) usage.clients.push_back(copy_of(client));
  }
  return usage;
}

Result<uint64_t> Ledger::resident_bytes() {
  free_the_dead();
  const Lock lock(*segment_);
  if (Status status = lock.check(); !status.ok()) return status;
  uint64_t total = 0;
  for (const ClientRecord& client : segment_->clients) {
    if (client.used == 0) continue;
    Result<uint64_t> bytes = kvcached::resident_bytes(client);
    if (!bytes.ok()) return bytes;
    total += bytes.value();
  }
  return total;
}

}  // namespace kvcached
