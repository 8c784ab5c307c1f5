#include "ledger.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "ledger_lock.h"
#include "liveness.h"

namespace kvcached {

namespace {

Status underflow(const char* what) {
  return failure(Code::internal, "more bytes given back than ", what);
}

std::string describe(const ClientRecord& client) {
  return name_of(client) + " (pid " + std::to_string(client.pid) + ")";
}

void append(std::string* list, const std::string& item) {
  if (!list->empty()) *list += ", ";
  *list += item;
}

// All but `used`, which others read without the lock.
void clear(ClientRecord* client) {
  constexpr size_t kFirst = offsetof(ClientRecord, pid);
  memset(reinterpret_cast<char*>(client) + kFirst, 0, sizeof(ClientRecord) - kFirst);
}

}  // namespace

Result<std::shared_ptr<Ledger>> Ledger::open(const LedgerOptions& options) {
  KV_ASSIGN(LedgerFile file, open_ledger_file(options));
  std::shared_ptr<Ledger> ledger(new Ledger(options.path, file.opening, file.segment));
  KV_TRY(ledger->check_segment());
  return ledger;
}

Ledger::Ledger(std::string path, const Opening& opening, LedgerSegment* segment)
    : path_(std::move(path)), opening_(opening), segment_(segment) {
  guard_against_fork(this);
}

Status Ledger::check_segment() {
  const Lock lock(*this);
  KV_TRY(lock.held());
  return check_records(*segment_, path_);
}

Ledger::~Ledger() {
  unguard_against_fork(this);
  munmap(segment_, sizeof(LedgerSegment));
  ::close(opening_.fd);
}

// What the parent owes is not the child's to pay.
void Ledger::abandon_in_child() {
  owed_.clear();
  held_up_ = false;
  opening_ = reopen(opening_, segment_);
}

template <class Change>
void Ledger::update(ClientRecord& client, Change change) {
  const uint64_t before = client.charge_bytes();
  change(client);
  step("charge: in the record");
  segment_->charged_bytes = segment_->charged_bytes - before + client.charge_bytes();
  step("charge: in the total");
}

void Ledger::vacate(ClientRecord& client) {
  const uint64_t charge = client.charge_bytes();
  std::atomic_ref(client.used).store(0, std::memory_order_release);
  step("vacate: the record is free");
  segment_->charged_bytes -= charge;
  step("vacate: the total is less");
}

uint64_t Ledger::free_bytes() const {
  // A client that was killed inside commit can count twice until it is reaped.
  return above(segment_->capacity_bytes, segment_->charged_bytes);
}

uint64_t Ledger::free_bytes_for(const ClientRecord& client) {
  return above(free_bytes(), wanted_before(client));
}

uint64_t Ledger::room(const ClientRecord& client) {
  const uint64_t elastic = client.elastic_bytes();
  const uint64_t of_device = capped_sum(free_bytes_for(client), above(client.min_bytes, elastic));
  return std::min(above(client.limit_bytes, elastic), of_device);
}

Result<int> Ledger::open_lock_fd() const {
  const std::string path = "/proc/self/fd/" + std::to_string(opening_.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return system_failure("open of the ledger's lock", errno);
  return fd;
}

Status Ledger::claim_record(int slot, const ClientOptions& options, const ProcessId& self,
                            int memory_fd) {
  ClientRecord& client = record(slot);
  if (client.used != 0) return failure(Code::busy, "the record was taken meanwhile");
  clear(&client);
  if (const uint64_t free = free_bytes_for(client); options.min_bytes > free) {
    return no_room(options.min_bytes, free, "the minimum is not free on the device");
  }
  client.joined = ++segment_->tickets;
  client.active_ns = monotonic_ns();
  client.pid = self.pid;
  client.pid_namespace = self.pid_namespace;
  client.start_ticks = self.start_ticks;
  client.memory_fd = memory_fd;
  client.min_bytes = options.min_bytes;
  client.limit_bytes = options.limit_bytes;
  strncpy(client.name, options.name.c_str(), sizeof(client.name) - 1);
  step("join: the record is written");
  std::atomic_ref(client.used).store(1, std::memory_order_release);
  step("join: the record counts");
  segment_->charged_bytes += client.charge_bytes();
  step("join: the total counts it");
  return {};
}

template <class Attempt>
Status Ledger::without_the_dead(Attempt attempt) {
  Status status = while_nobody_looks(attempt);
  return status.code == Code::no_room && free_the_dead() ? while_nobody_looks(attempt) : status;
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
      Status claimed =
          without_the_dead([&, this] { return claim_record(slot, options, self, memory_fd); });
      if (claimed.ok()) return slot;
      unlock_byte(lock_fd, liveness_byte(slot));
      if (claimed.code != Code::busy) return claimed;
    }
  }
  return failure(Code::too_many_clients, "all ", kMaxClients,
                 " client records are taken; close some");
}

