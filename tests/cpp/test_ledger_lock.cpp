// A process is stopped while it holds the ledger's mutex.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "check.h"
#include "ledger_check.h"
#include "ledger_fixture.h"
#include "ledger_lock.h"
#include "ledger_segment.h"

namespace kvcached::testing {

namespace {

// Starts a child that holds the mutex and is stopped, as a client or not.
pid_t stopped_inside(const std::string& path, bool as_client) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const std::shared_ptr<Ledger> ledger = value_of(Ledger::open({path, {}, {}}));
    if (as_client) (void)new Member(ledger, {.name = "stopped"});
    LedgerSegment* segment = hold_lock(path);
    raise(SIGSTOP);
    unlock(segment->lock);
    _exit(0);
  }
  int outcome = 0;
  CHECK(waitpid(child, &outcome, WUNTRACED) == child && WIFSTOPPED(outcome));
  return child;
}

// After the first wait that times out each call waits only briefly, whatever its timeout.
void check_locked_out(Ledger& ledger, int slot, const std::string& why) {
  const int64_t timeout_ns = lock_timeout_ns;
  for (const int64_t next_ns : {int64_t{20'000'000}, int64_t{3'600'000'000'000}}) {
    lock_timeout_ns = next_ns;
    const Status refused = ledger.reserve(slot, kPage);
    CHECK(refused.code == Code::corrupt && refused.message.find(why) != std::string::npos);
  }
  lock_timeout_ns = timeout_ns;
}

void let_go_on(pid_t child) {
  CHECK(kill(child, SIGCONT) == 0);
  int outcome = 0;
  CHECK(waitpid(child, &outcome, 0) == child && WEXITSTATUS(outcome) == 0);
}

// A client, or a process that only has the device open.
void a_holder_that_is_stopped_is_named() {
  for (const bool as_client : {true, false}) {
    Fixture f;
    const Member member(f.ledger);
    const pid_t child = stopped_inside(f.path, as_client);
    const std::string pid = std::to_string(child);
    check_locked_out(
        *f.ledger, member.slot,
        "by process " + pid + ", which is stopped; resume it (kill -CONT " + pid + ")");
    let_go_on(child);
    CHECK_OK(f.ledger->reserve(member.slot, kPage));
  }
}

// Its number may be that of a process here.
void a_holder_of_another_container_is_not_taken_for_one_of_this() {
  Fixture f;
  const Member member(f.ledger);
  const pid_t child = stopped_inside(f.path, false);
  map_directly(f.path)->lock.holder_namespace += 1;
  check_locked_out(*f.ledger, member.slot,
                   "by process " + std::to_string(child) + " of another pid namespace");
  let_go_on(child);
}

void a_holder_that_has_not_left_its_number_is_not_named() {
  Fixture f;
  const Member member(f.ledger);
  const pid_t child = stopped_inside(f.path, false);
  map_directly(f.path)->lock.holder -= 1;
  check_locked_out(*f.ledger, member.slot, "by a process that did not record its pid");
  let_go_on(child);
}

void a_lock_that_came_free_after_the_wait_names_nobody() {
  Fixture f;
  const Status status = held_up_by(*map_directly(f.path));
  CHECK(status.message.find("it is free now: try again") != std::string::npos);
}

// Each call that gives memory back returns at once. The next holder of the mutex counts it.
void memory_is_given_back_to_a_lock_that_is_held_for_long() {
  Fixture f;
  const Member member(f.ledger);
  const std::shared_ptr<Ledger> other = value_of(Ledger::open({f.path, {}, {}}));
  CHECK_OK(f.ledger->reserve(member.slot, 3 * kPage));
  CHECK_OK(f.ledger->commit(member.slot, 2 * kPage));
  CHECK_OK(f.ledger->reserve_static(member.slot, kPage));
  const pid_t child = stopped_inside(f.path, true);
  const int64_t timeout_ns = lock_timeout_ns;
  lock_timeout_ns = 20'000'000;
  CHECK_CODE(f.ledger->reserve(member.slot, kPage), Code::corrupt);
  lock_timeout_ns = 3'600'000'000'000;
  std::vector<std::thread> givers;
  for (int i = 0; i < 2; ++i) {
    givers.emplace_back([&] { CHECK_OK(f.ledger->release(member.slot, kPage)); });
  }
  givers.emplace_back([&] { CHECK_OK(f.ledger->cancel(member.slot, kPage)); });
  givers.emplace_back([&] { CHECK_OK(f.ledger->release_static(member.slot, kPage)); });
  for (std::thread& giver : givers) giver.join();
  let_go_on(child);
  lock_timeout_ns = timeout_ns;
  CHECK(value_of(other->usage()).charged_bytes == 4 * kPage);
  CHECK(f.charged() == 0);
  CHECK_CODE(f.ledger->release(member.slot, kPage), Code::internal);
}

