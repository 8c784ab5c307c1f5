#include "world.h"

#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "kv_cache.h"
#include "subject.h"

namespace kvcached::testing {

namespace {

constexpr uint64_t kBystanderMin = 8 * kPage;

void wait_until(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!holds()) {
    CHECK(std::chrono::steady_clock::now() < end);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace

struct World::Orders {
  enum Word { run, pause, end };
  std::atomic<int> word;
  std::atomic<int> obeyed;
  std::atomic<uint64_t> rounds;
};

namespace {

template <class Orders>
void stand_by(const std::string& path, const std::string& device, Orders& orders) {
  auto client = value_of(Client::open(value_of(Ledger::open({path, {}, {}})), device,
                                      {.name = "bystander", .min_bytes = kBystanderMin}));
  auto cache = value_of(KvCache::create(client, {{1, 1}, 4, 4, 1}));
  touch(*client->vmm(), *cache->region());
  std::vector<int64_t> ids(15);
  while (orders.word != Orders::end) {
    CHECK_OK(cache->alloc(ids));
    touch(*client->vmm(), *cache->region());
    CHECK_OK(cache->free(ids));
    CHECK_OK(cache->check());
    ++orders.rounds;
    do {
      orders.obeyed = orders.word.load();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    } while (orders.word == Orders::pause);
  }
  CHECK_OK(cache->close());
  CHECK_OK(client->close());
}

}  // namespace

World::World(std::string name) : device(std::move(name)) {
  ledger = value_of(Ledger::open({path, kCapacity, kPage}));
  void* memory =
      mmap(nullptr, sizeof(Orders), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  orders_ = new (memory) Orders{};
  bystander_ = fork();
  CHECK(bystander_ >= 0);
  if (bystander_ == 0) {
    stand_by(path, device, *orders_);
    _exit(0);
  }
  held = std::make_unique<Member>(ledger, ClientOptions{.name = "held", .min_bytes = 2 * kPage});
  CHECK_OK(ledger->reserve(held->slot, 5 * kPage));
  wait_until([&] { return orders_->rounds > 0; });
  pause_bystander();
  charged_ = value_of(ledger->usage()).charged_bytes;
  CHECK(charged_ == 5 * kPage + kBystanderMin);
  resident_ = value_of(ledger->resident_bytes());
  orders_->word = Orders::run;
}

World::~World() {
  orders_->word = Orders::end;
  int status = 0;
  CHECK(waitpid(bystander_, &status, 0) == bystander_ && status == 0);
  CHECK_OK(ledger->cancel(held->slot, 5 * kPage));
  held.reset();
  CHECK_OK(ledger->destroy(false));
}

void World::pause_bystander() {
  orders_->word = Orders::pause;
  wait_until([&] { return orders_->obeyed == Orders::pause; });
}

void World::check_whole() {
  const uint64_t rounds = orders_->rounds;
  wait_until([&] { return orders_->rounds > rounds + 1; });  // two begun after the death
  pause_bystander();
  wait_until([&] { return value_of(ledger->usage()).charged_bytes == charged_; });
  CHECK(value_of(ledger->usage()).clients.size() == 2);
  CHECK(value_of(ledger->resident_bytes()) == resident_);
  CHECK_OK(ledger->reserve(held->slot, free_bytes()));
  CHECK_CODE(ledger->reserve(held->slot, kPage), Code::no_room);
  CHECK_OK(ledger->cancel(held->slot, free_bytes()));
  orders_->word = Orders::run;
}

void check_starts_whole(const std::string& path) {
  const auto ledger = value_of(Ledger::open({path, kCapacity, kPage}));
  CHECK(value_of(ledger->resident_bytes()) == 0);
  {
    const Member member(ledger);
    CHECK_OK(ledger->reserve(member.slot, kCapacity));
  }
  CHECK_OK(ledger->destroy(false));
  CHECK(access(path.c_str(), F_OK) != 0);
}

void touch(const Vmm& vmm, const Region& region) {
  if (vmm.location().on_gpu) return;
  for (uint64_t offset = 0; offset < region.bytes(); offset += kPage) {
    const uint64_t page = region.address() + offset;
    if (is_readable(page)) memset(reinterpret_cast<void*>(page), 1, kPage);
  }
}

void leave_a_dead_client(const std::string& path, uint64_t bytes) {
  (void)run_subject(
      [&] {
        const auto ledger = value_of(Ledger::open({path, {}, {}}));
        const int lock_fd = value_of(ledger->open_lock_fd());
        const int slot = value_of(ledger->join({.name = "dead"}, lock_fd, -1));
        CHECK_OK(ledger->reserve(slot, bytes));
        CHECK_OK(ledger->commit(slot, bytes));
      },
      0);
}

}  // namespace kvcached::testing
