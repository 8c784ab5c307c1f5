#include "ledger_records.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "futex.h"

namespace kvcached {

namespace {

std::string describe(const ClientRecord& client) {
  return name_of(client) + " (pid " + std::to_string(client.pid) + ")";
}

void append(std::string* list, const std::string& item) {
  if (!list->empty()) *list += ", ";
  *list += item;
}

bool matches(const ClientRecord& client, const ClientQuery& query) {
  return (!query.name || *query.name == name_of(client)) &&
         (!query.pid || *query.pid == client.pid) &&
         (!query.joined || *query.joined == client.joined);
}

// All but `used`, which others read without the lock.
void clear(ClientRecord* client) {
  constexpr size_t kFirst = offsetof(ClientRecord, pid);
  memset(reinterpret_cast<char*>(client) + kFirst, 0, sizeof(ClientRecord) - kFirst);
}

}  // namespace

uint64_t total_charge(const LedgerSegment& segment) {
  uint64_t total = 0;
  for (const ClientRecord& client : segment.clients) {
    if (client.used != 0) total += client.charge_bytes();
  }
  return total;
}

uint64_t wanted_before(LedgerSegment& segment, const ClientRecord& client) {
  if (segment.has_waiters == 0) return 0;
  const int64_t now_ns = monotonic_ns();
  uint64_t wanted = 0;
  bool any = false;
  for (const ClientRecord& other : segment.clients) {
    if (other.used == 0 || other.wanted_since == 0) continue;
    any = true;
    const bool before = client.wanted_since == 0 || other.wanted_since < client.wanted_since;
    if (before && now_ns < other.wanted_until_ns) wanted = capped_sum(wanted, other.wanted_bytes);
  }
  if (!any) segment.has_waiters = 0;
  return wanted;
}

uint64_t room_after_release(LedgerSegment& segment, const ClientRecord& client,
                            uint64_t given_back_bytes) {
  const uint64_t elastic = above(client.elastic_bytes(), given_back_bytes);
  const uint64_t of_device = above(free_bytes(segment) + client.charge_bytes(),
                                   client.static_bytes + std::max(elastic, client.min_bytes));
  const uint64_t shared = above(of_device, wanted_before(segment, client));
  return std::min(above(client.limit_bytes, elastic), shared + above(client.min_bytes, elastic));
}

uint64_t shared_part(const LedgerSegment& segment, const ClientRecord& client, uint64_t bytes,
                     bool is_static) {
  const uint64_t elastic = client.elastic_bytes();
  uint64_t fixed = client.static_bytes + (is_static ? elastic : 0);
  for (const ClientRecord& other : segment.clients) {
    if (other.used != 0 && &other != &client) fixed += other.static_bytes + other.min_bytes;
  }
  if (!is_static && bytes > above(client.limit_bytes, elastic)) return 0;
  const uint64_t floor = is_static ? bytes : std::max(capped_sum(elastic, bytes), client.min_bytes);
  if (capped_sum(fixed, floor) > segment.capacity_bytes) return 0;
  return is_static ? bytes : above(bytes, above(client.min_bytes, elastic));
}

Status claim_record(LedgerSegment& segment, ClientRecord& client, const ClientOptions& options,
                    const ProcessId& owner, int memory_fd) {
  if (client.used != 0) return failure(Code::busy, "the record was taken meanwhile");
  clear(&client);
  if (const uint64_t free = free_bytes_for(segment, client); options.min_bytes > free) {
    return no_room(options.min_bytes, free, "the minimum is not free on the device");
  }
  client.joined = ++segment.tickets;
  client.active_ns = monotonic_ns();
  client.pid = owner.pid;
  client.pid_namespace = owner.pid_namespace;
  client.start_ticks = owner.start_ticks;
  client.memory_fd = memory_fd;
  client.min_bytes = options.min_bytes;
  client.limit_bytes = options.limit_bytes;
  strncpy(client.name, options.name.c_str(), sizeof(client.name) - 1);
  step("join: the record is written");
  std::atomic_ref(client.used).store(1, std::memory_order_release);
  step("join: the record counts");
  segment.charged_bytes += client.charge_bytes();
  step("join: the total counts it");
  return {};
}

void vacate(LedgerSegment& segment, ClientRecord& client) {
  const uint64_t charge = client.charge_bytes();
  std::atomic_ref(client.used).store(0, std::memory_order_release);
  step("vacate: the record is free");
  segment.charged_bytes -= charge;
  step("vacate: the total is less");
}

Result<int> find_client(const LedgerSegment& segment, const ClientQuery& query) {
  int found_slot = -1;
  std::string found;
  std::string numbers;
  std::string all;
  for (int slot = 0; slot < kMaxClients; ++slot) {
    const ClientRecord& client = segment.clients[slot];
    if (client.used == 0) continue;
    append(&all, describe(client));
    if (!matches(client, query)) continue;
    append(&found, describe(client));
    append(&numbers, std::to_string(client.joined));
    found_slot = found_slot < 0 ? slot : kMaxClients;
  }
  if (found_slot < 0) {
    return failure(Code::unknown_client,
                   "no such client; there " + (all.empty() ? "are none" : "are: " + all));
  }
  if (found_slot == kMaxClients) {
    return failure(Code::ambiguous_client, "several clients: ", found,
                   "; name one by its pid, or by its number: ", numbers);
  }
  return found_slot;
}

ClientRecord copy_of(ClientRecord& record) {
  ClientRecord copy;
  constexpr size_t begin = offsetof(ClientRecord, spare_bytes);
  constexpr size_t end = offsetof(ClientRecord, evicted_tokens);
  const auto* from = reinterpret_cast<const char*>(&record);
  auto* to = reinterpret_cast<char*>(&copy);
  std::memcpy(to, from, begin);
  std::memcpy(to + end, from + end, sizeof(ClientRecord) - end);
  copy.spare_bytes = std::atomic_ref(record.spare_bytes).load(std::memory_order_relaxed);
  copy.evictable_bytes = std::atomic_ref(record.evictable_bytes).load(std::memory_order_relaxed);
  copy.active_ns = std::atomic_ref(record.active_ns).load(std::memory_order_relaxed);
  return copy;
}

Status no_room(uint64_t need, uint64_t free, const char* why) {
  // One allocation, which is most of the cost of a refusal on a full device.
  std::string message;
  message.reserve(128);
  message.append("need ").append(std::to_string(need)).append(" bytes, ");
  message.append(std::to_string(free)).append(" free: ").append(why);
  return {Code::no_room, std::move(message), need, free};
}

}  // namespace kvcached
