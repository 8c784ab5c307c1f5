// The ledger's calls for those who wait for memory and those who are asked for some.
#include <algorithm>

#include "ledger_lock.h"

namespace kvcached {

namespace {

// A client that gave less than it was asked for is left alone for so long.
constexpr int64_t kAskPauseNs = 100'000'000;

bool is_open(const ClientRecord& client) { return client.asked != client.answered; }

void end_wait_of(ClientRecord& client) {
  client.wanted_since = 0;
  step("wait: over");
  client.wanted_bytes = 0;
}

}  // namespace

uint64_t Ledger::wanted_before(const ClientRecord& client) {
  if (segment_->has_waiters == 0) return 0;
  const int64_t now_ns = monotonic_ns();
  uint64_t wanted = 0;
  bool any = false;
  for (const ClientRecord& other : segment_->clients) {
    if (other.used == 0 || other.wanted_since == 0) continue;
    any = true;
    const bool before = client.wanted_since == 0 || other.wanted_since < client.wanted_since;
    if (before && now_ns < other.wanted_until_ns) wanted = capped_sum(wanted, other.wanted_bytes);
  }
  if (!any) segment_->has_waiters = 0;
  return wanted;
}

// What of a reservation has to come from memory that is guaranteed to no client; 0 if it can never
// come.
uint64_t Ledger::shared_part(const ClientRecord& client, uint64_t bytes, bool is_static) const {
  const uint64_t elastic = client.elastic_bytes();
  uint64_t fixed = client.static_bytes + (is_static ? elastic : 0);
  for (const ClientRecord& other : segment_->clients) {
    if (other.used != 0 && &other != &client) fixed += other.static_bytes + other.min_bytes;
  }
  if (!is_static && bytes > above(client.limit_bytes, elastic)) return 0;
  const uint64_t floor = is_static ? bytes : std::max(capped_sum(elastic, bytes), client.min_bytes);
  if (capped_sum(fixed, floor) > segment_->capacity_bytes) return 0;
  return is_static ? bytes : above(bytes, above(client.min_bytes, elastic));
}

void Ledger::wait_for_less(ClientRecord& client, uint64_t bytes) {
  if (client.wanted_bytes > 0) client.wanted_bytes = above(client.wanted_bytes, bytes);
}

uint32_t Ledger::sleep_on_locked() {
  std::atomic_ref(segment_->room).store(segment_->room | kSleepers);
  return segment_->room;
}

Result<std::optional<uint32_t>> Ledger::want(int slot, uint64_t bytes, bool is_static,
                                             int64_t until_ns) {
  free_the_dead();
  const Lock lock(*this);
  KV_TRY(lock.check());
  ClientRecord& client = record(slot);
  if (client.wanted_since == 0) client.wanted_since = ++segment_->tickets;
  client.wanted_until_ns = until_ns;
  client.wanted_bytes = shared_part(client, bytes, is_static);
  segment_->has_waiters = 1;
  step("wait: queued");
  const uint64_t free = is_static ? free_bytes_for(client) : room(client);
  if (bytes <= free) return std::optional<uint32_t>();
  const uint32_t seen = sleep_on_locked();
  step("wait: about to sleep");
  return std::optional(seen);
}

void Ledger::sleep(uint32_t seen, int64_t until_ns) {
  futex_wait(&segment_->room, seen, std::min(until_ns, monotonic_ns() + kLookAgainNs));
}

void Ledger::end_wait(int slot) {
  Lock lock(*this);
  if (!lock.held().ok() || record(slot).wanted_since == 0) return;
  end_wait_of(record(slot));
  lock.announce_room();
}

Result<BalloonView> Ledger::balloon_view() {
  free_the_dead();
  BalloonView view{};
  view.slots.reserve(kMaxClients);
  view.clients.reserve(kMaxClients);
  const Lock lock(*this);
  KV_TRY(lock.check());
  view.now_ns = monotonic_ns();
  view.asks = segment_->asks;
  view.free_bytes = free_bytes();
  view.seen = sleep_on_locked();
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
  Lock lock(*this);
  KV_TRY(lock.check());
  if (asks != segment_->asks) return failure(Code::busy, "somebody else has asked meanwhile");
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
    lock.announce_ask(client);
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
  const Lock lock(*this);
  KV_TRY(lock.check());
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
  Lock lock(*this);
  KV_TRY(lock.held());
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
  lock.announce_room();
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

}  // namespace kvcached
