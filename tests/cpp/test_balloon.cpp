#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "client.h"
#include "futex.h"
#include "ledger_fixture.h"

namespace kvcached::testing {

namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t in_a_while() { return monotonic_ns() + 30 * kSecond; }

void hold(Ledger& ledger, const Member& member, uint64_t pages) {
  CHECK_OK(ledger.reserve(member.slot, pages * kPage));
  CHECK_OK(ledger.commit(member.slot, pages * kPage));
}

// Asks as a waiting client does, until there is room or the time is over.
bool wait_until_room(Ledger& ledger, int slot, uint64_t pages, int64_t until_ns) {
  while (true) {
    const std::optional<uint32_t> seen =
        value_of(ledger.want(slot, pages * kPage, false, until_ns));
    if (!seen) return true;
    ledger.sleep(*seen, until_ns);
    if (monotonic_ns() >= until_ns) return false;
  }
}

bool finds_room(Ledger& ledger, const Member& member, uint64_t pages, bool is_static = false) {
  return !value_of(ledger.want(member.slot, pages * kPage, is_static, in_a_while()));
}

ClientRecord record_of(Ledger& ledger, const Member& member) {
  return value_of(ledger.client(member.slot));
}

bool ask(Ledger& ledger, const Member& member, uint64_t pages, int64_t until_ns) {
  const Ask part{member.slot, record_of(ledger, member).joined, pages * kPage};
  const uint64_t asks = value_of(ledger.balloon_view()).asks;
  return value_of(ledger.ask({&part, 1}, asks, until_ns))[0].has_value();
}

void a_waiter_gets_what_another_releases() {
  Fixture f;
  Member a(f.ledger);
  Member b(f.ledger);
  hold(*f.ledger, a, 95);
  std::thread waiter([&] {
    CHECK(wait_until_room(*f.ledger, b.slot, 10, in_a_while()));
    CHECK_OK(f.ledger->reserve(b.slot, 10 * kPage));
    f.ledger->end_wait(b.slot);
  });
  while (record_of(*f.ledger, b).wanted_since == 0) std::this_thread::yield();
  CHECK_OK(f.ledger->release(a.slot, 4 * kPage));
  CHECK_OK(f.ledger->release(a.slot, 4 * kPage));
  waiter.join();
  CHECK(f.charged() == 97 * kPage);
}

void what_was_reserved_is_wanted_no_more() {
  Fixture f;
  Member holder(f.ledger);
  Member waiter(f.ledger);
  hold(*f.ledger, holder, 95);
  CHECK(!finds_room(*f.ledger, waiter, 10));
  CHECK(record_of(*f.ledger, waiter).wanted_bytes == 10 * kPage);
  CHECK_OK(f.ledger->reserve(waiter.slot, 4 * kPage));
  CHECK(record_of(*f.ledger, waiter).wanted_bytes == 6 * kPage);
  CHECK_OK(f.ledger->release(holder.slot, 10 * kPage));
  CHECK_OK(f.ledger->reserve_static(waiter.slot, 6 * kPage));
  CHECK(record_of(*f.ledger, waiter).wanted_bytes == 0);
  CHECK(finds_room(*f.ledger, holder, 5));  // nothing is kept from others
  f.ledger->end_wait(waiter.slot);
  f.ledger->end_wait(holder.slot);
}

void what_comes_free_is_kept_for_the_first_who_waits() {
  Fixture f;
  Member holder(f.ledger);
  Member first(f.ledger);
  Member second(f.ledger, {.name = "second", .min_bytes = 2 * kPage});
  Member third(f.ledger);
  hold(*f.ledger, holder, 98);
  const int64_t soon_ns = monotonic_ns() + kSecond / 100;
  CHECK(!wait_until_room(*f.ledger, first.slot, 10, soon_ns));
  CHECK(!finds_room(*f.ledger, first, 10));
  CHECK(!finds_room(*f.ledger, second, 6));
  CHECK_OK(f.ledger->release(holder.slot, 9 * kPage));
  CHECK(value_of(f.ledger->available(third.slot)) == 0);
  CHECK(value_of(f.ledger->available(second.slot)) == 2 * kPage);  // its minimum
  CHECK(value_of(f.ledger->available(first.slot)) == 9 * kPage);
  CHECK_CODE(f.ledger->reserve(holder.slot, kPage), Code::no_room);
  CHECK_CODE(f.ledger->reserve_static(third.slot, kPage), Code::no_room);
  CHECK_OK(f.ledger->release(holder.slot, 3 * kPage));
  CHECK(wait_until_room(*f.ledger, first.slot, 10, in_a_while()));
  CHECK(value_of(f.ledger->available(second.slot)) == 4 * kPage);
  f.ledger->end_wait(first.slot);
  CHECK(wait_until_room(*f.ledger, second.slot, 6, in_a_while()));
  CHECK(value_of(f.ledger->available(third.slot)) == 8 * kPage);
  f.ledger->end_wait(second.slot);
  CHECK(value_of(f.ledger->available(third.slot)) == 12 * kPage);
}

void nothing_is_kept_for_what_can_never_be_had() {
  Fixture f;
  Member limited(f.ledger, {.name = "limited", .limit_bytes = 5 * kPage});
  Member greedy(f.ledger);
  Member guarded(f.ledger, {.name = "guarded", .min_bytes = 30 * kPage});
  Member other(f.ledger);
  CHECK(!finds_room(*f.ledger, limited, 6));
  CHECK(!finds_room(*f.ledger, greedy, 71));
  CHECK(value_of(f.ledger->available(other.slot)) == 70 * kPage);
  CHECK(!finds_room(*f.ledger, greedy, 71, true));
  CHECK(value_of(f.ledger->available(other.slot)) == 70 * kPage);
  // Its limit is raised while it waits.
  CHECK_OK(f.ledger->set_limit(limited.slot, 6 * kPage));
  CHECK(wait_until_room(*f.ledger, limited.slot, 6, in_a_while()));
}

void a_wait_ends_in_time_and_keeps_nothing_after_it() {
  Fixture f;
  Member holder(f.ledger);
  Member late(f.ledger);
  hold(*f.ledger, holder, 100);
  const int64_t until_ns = monotonic_ns() + kSecond / 50;
  CHECK(!wait_until_room(*f.ledger, late.slot, 10, until_ns));
  CHECK(monotonic_ns() >= until_ns);
  // It never answers, as a stopped process does not.
  CHECK_OK(f.ledger->release(holder.slot, 5 * kPage));
  CHECK(value_of(f.ledger->available(holder.slot)) == 5 * kPage);
}

void a_request_is_posted_once_and_answered_once() {
  Fixture f;
  Member target(f.ledger);
  hold(*f.ledger, target, 50);
  CHECK(!f.ledger->has_request(target.slot));
  CHECK(ask(*f.ledger, target, 8, in_a_while()));
  CHECK(ask(*f.ledger, target, 4, in_a_while()));  // of another waiter
  CHECK(f.ledger->has_request(target.slot));
  const ShrinkRequest request = *value_of(f.ledger->shrink_request(target.slot));
  CHECK(request.bytes == 12 * kPage);
  CHECK_OK(f.ledger->release(target.slot, 12 * kPage));
  CHECK_OK(f.ledger->answer(target.slot, request, {12 * kPage, 64, 8 * kPage}));
  CHECK(!f.ledger->has_request(target.slot));
  const ClientRecord after = record_of(*f.ledger, target);
  CHECK(after.given_bytes == 12 * kPage && after.asked_bytes == 0);
  CHECK(after.evicted_tokens == 64 && after.evicted_bytes == 8 * kPage);
  CHECK(after.ask_not_before_ns == 0);
}

void a_request_that_comes_during_an_answer_stays() {
  Fixture f;
  Member target(f.ledger);
  ask(*f.ledger, target, 8, in_a_while());
  const ShrinkRequest first = *value_of(f.ledger->shrink_request(target.slot));
  ask(*f.ledger, target, 3, in_a_while());
  CHECK_OK(f.ledger->answer(target.slot, first, {2 * kPage}));
  CHECK(f.ledger->has_request(target.slot));
  CHECK(value_of(f.ledger->shrink_request(target.slot))->bytes == 3 * kPage);
  CHECK(record_of(*f.ledger, target).ask_not_before_ns > 0);  // it gave less than the request
}

void requests_go_to_whom_they_were_meant_for() {
  Fixture f;
  const uint64_t asks = value_of(f.ledger->balloon_view()).asks;
  auto gone = std::make_unique<Member>(f.ledger);
  const Ask part{gone->slot, record_of(*f.ledger, *gone).joined, kPage};
  gone.reset();
  const Member heir(f.ledger);
  CHECK(heir.slot == part.slot);
  CHECK(!value_of(f.ledger->ask({&part, 1}, asks, in_a_while()))[0]);
  CHECK(!f.ledger->has_request(heir.slot));
  const Ask nonsense{kMaxClients, 1, kPage};
  CHECK(!value_of(f.ledger->ask({&nonsense, 1}, asks + 1, in_a_while()))[0]);
  CHECK_CODE(f.ledger->ask({&part, 1}, asks, in_a_while()).status(), Code::busy);
}

void an_old_request_is_forgotten() {
  Fixture f;
  Member target(f.ledger);
  ask(*f.ledger, target, 8, monotonic_ns());
  CHECK(f.ledger->has_request(target.slot));
  CHECK(!value_of(f.ledger->shrink_request(target.slot)));
  CHECK(!f.ledger->has_request(target.slot));
  ask(*f.ledger, target, 2, in_a_while());
  CHECK(value_of(f.ledger->shrink_request(target.slot))->bytes == 2 * kPage);
}

void a_lower_limit_is_a_request() {
  Fixture f;
  Member target(f.ledger);
  hold(*f.ledger, target, 50);
  CHECK_OK(f.ledger->set_limit(target.slot, 60 * kPage));
  CHECK(!f.ledger->has_request(target.slot));
  CHECK_OK(f.ledger->set_limit({.name = "member", .pid = {}}, 20 * kPage));
  CHECK(value_of(f.ledger->shrink_request(target.slot))->bytes == 30 * kPage);
  CHECK_OK(f.ledger->release(target.slot, 30 * kPage));
  CHECK(!value_of(f.ledger->shrink_request(target.slot)));  // it shrank by itself
  CHECK(!f.ledger->has_request(target.slot));
}

void a_waiter_that_is_killed_keeps_nothing() {
  Fixture f;
  Member holder(f.ledger);
  hold(*f.ledger, holder, 100);
  int ready[2];
  CHECK(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::shared_ptr<Ledger> own = value_of(Ledger::open({f.path, {}, {}}));
    const Member waiter(own);
    (void)finds_room(*own, waiter, 50);
    (void)!::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  CHECK(::read(ready[0], &byte, 1) == 1);
  CHECK_OK(f.ledger->release(holder.slot, 10 * kPage));
  CHECK(value_of(f.ledger->available(holder.slot)) == 0);
  CHECK(::kill(child, SIGKILL) == 0);
  CHECK(::waitpid(child, nullptr, 0) == child);
  CHECK(value_of(f.ledger->available(holder.slot)) == 10 * kPage);
  ::close(ready[0]);
  ::close(ready[1]);
}

void a_dead_holder_is_noticed_while_waiting() {
  Fixture f;
  Member waiter(f.ledger);
  int ready[2];
  CHECK(::pipe(ready) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const std::shared_ptr<Ledger> own = value_of(Ledger::open({f.path, {}, {}}));
    const Member holder(own);
    hold(*own, holder, 100);
    (void)!::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  CHECK(::read(ready[0], &byte, 1) == 1);
  std::thread killer([child] {
    CHECK(::kill(child, SIGKILL) == 0);
    CHECK(::waitpid(child, nullptr, 0) == child);
  });
  CHECK(wait_until_room(*f.ledger, waiter.slot, 80, in_a_while()));
  killer.join();
  ::close(ready[0]);
  ::close(ready[1]);
}

bool is_readable(int fd, int patience_ms) {
  pollfd poll_fd{fd, POLLIN, 0};
  return ::poll(&poll_fd, 1, patience_ms) == 1;
}

void a_request_makes_a_descriptor_readable() {
  Fixture f;
  const auto client = value_of(Client::open(f.ledger, "host:0", {.name = "sleeper"}));
  const auto ask_it = [&] {
    const BalloonView view = value_of(f.ledger->balloon_view());
    const Ask part{view.slots[0], view.clients[0].joined, kPage};
    CHECK(value_of(f.ledger->ask({&part, 1}, view.asks, in_a_while()))[0]);
  };
  ask_it();
  const int fd = value_of(client->fileno());  // the request came before this call
  CHECK(value_of(client->fileno()) == fd);
  for (int round = 0; round < 50; ++round) {
    CHECK(is_readable(fd, 30'000));
    while (is_readable(fd, 0)) CHECK(client->has_request());
    const ShrinkRequest request = *value_of(client->shrink_request());
    CHECK_OK(client->answer(request, {}));
    CHECK(!client->has_request());
    CHECK(!is_readable(fd, 0));
    ask_it();
  }
  CHECK_OK(client->close());
  CHECK_CODE(client->fileno().status(), Code::closed);
  CHECK(!client->has_request());
}

void a_forked_child_has_no_descriptor() {
  Fixture f;
  const auto client = value_of(Client::open(f.ledger, "host:0", {.name = "parent"}));
  const int fd = value_of(client->fileno());
  const pid_t child = ::fork();
  if (child == 0) {
    const bool right = client->fileno().status().code == Code::forked && !client->has_request() &&
                       ::fcntl(fd, F_GETFD) == -1;
    ::_exit(right ? 0 : 1);
  }
  int status = 1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  const BalloonView view = value_of(f.ledger->balloon_view());
  const Ask part{view.slots[0], view.clients[0].joined, kPage};
  CHECK(value_of(f.ledger->ask({&part, 1}, view.asks, in_a_while()))[0]);
  CHECK(is_readable(fd, 30'000));
}

}  // namespace

void test_balloon() {
  a_waiter_gets_what_another_releases();
  what_was_reserved_is_wanted_no_more();
  what_comes_free_is_kept_for_the_first_who_waits();
  nothing_is_kept_for_what_can_never_be_had();
  a_wait_ends_in_time_and_keeps_nothing_after_it();
  a_request_is_posted_once_and_answered_once();
  a_request_that_comes_during_an_answer_stays();
  requests_go_to_whom_they_were_meant_for();
  an_old_request_is_forgotten();
  a_lower_limit_is_a_request();
  a_waiter_that_is_killed_keeps_nothing();
  a_dead_holder_is_noticed_while_waiting();
  a_request_makes_a_descriptor_readable();
  a_forked_child_has_no_descriptor();
}

}  // namespace kvcached::testing
