#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "futex.h"
#include "ledger_fixture.h"
#include "ledger_lock.h"
#include "ledger_segment.h"
#include "segments.h"

namespace kvcached::testing {

namespace {

void a_lease_is_reserved_committed_or_cancelled() {
  Fixture f;
  Member a(f.ledger);
  CHECK_OK(f.ledger->reserve(a.slot, 10 * kPage));
  CHECK(f.charged() == 10 * kPage);
  CHECK_OK(f.ledger->commit(a.slot, 4 * kPage));
  CHECK_OK(f.ledger->cancel(a.slot, 6 * kPage));
  CHECK(f.charged() == 4 * kPage);
  CHECK_CODE(f.ledger->commit(a.slot, kPage), Code::internal);
  CHECK_CODE(f.ledger->cancel(a.slot, kPage), Code::internal);
  CHECK_CODE(f.ledger->release(a.slot, 5 * kPage), Code::internal);
  CHECK_OK(f.ledger->release(a.slot, 4 * kPage));
  CHECK(f.charged() == 0);
}

void a_minimum_is_kept_from_others_and_a_limit_from_its_client() {
  Fixture f;
  Member a(f.ledger, {.name = "a", .min_bytes = 30 * kPage});
  Member b(f.ledger, {.name = "b", .limit_bytes = 80 * kPage});
  CHECK(value_of(f.ledger->available(b.slot)) == 70 * kPage);
  CHECK(value_of(f.ledger->available(a.slot)) == 100 * kPage);
  const Status refused = f.ledger->reserve(b.slot, 71 * kPage);
  CHECK(refused.code == Code::no_room);
  CHECK(refused.need_bytes == 71 * kPage && refused.free_bytes == 70 * kPage);
  CHECK_OK(f.ledger->reserve(b.slot, 70 * kPage));
  CHECK_OK(f.ledger->reserve(a.slot, 30 * kPage));
  CHECK_CODE(f.ledger->reserve(a.slot, kPage), Code::no_room);
  CHECK_OK(f.ledger->set_min(a.slot, 0));
  CHECK_OK(f.ledger->cancel(a.slot, 30 * kPage));
  CHECK(value_of(f.ledger->available(b.slot)) == 10 * kPage);  // its limit
  CHECK_OK(f.ledger->set_limit(b.slot, 50 * kPage));           // below what it holds
  CHECK(value_of(f.ledger->available(b.slot)) == 0);
  CHECK_OK(f.ledger->set_limit(b.slot, kNoLimit));
  CHECK(value_of(f.ledger->available(b.slot)) == 30 * kPage);
  CHECK_CODE(f.ledger->set_min(b.slot, 101 * kPage), Code::no_room);
  CHECK_OK(f.ledger->set_min(b.slot, 100 * kPage));
  CHECK_CODE(f.ledger->set_limit(b.slot, kPage), Code::invalid_argument);
}

void an_administrator_finds_clients_by_name_and_pid() {
  Fixture f;
  Member a(f.ledger, {.name = "a"});
  Member twin(f.ledger, {.name = "twin"});
  Member other_twin(f.ledger, {.name = "twin", .limit_bytes = 90 * kPage});
  const std::shared_ptr<Ledger> admin = value_of(Ledger::open({f.path, {}, {}}));
  CHECK_OK(admin->set_limit({.name = "a", .pid = {}}, 10 * kPage));
  CHECK(value_of(f.ledger->available(a.slot)) == 10 * kPage);
  CHECK_CODE(f.ledger->reserve(a.slot, 11 * kPage), Code::no_room);
  CHECK_OK(admin->set_limit({.name = "a", .pid = getpid()}, kNoLimit));
  CHECK_OK(admin->set_min({.name = "a", .pid = {}}, 60 * kPage));
  CHECK(value_of(f.ledger->available(twin.slot)) == 40 * kPage);
  CHECK_CODE(admin->set_min({.name = "b", .pid = {}}, 0), Code::unknown_client);
  CHECK_CODE(admin->set_min({.name = "a", .pid = 1}, 0), Code::unknown_client);
  CHECK_CODE(admin->set_limit({.name = "twin", .pid = {}}, 0), Code::ambiguous_client);
  CHECK_CODE(admin->set_limit({.name = {}, .pid = getpid()}, 0), Code::ambiguous_client);
  CHECK(value_of(f.ledger->available(other_twin.slot)) == 40 * kPage);
}

void a_segment_is_stale_once_nobody_has_it_open() {
  const std::string path = fresh_ledger_path();
  CHECK_CODE(inspect_segment(path).status(), Code::unknown_device);
  CHECK(!value_of(remove_if_stale(path)));
  {
    const std::shared_ptr<Ledger> open = value_of(Ledger::open({path, kCapacity, kPage}));
    CHECK(value_of(inspect_segment(path)).stale_reason.empty());
    const Member member(open, {.name = "member"});
    const SegmentReport report = value_of(inspect_segment(path));
    CHECK(report.clients.size() == 1 && report.clients[0].alive);
    CHECK(report.version == kLedgerVersion && report.capacity_bytes == kCapacity);
    CHECK(!value_of(remove_if_stale(path)));
  }
  CHECK(!value_of(inspect_segment(path)).stale_reason.empty());
  CHECK(value_of(remove_if_stale(path)));
  CHECK(access(path.c_str(), F_OK) != 0);
}

void static_memory_counts_beside_pages() {
  Fixture f;
  Member a(f.ledger, {.name = "a", .limit_bytes = 10 * kPage});
  CHECK_OK(f.ledger->reserve_static(a.slot, 95 * kPage + 1));
  CHECK_CODE(f.ledger->reserve_static(a.slot, 5 * kPage), Code::no_room);
  CHECK_CODE(f.ledger->reserve(a.slot, 5 * kPage), Code::no_room);
  CHECK_OK(f.ledger->reserve(a.slot, 4 * kPage));
  CHECK_CODE(f.ledger->release_static(a.slot, 96 * kPage), Code::internal);
  CHECK_OK(f.ledger->release_static(a.slot, 95 * kPage + 1));
  CHECK(f.charged() == 4 * kPage);
}

void every_record_can_be_taken_and_no_more() {
  Fixture f;
  std::vector<std::unique_ptr<Member>> members;
  for (int i = 0; i < kMaxClients; ++i) members.push_back(std::make_unique<Member>(f.ledger));
  const int lock_fd = value_of(f.ledger->open_lock_fd());
  CHECK_CODE(f.ledger->join({.name = "late"}, lock_fd, -1).status(), Code::too_many_clients);
  CHECK_CODE(f.ledger->join({.name = ""}, lock_fd, -1).status(), Code::invalid_argument);
  members.pop_back();
  CHECK(value_of(f.ledger->join({.name = "late"}, lock_fd, -1)) == kMaxClients - 1);
  CHECK_OK(f.ledger->leave(kMaxClients - 1));
  ::close(lock_fd);
}

// The worst moment: the mutex is held, and the record and the total differ.
void a_death_inside_the_mutex_is_repaired() {
  Fixture f;
  Member survivor(f.ledger);
  CHECK_OK(f.ledger->reserve(survivor.slot, 10 * kPage));
  const pid_t child = fork();
  if (child == 0) {
    auto ledger = value_of(Ledger::open({f.path, {}, {}}));
    Member victim(ledger);
    CHECK_OK(ledger->reserve(victim.slot, 20 * kPage));
    LedgerSegment* segment = hold_lock(f.path);
    segment->clients[victim.slot].pending_bytes += 5 * kPage;
    segment->charged_bytes = 12345;
    _exit(0);
  }
  int outcome = 0;
  CHECK(waitpid(child, &outcome, 0) == child && WEXITSTATUS(outcome) == 0);
  const LedgerUsage usage = value_of(f.ledger->usage());
  CHECK(usage.charged_bytes == 10 * kPage);
  CHECK(usage.clients.size() == 1);
}

// A scan delays grants no longer than a scan may take, whatever the segment says.
void nothing_is_granted_while_somebody_looks() {
  Fixture f;
  const Member member(f.ledger);
  LedgerSegment* segment = map_directly(f.path);
  const int64_t until_ns = monotonic_ns() + 30'000'000;
  segment->scan_until_ns = until_ns;
  CHECK_OK(f.ledger->reserve(member.slot, kPage));
  CHECK(monotonic_ns() >= until_ns);
  segment->scan_until_ns = INT64_MAX;
  CHECK_OK(f.ledger->reserve_static(member.slot, kPage));
  CHECK(value_of(f.ledger->resident_bytes()) == 0);
  CHECK(segment->scan_until_ns == 0);
}

// Reserves everything and dies.
void die_holding(const std::string& path, uint64_t bytes) {
  const pid_t child = fork();
  if (child == 0) {
    auto ledger = value_of(Ledger::open({path, {}, {}}));
    Member victim(ledger);
    CHECK_OK(ledger->reserve(victim.slot, bytes));
    _exit(0);
  }
  int outcome = 0;
  CHECK(waitpid(child, &outcome, 0) == child && WEXITSTATUS(outcome) == 0);
}

// Refusals look for dead clients at most once in kProbeInterval. The next one finds the room.
void a_death_is_seen_by_the_first_refusal_after_the_interval() {
  Fixture f;
  Member survivor(f.ledger);
  for (int round = 0; round < 20; ++round) {
    CHECK_CODE(f.ledger->reserve(survivor.slot, kCapacity + kPage), Code::no_room);
    die_holding(f.path, kCapacity);
    std::this_thread::sleep_for(kProbeInterval);
    CHECK_OK(f.ledger->reserve(survivor.slot, kCapacity));
    CHECK_OK(f.ledger->cancel(survivor.slot, kCapacity));
  }
}

// Constant refusals do not delay it.
void room_of_the_dead_is_found_by_one_who_never_stops_asking() {
  Fixture f;
  Member survivor(f.ledger);
  die_holding(f.path, kCapacity);
  Status status = f.ledger->reserve(survivor.slot, kCapacity);
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
       status.code == Code::no_room && std::chrono::steady_clock::now() < end;) {
    status = f.ledger->reserve(survivor.slot, kCapacity);
  }
  CHECK_OK(status);
}

// Calls that ask for the state look every time.
void a_death_is_seen_by_available_and_usage_at_once() {
  Fixture f;
  Member survivor(f.ledger);
  for (int round = 0; round < 5; ++round) {
    die_holding(f.path, kCapacity);
    CHECK(value_of(f.ledger->available(survivor.slot)) == kCapacity);
    die_holding(f.path, kCapacity);
    CHECK(f.charged() == 0);
  }
}

// A cleaner of /dev/shm removes it under clients: the next process makes a second ledger.
void a_ledger_whose_file_was_removed_grants_nothing() {
  Fixture f;
  Member a(f.ledger);
  const std::shared_ptr<Ledger> other = value_of(Ledger::open({f.path, {}, {}}));
  Member b(other);
  CHECK_OK(f.ledger->reserve(a.slot, 2 * kPage));
  CHECK_OK(other->reserve(b.slot, kPage));
  CHECK(unlink(f.path.c_str()) == 0);
  const std::shared_ptr<Ledger> second = value_of(Ledger::open({f.path, kCapacity, kPage}));
  std::this_thread::sleep_for(2 * kFileLookInterval);
  const Status refused = f.ledger->reserve(a.slot, kPage);
  CHECK(refused.code == Code::gone);
  CHECK(refused.message.find("RemoveIPC") != std::string::npos);
  CHECK(other->usage().status().message == refused.message);
  CHECK_CODE(other->join({.name = "late"}, a.lock_fd, -1).status(), Code::gone);
  CHECK_CODE(f.ledger->commit(a.slot, kPage), Code::gone);
  CHECK_OK(f.ledger->cancel(a.slot, 2 * kPage));
  CHECK_OK(f.ledger->destroy(false));  // not of the second one
  CHECK(value_of(second->usage()).charged_bytes == 0);
  CHECK_OK(second->destroy(false));
}

void a_destroyed_ledger_grants_nothing() {
  Fixture f;
  Member a(f.ledger);
  CHECK_CODE(f.ledger->destroy(false), Code::busy);
  CHECK_OK(f.ledger->reserve(a.slot, kPage));
  CHECK_OK(f.ledger->destroy(true));
  CHECK_CODE(f.ledger->reserve(a.slot, kPage), Code::gone);
  CHECK_OK(f.ledger->cancel(a.slot, kPage));
  CHECK_CODE(Ledger::open({f.path, {}, {}}).status(), Code::unknown_device);
  // A new one at the same path is not removed by the old one's owner.
  auto next = value_of(Ledger::open({f.path, kCapacity, kPage}));
  CHECK_OK(f.ledger->destroy(true));
  CHECK_OK(Ledger::open({f.path, {}, {}}).ok() ? Status{} : failure(Code::internal, "removed"));
  CHECK_OK(next->destroy(false));
}

void threads_never_take_more_than_there_is() {
  Fixture f;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&f] {
      Member member(f.ledger);
      for (int step = 0; step < 2000; ++step) {
        if (!f.ledger->reserve(member.slot, 40 * kPage).ok()) continue;
        CHECK_OK(f.ledger->commit(member.slot, 40 * kPage));
        CHECK(f.charged() <= kCapacity);
        CHECK_OK(f.ledger->release(member.slot, 40 * kPage));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(f.charged() == 0);
}

}  // namespace

void test_ledger() {
  a_lease_is_reserved_committed_or_cancelled();
  a_minimum_is_kept_from_others_and_a_limit_from_its_client();
  an_administrator_finds_clients_by_name_and_pid();
  a_segment_is_stale_once_nobody_has_it_open();
  static_memory_counts_beside_pages();
  every_record_can_be_taken_and_no_more();
  a_death_inside_the_mutex_is_repaired();
  nothing_is_granted_while_somebody_looks();
  a_death_is_seen_by_the_first_refusal_after_the_interval();
  room_of_the_dead_is_found_by_one_who_never_stops_asking();
  a_death_is_seen_by_available_and_usage_at_once();
  a_ledger_whose_file_was_removed_grants_nothing();
  a_destroyed_ledger_grants_nothing();
  threads_never_take_more_than_there_is();
}

}  // namespace kvcached::testing