// The rest of its charge is not that of another client, which may have its record by then.
void a_client_leaves_a_lock_that_is_held_for_long() {
  Fixture f;
  const int lock_fd = value_of(f.ledger->open_lock_fd());
  const int leaver = value_of(f.ledger->join({.name = "leaver"}, lock_fd, -1));
  CHECK_OK(f.ledger->reserve(leaver, 2 * kPage));
  const pid_t child = stopped_inside(f.path, true);
  const int64_t timeout_ns = lock_timeout_ns;
  lock_timeout_ns = 20'000'000;
  CHECK_OK(f.ledger->leave(leaver));
  CHECK_OK(f.ledger->cancel(leaver, kPage));
  lock_timeout_ns = timeout_ns;
  ::close(lock_fd);
  let_go_on(child);
  const Member next(f.ledger);
  CHECK(next.slot == leaver);
  CHECK_OK(f.ledger->reserve(next.slot, kPage));
  CHECK(f.charged() == kPage);
}

// The lock of a dead holder, or a damaged one, is taken over at the first look.
void a_lock_word_that_names_nobody_is_taken_over() {
  Fixture f;
  const Member member(f.ledger);
  LedgerSegment* segment = map_directly(f.path);
  for (const uint32_t word : {uint32_t{0x3ffffffe}, kLockSleepers, UINT32_MAX}) {
    std::atomic_ref(segment->lock.word).store(word);
    CHECK_OK(f.ledger->reserve(member.slot, kPage));
    CHECK(f.charged() == kPage);
    CHECK_OK(f.ledger->cancel(member.slot, kPage));
  }
  CHECK(segment->lock.deaths == 2);
}

// A forked child and its parent have separate openings: each is found dead without the other.
void a_forked_child_holds_the_lock_apart_from_its_parent() {
  Fixture f;
  const Member member(f.ledger);
  int ends[2] = {};
  int end_of_test[2] = {};
  CHECK(pipe(ends) == 0 && pipe(end_of_test) == 0);
  const pid_t parent = fork();
  if (parent == 0) {
    const std::shared_ptr<Ledger> ledger = value_of(Ledger::open({f.path, {}, {}}));
    const LedgerSegment* segment = map_directly(f.path);
    const uint32_t number = segment->lock.openings;
    const pid_t child = fork();
    if (child == 0) {
      CHECK(value_of(ledger->reap()) == 0);
      ::close(end_of_test[1]);
      char nothing = 0;
      (void)!read(end_of_test[0], &nothing, 1);
      _exit(0);
    }
    CHECK(write(ends[1], &child, sizeof(child)) == sizeof(child));
    std::atomic_ref(map_directly(f.path)->lock.word).store(number);
    _exit(0);
  }
  pid_t child = 0;
  CHECK(read(ends[0], &child, sizeof(child)) == sizeof(child));
  int outcome = 0;
  CHECK(waitpid(parent, &outcome, 0) == parent && WEXITSTATUS(outcome) == 0);
  CHECK_OK(f.ledger->reserve(member.slot, kPage));  // while the child lives
  CHECK(map_directly(f.path)->lock.deaths == 1);
  for (const int end : {ends[0], ends[1], end_of_test[0], end_of_test[1]}) ::close(end);
}

// An opening with a dead holder's number would make that holder seem alive.
void a_dead_holders_number_is_not_given_out() {
  Fixture f;
  const Member member(f.ledger);
  LedgerSegment* segment = map_directly(f.path);
  segment->lock.openings = 0x3ffffffd;
  std::atomic_ref(segment->lock.word).store(0x3ffffffe);
  const int fd = ::open(f.path.c_str(), O_RDWR | O_CLOEXEC);
  CHECK(value_of(claim_opening(fd, &segment->lock)).number == 0x3fffffff);
  CHECK_OK(f.ledger->reserve(member.slot, kPage));
  segment->lock.openings = 0;  // live openings keep theirs
  CHECK(value_of(claim_opening(fd, &segment->lock)).number != 1);
  ::close(fd);
}

}  // namespace

void test_ledger_lock() {
  a_holder_that_is_stopped_is_named();
  a_holder_of_another_container_is_not_taken_for_one_of_this();
  a_holder_that_has_not_left_its_number_is_not_named();
  a_lock_that_came_free_after_the_wait_names_nobody();
  memory_is_given_back_to_a_lock_that_is_held_for_long();
  a_client_leaves_a_lock_that_is_held_for_long();
  a_lock_word_that_names_nobody_is_taken_over();
  a_forked_child_holds_the_lock_apart_from_its_parent();
  a_dead_holders_number_is_not_given_out();
}

}  // namespace kvcached::testing