Status Ledger::leave(int slot) {
  const Lock lock(*this);
  if (lock.timed_out()) return owe(slot, nullptr, 0);
  KV_TRY(lock.held());
  vacate(record(slot));
  return {};
}

std::optional<Ledger::Refusal> Ledger::try_reserve(int slot, uint64_t bytes) {
  ClientRecord& client = record(slot);
  if (const uint64_t free = room(client); bytes > free) {
    return Refusal{free, free == above(client.limit_bytes, client.elastic_bytes())};
  }
  update(client, [=](ClientRecord& c) { c.pending_bytes += bytes; });
  wait_for_less(client, bytes);
  return {};
}

Status Ledger::reserve(int slot, uint64_t bytes) {
  std::optional<Refusal> refused;
  const auto attempt = [&, this] {
    refused = try_reserve(slot, bytes);
    return Status{};
  };
  KV_TRY(while_nobody_looks(attempt));
  if (!refused) return {};
  if (!refused->limited && free_the_dead(kProbeInterval)) {
    KV_TRY(while_nobody_looks(attempt));
    if (!refused) return {};
  }
  return no_room(bytes, refused->free_bytes,
                 refused->limited ? "the client is at its limit" : "the device is full");
}

Status Ledger::commit(int slot, uint64_t bytes) {
  const Lock lock(*this);
  KV_TRY(lock.check());
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
  const Lock lock(*this);
  if (lock.timed_out()) return owe(slot, count, bytes);
  KV_TRY(lock.held());
  if (bytes > record(slot).*count) return underflow(what);
  update(record(slot), [=](ClientRecord& c) { c.*count -= bytes; });
  return {};
}

Status Ledger::owe(int slot, uint64_t ClientRecord::* count, uint64_t bytes) {
  // Nobody sleeps on it: pay_owed would have to wake him, under the ledger's lock.
  std::unique_lock guard(owed_mutex_, std::defer_lock);
  while (!guard.try_lock()) std::this_thread::yield();
  owed_.push_back({slot, record(slot).joined, count, bytes});
  held_up_ = true;
  return {};
}

bool Ledger::pay_owed() {
  // Not waited for under the ledger's lock: a later call pays.
  const std::unique_lock guard(owed_mutex_, std::try_to_lock);
  if (!guard) held_up_ = true;
  if (!guard || owed_.empty()) return false;
  for (const auto& [slot, joined, count, bytes] : owed_) {
    ClientRecord& client = record(slot);
    if (client.used == 0 || client.joined != joined) continue;
    if (count == nullptr) {
      vacate(client);
    } else {
      const uint64_t paid = std::min(client.*count, bytes);
      update(client, [&](ClientRecord& c) { c.*count -= paid; });
    }
  }
  owed_.clear();
  return true;
}

Result<uint64_t> Ledger::available(int slot, uint64_t given_back_bytes) {
  free_the_dead(kProbeInterval);
  const Lock lock(*this);
  KV_TRY(lock.check());
  const ClientRecord& now = record(slot);
  const uint64_t elastic = above(now.elastic_bytes(), given_back_bytes);
  const uint64_t of_device =
      above(free_bytes() + now.charge_bytes(), now.static_bytes + std::max(elastic, now.min_bytes));
  const uint64_t shared = above(of_device, wanted_before(now));
  return std::min(above(now.limit_bytes, elastic), shared + above(now.min_bytes, elastic));
}

Status Ledger::reserve_static(int slot, uint64_t bytes) {
  return without_the_dead([=, this] { return reserve_static_locked(slot, bytes); });
}

Status Ledger::reserve_static_locked(int slot, uint64_t bytes) {
  if (const uint64_t free = free_bytes_for(record(slot)); bytes > free) {
    return no_room(bytes, free, "the device is full");
  }
  update(record(slot), [=](ClientRecord& c) { c.static_bytes += bytes; });
  wait_for_less(record(slot), bytes);
  return {};
}

Status Ledger::release_static(int slot, uint64_t bytes) {
  return give_back(slot, &ClientRecord::static_bytes, bytes, "were leased");
}

