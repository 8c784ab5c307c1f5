#include "scenarios.h"

#include <fcntl.h>
#include <unistd.h>

#include "futex.h"
#include "kv_cache.h"
#include "ledger_segment.h"
#include "subject.h"
#include "virtual_tensor.h"
#include "vmm_fault.h"

namespace kvcached::testing {

namespace {

constexpr int64_t kMillisecond = 1'000'000;

void nothing(World&) {}

std::shared_ptr<Ledger> attach(const World& world) {
  return value_of(Ledger::open({world.path, {}, {}}));
}

struct Subject {
  explicit Subject(const World& world, uint64_t min_bytes = 0)
      : vmm(std::make_shared<FaultVmm>(value_of(make_vmm(world.device, kPage)))),
        client(value_of(
            Client::open(attach(world), vmm, {.name = "subject", .min_bytes = min_bytes}))) {}

  std::shared_ptr<FaultVmm> vmm;  // each call of it is a step
  std::shared_ptr<Client> client;
};

// Takes blocks and touches all that is mapped.
std::vector<int64_t> alloc(Subject& subject, KvCache& cache, size_t count) {
  std::vector<int64_t> ids(count);
  CHECK_OK(cache.alloc(ids));
  touch(*subject.vmm, *cache.region());
  return ids;
}

void live_on_kv_pages(const World& world) {
  Subject subject(world, 4 * kPage);
  const auto cache = value_of(KvCache::create(subject.client, {{1, 1}, 16, 4, 1}));
  std::vector<int64_t> ids = alloc(subject, *cache, 27);
  const std::span<const int64_t> all = ids;
  CHECK_OK(cache->free(all.first(9)));
  CHECK_OK(cache->set_spare_pages(2, 4));
  CHECK_OK(cache->set_mapped_spares(2, 4));
  CHECK_OK(cache->free(all.subspan(9)));
  (void)value_of(cache->refill());
  (void)alloc(subject, *cache, 12);
  (void)value_of(cache->trim());
  CHECK_OK(cache->close());
  CHECK_OK(subject.client->close());
}

void live_on_tensors_and_static_memory(const World& world) {
  Subject subject(world);
  CHECK_OK(subject.client->reserve_static(3 * kPage + 5));
  CHECK_OK(subject.client->set_min(2 * kPage));
  CHECK_OK(subject.client->set_limit(9 * kPage));
  const auto tensor = value_of(VirtualTensor::create(subject.client, 16 * kPage));
  CHECK_OK(tensor->map(0, 3 * kPage));
  CHECK_OK(tensor->map(5 * kPage, 2 * kPage));
  CHECK_CODE(tensor->map(8 * kPage, 5 * kPage), Code::no_room);
  CHECK_OK(tensor->unmap(kPage, 2 * kPage));
  CHECK_OK(subject.client->release_static(3 * kPage));
  CHECK_OK(subject.client->set_min(0));
  CHECK_OK(subject.client->close());
}

// A failure of the backend after the reservation: cancelled, or rolled back.
void meet_failures(const World& world) {
  Subject subject(world);
  const auto cache = value_of(KvCache::create(subject.client, {{1, 1, 1}, 16, 4, 1}));
  std::vector<int64_t> ids(20);
  for (const size_t call : {1u, 2u, 3u, 4u}) {
    subject.vmm->fail_at(call);
    CHECK(!cache->alloc(ids).ok());
  }
  CHECK_OK(cache->alloc(ids));
  for (const size_t call : {1u, 2u}) {
    subject.vmm->fail_at(call);
    (void)cache->trim();
  }
  CHECK_OK(subject.client->close());
}

void dead_client_holds_all(World& world) { leave_a_dead_client(world.path, world.free_bytes()); }

void reap(const World& world) { (void)value_of(attach(world)->reap()); }

void reap_for_a_reservation(const World& world) {
  const auto ledger = attach(world);
  const Member member(ledger);
  CHECK_OK(ledger->reserve(member.slot, world.free_bytes()));
}

void reap_for_a_minimum(const World& world) {
  const auto ledger = attach(world);
  const Member member(ledger, {.name = "subject", .min_bytes = world.free_bytes()});
  CHECK_OK(ledger->set_min(member.slot, kPage));
}

void administrate(const World& world) {
  const auto ledger = attach(world);
  CHECK_OK(ledger->set_limit({.name = "held", .pid = {}}, 4 * kPage));
  CHECK_OK(ledger->set_min({.name = "held", .pid = {}}, 3 * kPage));
}

void held_has_old_or_new_bounds(World& world) {
  const ClientRecord record = value_of(world.ledger->client(world.held->slot));
  CHECK(record.limit_bytes == kNoLimit || record.limit_bytes == 4 * kPage);
  CHECK(record.min_bytes == 2 * kPage || record.min_bytes == 3 * kPage);
  CHECK_OK(world.ledger->set_min(world.held->slot, 2 * kPage));
  CHECK_OK(world.ledger->set_limit(world.held->slot, kNoLimit));
}

void wait_for_room(const World& world) {
  const auto ledger = attach(world);
  const Member member(ledger);
  const uint64_t bytes = world.free_bytes() + kPage;
  const int64_t until_ns = monotonic_ns() + kMillisecond;
  const std::optional<uint32_t> seen = value_of(ledger->want(member.slot, bytes, false, until_ns));
  if (seen) ledger->sleep(*seen, until_ns);
  ledger->end_wait(member.slot);
}

// Asks the client that this process of the world holds, then itself, and answers.
void ask_and_answer(const World& world) {
  const auto ledger = attach(world);
  const Member member(ledger);
  const int64_t until_ns = monotonic_ns() + 1000 * kMillisecond;
  const BalloonView view = value_of(ledger->balloon_view());
  std::vector<Ask> plan;
  for (size_t i = 0; i < view.slots.size(); ++i) {
    if (view.slots[i] != member.slot && view.slots[i] != world.held->slot) continue;
    plan.push_back({view.slots[i], view.clients[i].joined, kPage});
  }
  (void)value_of(ledger->ask(plan, view.asks, until_ns));
  const auto request = value_of(ledger->shrink_request(member.slot));
  if (request) CHECK_OK(ledger->answer(member.slot, *request, {}));
}

void held_answers(World& world) {
  const auto request = value_of(world.ledger->shrink_request(world.held->slot));
  if (request) CHECK_OK(world.ledger->answer(world.held->slot, *request, {}));
  CHECK(!world.ledger->has_request(world.held->slot));
}

void look(const World& world) { (void)value_of(attach(world)->resident_bytes()); }

void create_and_destroy(const World& world) {
  const auto ledger = value_of(Ledger::open({world.other_path, kCapacity, kPage}));
  {
    const Member member(ledger);
  }
  CHECK_OK(ledger->destroy(false));
}

void other_starts_whole(World& world) { check_starts_whole(world.other_path); }

void ledger_of_an_earlier_boot(World& world) {
  (void)value_of(Ledger::open({world.other_path, 2 * kCapacity, kPage}));
  const int fd = ::open(world.other_path.c_str(), O_RDWR);
  CHECK(pwrite(fd, "another boot", 12, offsetof(LedgerSegment, boot_id)) == 12);
  ::close(fd);
}

void a_client_of_another_ledger(World& world) {
  world.other = value_of(Ledger::open({world.other_path, kCapacity, kPage}));
  world.member = std::make_unique<Member>(world.other);
}

void destroy_by_force(const World& world) {
  CHECK_OK(value_of(Ledger::open({world.other_path, {}, {}}))->destroy(true));
}

void client_is_served_or_told(World& world) {
  const Status status = world.other->reserve(world.member->slot, kPage);
  CHECK(status.ok() || status.code == Code::gone);
  if (status.ok()) CHECK_OK(world.other->cancel(world.member->slot, kPage));
  world.member.reset();
  world.other.reset();
  check_starts_whole(world.other_path);
}

// Its mutex is left to the subject by one that died inside.
void a_ledger_to_repair(World& world) {
  a_client_of_another_ledger(world);
  CHECK_OK(world.other->reserve(world.member->slot, kPage));
  (void)run_subject(
      [&] {
        const auto ledger = value_of(Ledger::open({world.other_path, {}, {}}));
        const Member member(ledger);
        CHECK_OK(ledger->reserve(member.slot, kPage));
      },
      "charge: in the record");
}

void repair(const World& world) {
  CHECK(value_of(value_of(Ledger::open({world.other_path, {}, {}}))->usage()).charged_bytes ==
        kPage);
}

void repaired(World& world) {
  CHECK(value_of(world.other->usage()).charged_bytes == kPage);
  CHECK_OK(world.other->cancel(world.member->slot, kPage));
  client_is_served_or_told(world);
}

constexpr Scenario kScenarios[] = {
    {"KV pages", nothing, live_on_kv_pages, nothing},
    {"tensors and static memory", nothing, live_on_tensors_and_static_memory, nothing},
    {"failures of the backend", nothing, meet_failures, nothing},
    {"reap", dead_client_holds_all, reap, nothing},
    {"reap for a reservation", dead_client_holds_all, reap_for_a_reservation, nothing},
    {"reap for a minimum", dead_client_holds_all, reap_for_a_minimum, nothing},
    {"administrator", nothing, administrate, held_has_old_or_new_bounds},
    {"wait for room", nothing, wait_for_room, nothing},
    {"ask and answer", nothing, ask_and_answer, held_answers},
    {"look at what is resident", nothing, look, nothing},
    {"create and destroy", nothing, create_and_destroy, other_starts_whole},
    {"create over an earlier boot", ledger_of_an_earlier_boot, create_and_destroy,
     other_starts_whole},
    {"destroy under a client", a_client_of_another_ledger, destroy_by_force,
     client_is_served_or_told},
    {"repair the mutex", a_ledger_to_repair, repair, repaired},
};

}  // namespace

std::span<const Scenario> scenarios() { return kScenarios; }

}  // namespace kvcached::testing
