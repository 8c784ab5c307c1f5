#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "check.h"
#include "kv_cache.h"
#include "ledger_lock.h"
#include "lock_holder.h"
#include "test_stream.h"
#include "virtual_tensor.h"
#include "vmm_fault.h"

namespace kvcached::testing {

namespace {

using std::chrono::milliseconds;

std::string device_under_test;

constexpr uint64_t kCapacity = 64 * kPage;

// Slabs of 4 pages and 4 blocks.
constexpr int kPagesPerSlab = 4;
const KvGeometry kGeometry = {
    .slab_pages = {1, 2, 1}, .slabs = 16, .blocks_per_slab = 4, .reserved_blocks = 0};

struct Fixture {
  std::string path = fresh_ledger_path();
  std::shared_ptr<Ledger> ledger = value_of(Ledger::open({path, kCapacity, kPage}));
  std::shared_ptr<FaultVmm> vmm =
      std::make_shared<FaultVmm>(value_of(make_vmm(device_under_test, kPage)));
  std::shared_ptr<Client> client = value_of(Client::open(ledger, vmm, {.name = "test"}));
  std::shared_ptr<KvCache> cache;

  Fixture() {
    client->spares().allow();
    cache = value_of(KvCache::create(client, kGeometry));
  }
  ~Fixture() {
    CHECK_OK(client->close());
    CHECK(value_of(ledger->usage()).charged_bytes == 0);
    CHECK_OK(ledger->destroy(false));
  }
  uint64_t committed_pages() { return value_of(client->record()).committed_bytes / kPage; }
};

// Waits for the background thread. The deadline is only for a thread that never acts.
template <class Condition>
void eventually(Condition condition) {
  for (int i = 0; i < 6000 && !condition(); ++i) std::this_thread::sleep_for(milliseconds(5));
  CHECK(condition());
}

// Gives the thread ample time for an action that it must not take.
void let_the_thread_run() { std::this_thread::sleep_for(milliseconds(300)); }

std::vector<int64_t> alloc(KvCache& cache, size_t count) {
  std::vector<int64_t> ids(count);
  CHECK_OK(cache.alloc(ids));
  return ids;
}

void no_thread_without_leave_or_need() {
  Fixture f;
  CHECK_OK(f.cache->set_mapped_spares(0, 8));
  CHECK_OK(f.cache->set_spare_pages(0, 8));
  CHECK(!f.client->spares().runs());
  auto quiet = value_of(Client::open(f.ledger, "host:0", {.name = "quiet"}));
  auto cache = value_of(KvCache::create(quiet, kGeometry));
  CHECK_OK(cache->set_mapped_spares(4, 8));
  CHECK(!quiet->spares().runs());
  CHECK(value_of(cache->refill()) == 4);
  CHECK_OK(quiet->close());
}

void both_tiers_are_filled_and_kept() {
  Fixture f;
  CHECK_OK(f.cache->set_spare_pages(3, 6));
  CHECK_OK(f.cache->set_mapped_spares(2 * kPagesPerSlab, 3 * kPagesPerSlab));
  CHECK(f.client->spares().runs());
  eventually([&] { return f.cache->free_mapped_blocks() == 8 && f.committed_pages() == 11; });
  const auto first = alloc(*f.cache, 8);  // takes what is mapped; the thread maps as much again
  eventually([&] { return f.cache->free_mapped_blocks() == 8 && f.committed_pages() == 19; });
  CHECK_OK(f.cache->free(first));  // four empty slabs, one too many: two are unmapped
  eventually([&] { return f.cache->free_mapped_blocks() == 8 && f.committed_pages() == 11; });
  CHECK_OK(f.cache->check());
}

void a_filled_tier_spares_the_driver() {
  Fixture f;
  CHECK_OK(f.cache->set_mapped_spares(2 * kPagesPerSlab, 8 * kPagesPerSlab));
  eventually([&] { return f.cache->free_mapped_blocks() == 8; });
  std::vector<int64_t> ids(8);
  CHECK(f.cache->try_alloc(ids));
}

void what_others_may_need_is_not_taken() {
  const auto slack = [](uint64_t charged, ClientRecord client) {
    return slack_of({64 * kPage, kPage, charged * kPage, {client}}, client, 100);
  };
  ClientRecord client = {};
  client.limit_bytes = kNoLimit;
  client.committed_bytes = 4 * kPage;
  CHECK(slack(4, client).fill_bytes == 56 * kPage);  // all but a sixteenth
  CHECK(slack(60, client).fill_bytes == 0 && !slack(60, client).scarce);
  CHECK(!slack(62, client).scarce && slack(63, client).scarce);  // a thirty-second
  client.min_bytes = 6 * kPage;                                  // 2 of them are its own
  CHECK(slack(64, client).fill_bytes == 2 * kPage && !slack(64, client).scarce);
  client.limit_bytes = 5 * kPage;
  CHECK(slack(10, client).fill_bytes == kPage);
  client.limit_bytes = 3 * kPage;
  CHECK(slack(10, client).fill_bytes == 0 && slack(10, client).scarce);
  ClientRecord waiting = {};
  waiting.wanted_since = 1;
  waiting.wanted_bytes = kPage;
  waiting.wanted_until_ns = 101;
  client.limit_bytes = kNoLimit;
  for (const int64_t now_ns : {100, 101}) {
    const LedgerUsage usage{64 * kPage, kPage, 10 * kPage, {client, waiting}};
    client.min_bytes = 4 * kPage;
    CHECK((slack_of(usage, client, now_ns).fill_bytes == 0) == (now_ns == 100));
    CHECK(!slack_of(usage, client, now_ns).scarce);
    client.min_bytes = 0;
    CHECK(slack_of(usage, client, now_ns).scarce == (now_ns == 100));
  }
}

void a_full_device_gets_the_spares_back() {
  Fixture f;
  CHECK_OK(f.cache->set_mapped_spares(4 * kPagesPerSlab, 4 * kPagesPerSlab));
  eventually([&] { return f.committed_pages() == 16; });
  auto neighbour = value_of(Client::open(f.ledger, "host:0", {.name = "neighbour"}));
  CHECK_OK(neighbour->reserve_static(47 * kPage));
  eventually([&] { return f.committed_pages() == 0; });
  let_the_thread_run();
  // 17 pages are free: of those 4 stay free, and 13 hold three slabs.
  eventually([&] { return f.committed_pages() == 12; });
  CHECK_OK(neighbour->reserve_static(5 * kPage));
  let_the_thread_run();
  CHECK(f.committed_pages() <= 12);
  CHECK_OK(neighbour->close());
  eventually([&] { return f.committed_pages() == 16; });
}

void a_limit_of_another_process_takes_the_spares() {
  Fixture f;
  const auto held = alloc(*f.cache, 4);
  CHECK_OK(f.cache->set_mapped_spares(2 * kPagesPerSlab, 2 * kPagesPerSlab));
  eventually([&] { return f.committed_pages() == 12; });
  auto other = value_of(Ledger::open({f.path, {}, {}}));
  CHECK_OK(other->set_limit(ClientQuery{"test", {}}, 5 * kPage));
  eventually([&] { return f.committed_pages() == 4; });
  CHECK_OK(other->set_limit(ClientQuery{"test", {}}, kNoLimit));
  eventually([&] { return f.committed_pages() == 12; });
  CHECK(f.cache->live_blocks() == 4);
}

void siblings_come_first() {
  Fixture f;
  CHECK_OK(f.cache->set_mapped_spares(8 * kPagesPerSlab, 8 * kPagesPerSlab));
  // Counted by the cache, which is after they were committed.
  eventually([&] { return f.cache->free_mapped_blocks() == 32; });
  CHECK(f.committed_pages() == 32);
  auto sibling = value_of(KvCache::create(f.client, kGeometry));
  CHECK(value_of(sibling->available_blocks()) == 64);
  const auto ids = alloc(*sibling, 64);
  CHECK(f.committed_pages() == 64 && f.cache->mapped_bytes() == 0);
  let_the_thread_run();
  CHECK(f.cache->mapped_bytes() == 0);
  CHECK_OK(sibling->free(ids));
  eventually([&] { return f.cache->free_mapped_blocks() == 32 && sibling->mapped_bytes() == 0; });
}

void a_driver_that_fails_is_asked_again() {
  Fixture f;
  f.vmm->fail_at(1, 3);
  CHECK_OK(f.cache->set_mapped_spares(kPagesPerSlab, kPagesPerSlab));
  eventually([&] { return f.cache->free_mapped_blocks() == 4; });
  CHECK(f.committed_pages() == kPagesPerSlab);
  CHECK_OK(f.cache->check());
}

void a_ledger_that_is_locked_for_long_is_looked_at_again() {
  const int64_t timeout_ns = lock_timeout_ns;
  lock_timeout_ns = 20'000'000;
  {
    Fixture f;
    CHECK_OK(f.cache->set_mapped_spares(kPagesPerSlab, kPagesPerSlab));
    eventually([&] { return f.cache->free_mapped_blocks() == 4; });
    LedgerSegment* segment = hold_lock(f.path);
    eventually([&] { return f.client->spares().failed_looks() >= 3; });
    unlock(segment->lock);
    CHECK(f.client->spares().runs());
    CHECK_OK(f.cache->set_mapped_spares(2 * kPagesPerSlab, 2 * kPagesPerSlab));
    eventually([&] { return f.cache->free_mapped_blocks() == 8; });
  }
  lock_timeout_ns = timeout_ns;
}

// No request needs the pages yet, and one that does would wait for the thread's locks.
void nobody_waits_ahead_of_need() {
  auto ledger = value_of(Ledger::open({fresh_ledger_path(), kCapacity, kPage}));
  auto vmm = std::make_shared<FaultVmm>(value_of(make_vmm(device_under_test, kPage)));
  auto quiet = value_of(Client::open(ledger, vmm, {.name = "quiet"}));
  auto cache = value_of(KvCache::create(quiet, kGeometry));
  CHECK_OK(cache->set_mapped_spares(kPagesPerSlab, kPagesPerSlab));
  quiet->set_create_wait(std::chrono::seconds(2));
  vmm->fail_at(1, 1'000'000, Code::no_room);
  const auto before = vmm->calls().size();
  CHECK(value_of(cache->refill()) == 0);
  CHECK(vmm->calls().size() == before + 1);
  vmm->fail_at(1, 0);
  CHECK(value_of(cache->refill()) == kPagesPerSlab);
  CHECK_OK(quiet->close());
  CHECK_OK(ledger->destroy(false));
}

void what_was_trimmed_stays_away_for_a_while() {
  Fixture f;
  CHECK_OK(f.cache->set_mapped_spares(2 * kPagesPerSlab, 2 * kPagesPerSlab));
  for (int i = 0; i < 6; ++i) {  // each pause is longer than the last
    eventually([&] { return f.cache->mapped_bytes() > 0 || i > 0; });
    CHECK(value_of(f.cache->trim()) > 0 || i > 0);
    f.client->spares().wake();
    std::this_thread::sleep_for(milliseconds(20));
  }
  let_the_thread_run();
  CHECK(f.cache->mapped_bytes() == 0);
  eventually([&] { return f.cache->free_mapped_blocks() == 8; });
}

// Pages that streams may touch stay to the end of the process. The thread does not.
// An alloc can soon have the virtual space of a slab that the thread is unmapping.
void what_is_being_unmapped_is_not_used_up() {
  Fixture f;
  CHECK_OK(f.cache->set_spare_pages(2 * kPagesPerSlab, 2 * kPagesPerSlab));
  const size_t blocks = kGeometry.slabs * kGeometry.blocks_per_slab;
  for (int i = 0; i < 1000; ++i) {
    CHECK_OK(f.cache->free(alloc(*f.cache, blocks)));
    std::this_thread::sleep_for(std::chrono::microseconds(i % 200));
  }
}

void a_client_that_is_dropped_under_work_has_no_thread() {
  TestStream stream(device_under_test == "cuda:0");
  auto ledger = value_of(Ledger::open({fresh_ledger_path(), kCapacity, kPage}));
  {
    auto client = value_of(Client::open(ledger, device_under_test, {.name = "dropped"}));
    client->spares().allow();
    auto cache = value_of(KvCache::create(client, kGeometry));
    CHECK_OK(cache->set_mapped_spares(kPagesPerSlab, kPagesPerSlab));
    eventually([&] { return cache->free_mapped_blocks() == 4; });
    CHECK_OK(client->streams().set({stream.handle()}, {}));
    stream.submit(cache->region()->address(), kPage);
  }
  let_the_thread_run();
  CHECK(value_of(ledger->usage()).charged_bytes == kPagesPerSlab * kPage);
  CHECK_OK(ledger->destroy(true));
}

// An engine on either cache, a neighbour that needs memory, and a thread that changes settings.
void threads_agree() {
  Fixture f;
  auto sibling = value_of(KvCache::create(f.client, kGeometry));
  auto neighbour = value_of(Client::open(f.ledger, "host:0", {.name = "neighbour"}));
  std::atomic<bool> done = false;
  const auto engine = [](KvCache& cache, unsigned seed) {
    std::mt19937 draw(seed);
    std::vector<std::vector<int64_t>> live;
    for (int i = 0; i < 1500; ++i) {
      std::vector<int64_t> ids(draw() % 12);
      if (cache.try_alloc(ids) || cache.alloc(ids).ok()) live.push_back(ids);
      if (live.size() > draw() % 8) {
        CHECK_OK(cache.free(live.front()));
        live.erase(live.begin());
      }
      (void)cache.available_blocks();
    }
    for (const auto& ids : live) CHECK_OK(cache.free(ids));
    CHECK(cache.live_blocks() == 0);
  };
  std::thread first([&] { engine(*f.cache, 1); });
  std::thread second([&] { engine(*sibling, 2); });
  std::thread presser([&] {
    std::mt19937 draw(3);
    while (!done) {
      const uint64_t bytes = draw() % 60 * kPage;
      if (!neighbour->reserve_static(bytes).ok()) continue;
      CHECK_OK(neighbour->release_static(bytes));
    }
  });
  std::thread meddler([&] {
    std::mt19937 draw(4);
    while (!done) {
      KvCache& cache = draw() % 2 == 0 ? *f.cache : *sibling;
      const size_t low = draw() % 20;
      CHECK_OK(cache.set_mapped_spares(low, low + draw() % 20));
      CHECK_OK(cache.set_spare_pages(low / 2, low));
      CHECK_OK(f.client->set_limit(draw() % 3 == 0 ? draw() % 64 * kPage : kNoLimit));
      (void)value_of(cache.trim());
      CHECK_OK(cache.check());
      auto brief = value_of(KvCache::create(f.client, kGeometry));
      CHECK_OK(brief->set_mapped_spares(4, 4));
    }
  });
  first.join();
  second.join();
  done = true;
  presser.join();
  meddler.join();
  CHECK_OK(f.cache->check());
  CHECK_OK(sibling->check());
  CHECK_OK(f.cache->close());
  CHECK_OK(sibling->close());
  CHECK(f.committed_pages() == 0);
}

void closing_while_it_works() {
  for (int i = 0; i < 20; ++i) {
    Fixture f;
    CHECK_OK(f.cache->set_mapped_spares(8 * kPagesPerSlab, 8 * kPagesPerSlab));
    if (i % 2 == 0) eventually([&] { return f.cache->mapped_bytes() > 0; });
    if (i % 3 == 0) f.cache.reset();
    CHECK_OK(f.client->close());
    CHECK(!f.client->spares().runs());
  }
}

#ifndef __SANITIZE_ADDRESS__

void use_a_client_of_its_own(const std::shared_ptr<Ledger>& ledger) {
#ifndef __SANITIZE_THREAD__  // which knows no threads that a forked child starts
  auto client = value_of(Client::open(ledger, "host:0", {.name = "child"}));
  client->spares().allow();
  auto cache = value_of(KvCache::create(client, kGeometry));
  CHECK_OK(cache->set_mapped_spares(4, 4));
  eventually([&] { return cache->free_mapped_blocks() == 4; });
  CHECK_OK(client->close());
#else
  (void)ledger;
#endif
}

void a_fork_leaves_parent_and_child_right() {
  for (int i = 0; i < 10; ++i) {
    Fixture f;
    CHECK_OK(f.cache->set_mapped_spares(8 * kPagesPerSlab, 8 * kPagesPerSlab));
    const pid_t child = fork();
    if (child == 0) {
      std::vector<int64_t> ids(1);
      const bool dead = !f.client->spares().runs() && !f.cache->try_alloc(ids) &&
                        f.cache->alloc(ids).code == Code::forked;
      f.cache.reset();
      const bool closed = f.client->close().ok();
      f.client.reset();
      use_a_client_of_its_own(f.ledger);
      _exit(dead && closed ? 0 : 1);
    }
    int outcome = 0;
    CHECK(waitpid(child, &outcome, 0) == child && WIFEXITED(outcome) && WEXITSTATUS(outcome) == 0);
    eventually([&] { return f.cache->free_mapped_blocks() == 32; });
    CHECK(alloc(*f.cache, 40).size() == 40);
  }
}

#endif

}  // namespace

void test_spare_keeper(const std::string& device) {
  device_under_test = device;
  no_thread_without_leave_or_need();
  both_tiers_are_filled_and_kept();
  a_filled_tier_spares_the_driver();
  what_others_may_need_is_not_taken();
  a_full_device_gets_the_spares_back();
  a_limit_of_another_process_takes_the_spares();
  siblings_come_first();
  a_driver_that_fails_is_asked_again();
  a_ledger_that_is_locked_for_long_is_looked_at_again();
  nobody_waits_ahead_of_need();
  what_was_trimmed_stays_away_for_a_while();
  what_is_being_unmapped_is_not_used_up();
  if (device == "host:0") a_client_that_is_dropped_under_work_has_no_thread();
  threads_agree();
  closing_while_it_works();
#ifndef __SANITIZE_ADDRESS__  // whose allocator a fork may leave locked by the other thread
  if (device == "host:0") a_fork_leaves_parent_and_child_right();
#endif
}

}  // namespace kvcached::testing