Status Ledger::set_limit_locked(Lock& lock, int slot, uint64_t bytes) {
  ClientRecord& client = record(slot);
  if (bytes < client.min_bytes) {
    return failure(Code::invalid_argument, "limit_bytes is below min_bytes; lower the minimum");
  }
  if (bytes > client.limit_bytes) lock.announce_room();
  client.limit_bytes = bytes;
  step("limit: set");
  if (client.elastic_bytes() > bytes) lock.announce_ask(client);
  return {};
}

Status Ledger::set_min_locked(int slot, uint64_t bytes) {
  ClientRecord& client = record(slot);
  if (bytes > client.limit_bytes) {
    return failure(Code::invalid_argument, "min_bytes is above limit_bytes; raise the limit");
  }
  const uint64_t extra = above(bytes, std::max(client.min_bytes, client.elastic_bytes()));
  if (const uint64_t free = free_bytes_for(client); extra > free) {
    return no_room(extra, free, "the minimum is not free");
  }
  update(client, [=](ClientRecord& c) { c.min_bytes = bytes; });
  return {};
}

Result<int> Ledger::find_locked(const ClientQuery& query) {
  int slot_found = -1;
  std::string found;
  std::string numbers;
  std::string all;
  for (int slot = 0; slot < kMaxClients; ++slot) {
    const ClientRecord& client = record(slot);
    if (client.used == 0) continue;
    append(&all, describe(client));
    if (query.name && *query.name != name_of(client)) continue;
    if (query.pid && *query.pid != client.pid) continue;
    if (query.joined && *query.joined != client.joined) continue;
    append(&found, describe(client));
    append(&numbers, std::to_string(client.joined));
    slot_found = slot_found < 0 ? slot : kMaxClients;
  }
  if (slot_found < 0) {
    return failure(Code::unknown_client,
                   "no such client; there " + (all.empty() ? "are none" : "are: " + all));
  }
  if (slot_found == kMaxClients) {
    return failure(Code::ambiguous_client, "several clients: ", found,
                   "; name one by its pid, or by its number: ", numbers);
  }
  return slot_found;
}

Status Ledger::set_limit(int slot, uint64_t bytes) {
  Lock lock(*this);
  KV_TRY(lock.check());
  return set_limit_locked(lock, slot, bytes);
}

Status Ledger::set_min(int slot, uint64_t bytes) {
  return without_the_dead([=, this] { return set_min_locked(slot, bytes); });
}

Status Ledger::set_limit(const ClientQuery& query, uint64_t bytes) {
  free_the_dead();
  Lock lock(*this);
  KV_TRY(lock.check());
  Result<int> slot = find_locked(query);
  return slot.ok() ? set_limit_locked(lock, slot.value(), bytes) : slot.status();
}

Status Ledger::set_min(const ClientQuery& query, uint64_t bytes) {
  free_the_dead();
  const Lock lock(*this);
  KV_TRY(lock.check());
  Result<int> slot = find_locked(query);
  return slot.ok() ? set_min_locked(slot.value(), bytes) : slot.status();
}

void Ledger::count_maps(int slot, uint64_t maps, uint64_t unmaps) {
  const Lock lock(*this);
  if (!lock.check().ok()) return;
  record(slot).maps += maps;
  record(slot).unmaps += unmaps;
}

Result<ClientRecord> Ledger::client(int slot) {
  const Lock lock(*this);
  KV_TRY(lock.check());
  return copy_of(record(slot));
}

Status Ledger::mark_destroyed(bool force) {
  Lock lock(*this);
  KV_TRY(lock.check());
  const bool in_use = std::any_of(std::begin(segment_->clients), std::end(segment_->clients),
                                  [](const ClientRecord& client) { return client.used != 0; });
  if (in_use && !force) {
    return failure(Code::busy, "clients still hold memory of ", path_, "; close them first");
  }
  segment_->destroyed = kDestroyed;
  step("destroy: marked");
  lock.announce_room();
  return {};
}

Status Ledger::destroy(bool force) {
  Result<FileLock> file_lock = FileLock::take(path_);
  free_the_dead();
  if (Status marked = mark_destroyed(force); !marked.ok()) {
    return marked.code == Code::gone ? Status{} : marked;
  }
  // The path may be gone or hold a newer ledger by now; that one is not ours to remove.
  if (file_lock.ok() && is_still_at(opening_.fd, path_) && ::unlink(path_.c_str()) != 0 &&
      errno != ENOENT) {
    return system_failure("unlink of the ledger", errno);
  }
  step("destroy: unlinked");
  return {};
}

}  // namespace kvcached
