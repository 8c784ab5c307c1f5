#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "backends.h"
#include "check.h"
#include "kv_cache.h"
#include "streams.h"
#include "test_stream.h"
#include "virtual_tensor.h"
#include "vmm_fault.h"

namespace kvcached::testing {

namespace {

std::string device_under_test;

constexpr uint64_t kCapacity = 64 * kPage;

// 3 buffers with slabs of 1, 2 and 1 pages: 4 pages and 4 blocks a slab, block 0 reserved.
struct Fixture {
  std::string path = fresh_ledger_path();
  std::shared_ptr<Ledger> ledger = value_of(Ledger::open({path, kCapacity, kPage}));
  std::shared_ptr<FaultVmm> vmm =
      std::make_shared<FaultVmm>(value_of(make_vmm(device_under_test, kPage)));
  std::shared_ptr<Client> client = value_of(Client::open(ledger, vmm, {.name = "test"}));
  std::shared_ptr<KvCache> cache = value_of(KvCache::create(
      client, {.slab_pages = {1, 2, 1}, .slabs = 8, .blocks_per_slab = 4, .reserved_blocks = 1}));

  ~Fixture() {
    CHECK_OK(client->close());
    CHECK(charged() == 0);
    CHECK_OK(ledger->destroy(false));
  }
  uint64_t charged() { return value_of(ledger->usage()).charged_bytes; }
  uint64_t committed() { return value_of(client->record()).committed_bytes; }
};

std::vector<int64_t> alloc(KvCache& cache, size_t count) {
  std::vector<int64_t> ids(count);
  CHECK_OK(cache.alloc(ids));
  return ids;
}

void slabs_come_and_go_with_their_blocks() {
  Fixture f;
  CHECK(f.cache->mapped_bytes() == 4 * kPage && f.cache->floor_bytes() == 4 * kPage);
  const auto ids = alloc(*f.cache, 12);
  CHECK(f.cache->mapped_bytes() == 16 * kPage && f.charged() == 16 * kPage);
  CHECK(f.cache->counters().maps == 6);  // 3 runs for the floor, 3 for three slabs at once
  CHECK(f.cache->available_blocks().value() == 3 + 4 * 4);
  CHECK_OK(f.cache->free(ids));
  CHECK(f.cache->mapped_bytes() == f.cache->floor_bytes() && f.charged() == 4 * kPage);
  std::vector<int64_t> too_many(32);
  CHECK_CODE(f.cache->alloc(too_many), Code::no_room);
  CHECK_OK(f.client->set_limit(7 * kPage));
  std::vector<int64_t> four(4);
  CHECK_CODE(f.cache->alloc(four), Code::no_room);
  CHECK(f.cache->available_blocks().value() == 3 && f.charged() == 4 * kPage);
}

// Calls of one growth of the fault decorator: create, then map and set_access of each buffer.
void a_page_that_is_gone_is_noticed() {
  Fixture f;
  CHECK_OK(f.cache->check());
  const PageRun first = {0, 1};
  const auto pages = value_of(f.cache->region()->unmap(std::span(&first, 1)));
  CHECK_CODE(f.cache->check(), Code::internal);
  CHECK_OK(f.cache->region()->map(std::span(&first, 1), pages));
  CHECK_OK(f.cache->check());
}

void a_failed_growth_leaves_nothing_behind() {
  for (int call = 1; call <= 7; ++call) {
    Fixture f;
    std::vector<int64_t> ids(8);
    f.vmm->fail_at(call);
    CHECK_CODE(f.cache->alloc(ids), Code::system_call);
    CHECK(f.charged() == 4 * kPage && f.committed() == 4 * kPage);
    CHECK(f.cache->mapped_bytes() == 4 * kPage && f.cache->live_blocks() == 0);
    CHECK_OK(f.cache->check());
    CHECK_OK(f.cache->alloc(ids));
  }
}

void a_failed_unmap_keeps_the_slab_in_use() {
  for (int call = 1; call <= 3; ++call) {
    Fixture f;
    const auto ids = alloc(*f.cache, 7);
    f.vmm->fail_at(call);
    CHECK_OK(f.cache->free(ids));
    CHECK(f.cache->live_blocks() == 0 && f.cache->free_mapped_blocks() == 7);
    CHECK(f.charged() == 8 * kPage);
    CHECK(alloc(*f.cache, 7).size() == 7);
    CHECK(f.charged() == 8 * kPage);
    f.vmm->fail_at(call);
    CHECK_OK(f.cache->free(ids));
    CHECK(value_of(f.cache->trim()) == 4);
    CHECK(f.charged() == 4 * kPage);
  }
}

void a_stranded_slab_is_retired() {
  Fixture f;
  const auto ids = alloc(*f.cache, 7);
  f.vmm->fail_at(2, 2);  // the second buffer's unmap, then the rollback of the first
  CHECK_OK(f.cache->free(ids));
  CHECK(f.cache->free_mapped_blocks() == 3 && f.charged() == 8 * kPage);
  CHECK_OK(f.cache->check());
  for (const int64_t id : alloc(*f.cache, 8)) CHECK(id < 4 || id >= 8);
  CHECK_OK(f.cache->close());
  CHECK(f.charged() == 0);
}

void spare_pages_are_kept_between_the_watermarks() {
  Fixture f;
  CHECK_CODE(f.cache->set_spare_pages(5, 4), Code::invalid_argument);
  CHECK_OK(f.cache->set_spare_pages(2, 8));
  const auto ids = alloc(*f.cache, 15);
  CHECK_OK(f.cache->free(std::span(ids).subspan(7)));
  CHECK(f.charged() == 16 * kPage && f.cache->mapped_bytes() == 8 * kPage);
  const auto again = alloc(*f.cache, 8);
  CHECK(f.charged() == 16 * kPage);
  CHECK_OK(f.cache->free(again));
  CHECK_OK(f.cache->free(std::span(ids).first(7)));  // above the high mark: down to the low one
  CHECK(f.charged() == 6 * kPage);
  CHECK(value_of(f.cache->trim()) == 2);
  CHECK(f.charged() == 4 * kPage);
}

void a_full_device_is_tried_again_until_the_deadline() {
  Fixture f;
  const auto creates = [&] {
    const auto calls = f.vmm->calls();
    return std::count(calls.begin(), calls.end(), VmmCall::create);
  };
  const auto before = creates();
  std::vector<int64_t> ids(4);
  f.vmm->fail_at(1, 3, Code::no_room);
  f.client->set_create_wait(std::chrono::seconds(60));
  CHECK_OK(f.cache->alloc(ids));
  CHECK(creates() == before + 4 && f.charged() == 8 * kPage);
  CHECK_OK(f.cache->free(ids));
  f.vmm->fail_at(1, 1'000'000, Code::no_room);
  f.client->set_create_wait({});
  const Status full = f.cache->alloc(ids);
  CHECK(full.code == Code::no_room && full.message.find("1 tries") != std::string::npos);
  CHECK(f.charged() == 4 * kPage && f.committed() == 4 * kPage);
  f.vmm->fail_at(1);  // another failure is not retried
  CHECK_CODE(f.cache->alloc(ids), Code::system_call);
}

void a_failing_quarantine_keeps_slabs_in_use() {
  TestStream stream(device_under_test == "cuda:0");  // outlives the client
  Fixture f;
  CHECK_OK(f.client->streams().set({stream.handle()}, {}));
  const auto ids = alloc(*f.cache, 7);
  stream.submit(f.cache->region()->address(), kPage);
  f.vmm->fail_at(1);  // the fence
  CHECK_OK(f.cache->free(ids));
  CHECK(f.cache->quarantined_bytes() == 0 && f.cache->free_mapped_blocks() == 7);
  f.cache->settle();
  CHECK(f.cache->quarantined_bytes() == 4 * kPage && f.cache->free_mapped_blocks() == 7);
  stream.complete();
  f.vmm->fail_at(2);  // the second buffer's unmap, which is rolled back
  std::vector<int64_t> again(7);
  CHECK_CODE(f.cache->trim().status(), Code::system_call);
  CHECK(f.cache->quarantined_bytes() == 0 && f.charged() == 8 * kPage);
  CHECK_OK(f.cache->check());
  CHECK_OK(f.cache->alloc(again));
  CHECK_OK(f.cache->free(again));
  CHECK(f.cache->quarantined_bytes() == 0 && f.charged() == 4 * kPage);
}

// After its pages are unmapped a cache has no blocks to give, even if the release fails.
void a_close_that_fails_half_way_is_no_cache_any_more() {
  Fixture f;
  (void)alloc(*f.cache, 7);
  f.vmm->fail_at(4, 2);  // after the unmap of each buffer: the release
  CHECK_CODE(f.cache->close(), Code::system_call);
  CHECK(f.cache->mapped_bytes() == 0 && f.charged() == 8 * kPage);
  std::vector<int64_t> ids(1);
  CHECK(!f.cache->try_alloc(ids));
  CHECK_CODE(f.cache->alloc(ids), Code::closed);
  CHECK_OK(f.cache->close());
  CHECK(f.charged() == 0);
}

void a_close_that_fails_at_once_changes_nothing() {
  TestStream stream(device_under_test == "cuda:0");  // outlives the client
  Fixture f;
  CHECK_OK(f.client->streams().set({stream.handle()}, {}));
  const auto ids = alloc(*f.cache, 7);
  stream.submit(f.cache->region()->address(), kPage);
  CHECK_OK(f.cache->free(ids));
  CHECK(f.cache->quarantined_bytes() == 4 * kPage);
  stream.complete();
  f.vmm->fail_at(2);  // the first unmap, after the fence
  CHECK_CODE(f.cache->close(), Code::system_call);
  CHECK_OK(f.cache->check());
  CHECK(f.cache->free_mapped_blocks() == 7 && f.charged() == 8 * kPage);
  CHECK(alloc(*f.cache, 7).size() == 7);
  CHECK(f.charged() == 8 * kPage);
}

void nothing_is_closed_under_work() {
  TestStream stream(device_under_test == "cuda:0");  // outlives the client
  Fixture f;
  CHECK_OK(f.client->streams().set({stream.handle()}, {}));
  stream.submit(f.cache->region()->address(), kPage);
  CHECK_CODE(f.cache->close(), Code::in_use);
  CHECK_CODE(f.client->close(), Code::in_use);
  CHECK(is_accessible(f.cache->region()->address()) && f.charged() == 4 * kPage);
  stream.complete();
  CHECK_OK(f.cache->close());
}

void virtual_tensors_map_and_unmap_ranges() {
  Fixture f;
  auto tensor = value_of(VirtualTensor::create(f.client, 100 * kPage));
  CHECK_OK(tensor->map(0, 10 * kPage));
  CHECK_CODE(tensor->map(9 * kPage, 2 * kPage), Code::already_mapped);
  CHECK_CODE(tensor->map(10 * kPage, 61 * kPage), Code::no_room);
  CHECK_CODE(tensor->map(99 * kPage, 2 * kPage), Code::invalid_argument);
  CHECK_CODE(tensor->map(kPage / 2, kPage), Code::not_aligned);
  CHECK_CODE(tensor->unmap(9 * kPage, 2 * kPage), Code::not_mapped);
  f.vmm->fail_at(2);
  CHECK_CODE(tensor->map(10 * kPage, kPage), Code::system_call);
  CHECK(f.charged() == 14 * kPage);
  CHECK_OK(tensor->unmap(2 * kPage, 5 * kPage));
  CHECK(f.charged() == 9 * kPage && tensor->mapped_bytes() == 5 * kPage);
  CHECK_OK(tensor->close());
  CHECK_CODE(tensor->map(0, kPage), Code::closed);
  CHECK(f.charged() == 4 * kPage);
}

void a_forked_child_shares_nothing() {
  Fixture f;
  const auto address = f.cache->region()->address();
  CHECK(is_accessible(address));
  const pid_t child = fork();
  if (child == 0) {
    std::vector<int64_t> ids(1);
    const bool dead = f.cache->alloc(ids).code == Code::forked && !is_accessible(address) &&
                      f.client->close().ok();
    auto own = Client::open(f.ledger, "host:0", {.name = "child"});
    _exit(dead && own.ok() && own.value()->close().ok() ? 0 : 1);
  }
  int outcome = 0;
  CHECK(waitpid(child, &outcome, 0) == child && WEXITSTATUS(outcome) == 0);
  CHECK(alloc(*f.cache, 1).size() == 1);
  CHECK(value_of(f.ledger->usage()).clients.size() == 1);
}

}  // namespace

void test_kv_cache(const std::string& device) {
  device_under_test = device;
  slabs_come_and_go_with_their_blocks();
  a_page_that_is_gone_is_noticed();
  a_failed_growth_leaves_nothing_behind();
  a_failed_unmap_keeps_the_slab_in_use();
  a_stranded_slab_is_retired();
  spare_pages_are_kept_between_the_watermarks();
  a_full_device_is_tried_again_until_the_deadline();
  a_failing_quarantine_keeps_slabs_in_use();
  a_close_that_fails_half_way_is_no_cache_any_more();
  a_close_that_fails_at_once_changes_nothing();
  nothing_is_closed_under_work();
  virtual_tensors_map_and_unmap_ranges();
  if (device == "host:0") a_forked_child_shares_nothing();
}

}  // namespace kvcached::testing
