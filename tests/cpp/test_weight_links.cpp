// Loads over the links of several GPUs of the test libcuda.
#include <cstring>
#include <string>

#include "backends.h"
#include "check.h"
#include "control.h"
#include "weight_fixture.h"

namespace kvcached::testing {

namespace {

// Two GPUs of the test libcuda, with a client on each.
struct TwoDevices : WeightFixture {
  TwoDevices() : WeightFixture("cuda:0") {}

  std::string other_path = fresh_ledger_path();
  std::shared_ptr<Ledger> other_ledger =
      value_of(Ledger::open({other_path, kWeightCapacity, kPage}));
  std::shared_ptr<Client> other =
      value_of(Client::open(other_ledger, "cuda:1", {.name = "helper"}));

  ~TwoDevices() {
    CHECK(leased() == 0);
    CHECK_OK(other->close());
    CHECK_OK(other_ledger->destroy(false));
  }
  uint64_t leased() { return value_of(other->record()).committed_bytes; }
};

bool holds(const WeightArena& arena, const std::string& content) {
  const void* const address = reinterpret_cast<const void*>(cpu_view(arena.region()->address()));
  return std::memcmp(address, content.data(), content.size()) == 0;
}

void several_links_fill_one_arena() {
  TwoDevices f;
  const SourceFile file(20 * kPage + 5);
  const auto from_host =
      cuda_function<decltype(test_cuda_from_host_bytes)>("test_cuda_from_host_bytes");
  const auto from_peer =
      cuda_function<decltype(test_cuda_from_peer_bytes)>("test_cuda_from_peer_bytes");
  const uint64_t before[] = {from_host(0), from_host(1), from_peer(0)};
  auto links = value_of(WeightLinks::open(f.client, {.threads = 2, .staging_bytes = 8 * kPage}));
  CHECK_OK(links->add(f.other, kPage / 2));
  CHECK(f.leased() == 9 * kPage);
  CHECK(f.static_bytes() == 0 && links->lanes() == 4 && links->chunk_bytes_max() == 2 * kPage);
  uint64_t carried[] = {0, 0};
  for (int turn = 0; turn < 3; ++turn) {
    const auto arena = value_of(WeightArena::create(f.client, 21 * kPage));
    const auto load = value_of(WeightLoad::start(arena, {{file.path, 0, file.content.size(), 0}},
                                                 links, {.chunk_bytes = kPage / 4}));
    CHECK(load->wait(kLong));
    CHECK_OK(load->outcome());
    CHECK(holds(*arena, file.content) && load->lost().empty());
    carried[0] += load->carried().at("cuda:0");
    carried[1] += load->carried().at("cuda:1");
    CHECK_OK(arena->close());
  }
  const uint64_t direct = from_host(0) - before[0];
  const uint64_t relayed = from_host(1) - before[1];
  CHECK(direct + relayed == 3 * file.content.size() && relayed == from_peer(0) - before[2]);
  CHECK(direct > 0 && relayed > 0 && direct == carried[0] && relayed == carried[1]);
  const auto elsewhere = value_of(WeightArena::create(f.other, kPage));
  CHECK_CODE(WeightLoad::start(elsewhere, {}, links, {}).status(), Code::invalid_argument);
  CHECK_OK(elsewhere->close());
}

void a_helper_comes_and_goes() {
  TwoDevices f;
  auto links = value_of(WeightLinks::open(f.client, {.threads = 1, .staging_bytes = 2 * kPage}));
  CHECK_CODE(links->add(f.client, 0), Code::invalid_argument);
  CHECK_CODE(links->add(f.other, kWeightCapacity), Code::no_room);
  CHECK_OK(f.other->close());
  CHECK_CODE(links->add(f.other, 0), Code::closed);
  f.other = value_of(Client::open(f.other_ledger, "cuda:1", {.name = "helper"}));
  for (int turn = 0; turn < 2; ++turn) {
    CHECK_OK(links->add(f.other, 0));
    CHECK_CODE(links->add(f.other, 0), Code::invalid_argument);
    CHECK(f.leased() == 2 * kPage && links->lanes() == 2);
    CHECK_CODE(f.other->close(), Code::in_use);
    CHECK_OK(links->drop(*f.other));
    CHECK_OK(links->drop(*f.other));
    CHECK(f.leased() == 0 && links->lanes() == 1);
  }
  CHECK_OK(links->add(f.other, 0));
  CHECK(links->acquire());
  CHECK_CODE(links->drop(*f.other), Code::busy);
  links->release();
  links.reset();
  CHECK(f.leased() == 0);
}

// A link fails after any of its calls: the other one loads everything.
void a_lost_link_loses_no_byte() {
  const auto lose = cuda_function<decltype(test_cuda_lose)>("test_cuda_lose");
  const SourceFile file(12 * kPage + 3);
  TwoDevices f;
  bool passed = false;
  for (uint64_t calls = 0; !passed; ++calls) {
    auto links = value_of(WeightLinks::open(f.client, {.threads = 2, .staging_bytes = 8 * kPage}));
    CHECK_OK(links->add(f.other, 0));
    const auto arena = value_of(WeightArena::create(f.client, 13 * kPage));
    lose(1, calls);
    const auto load = value_of(WeightLoad::start(arena, {{file.path, 0, file.content.size(), 0}},
                                                 links, {.chunk_bytes = kPage / 4}));
    CHECK(load->wait(kLong));
    CHECK_OK(load->outcome());
    lose(1, UINT64_MAX);
    CHECK(holds(*arena, file.content));
    uint64_t carried = 0;
    for (const auto& [link, bytes] : load->carried()) carried += bytes;
    CHECK(carried == file.content.size() && load->started_bytes() == load->total_bytes());
    passed = load->lost().empty();
    CHECK(passed || load->lost().at("cuda:1").code == Code::system_call);
    CHECK_OK(arena->close());
    CHECK(calls < 500);
  }
}

// Each of the driver's calls fails in turn, while links are opened and used. The result is an error
// or every byte over the other link, and everything is released.
void a_failing_call_of_a_link_leaves_nothing() {
  const auto fail_at = cuda_function<decltype(test_cuda_fail_at)>("test_cuda_fail_at");
  const SourceFile file(6 * kPage);
  TwoDevices f;
  bool passed = false;
  for (uint64_t call = 1; !passed; ++call) {
    const auto arena = value_of(WeightArena::create(f.client, 6 * kPage));
    CHECK_OK(arena->back(6 * kPage));
    fail_at(call, 1, 1);
    auto links = WeightLinks::open(f.client, {.threads = 1, .staging_bytes = 4 * kPage});
    const Status added = links.ok() ? links.value()->add(f.other, 0) : links.status();
    if (added.ok()) {
      const auto load =
          value_of(WeightLoad::start(arena, {{file.path, 0, 6 * kPage, 0}}, links.value(), {}));
      CHECK(load->wait(kLong));
      const Status outcome = load->outcome();
      CHECK(outcome.ok() ? holds(*arena, file.content) : outcome.code == Code::system_call);
      passed = outcome.ok() && load->lost().empty();
    } else {
      CHECK(added.code == Code::system_call && f.leased() == 0);
    }
    fail_at(0, 0, 0);
    CHECK_OK(arena->close());
    CHECK(call < 200);
  }
}

}  // namespace

void test_weight_links() {
  several_links_fill_one_arena();
  a_helper_comes_and_goes();
  a_lost_link_loses_no_byte();
  a_failing_call_of_a_link_leaves_nothing();
}

}  // namespace kvcached::testing
