// race DEVICE OPERATIONS SEED: eight processes map and unmap runs of pages on one device that has
// half of what they want, OPERATIONS in all, and touch what they get. A ninth reads the ledger and
// the bytes that the OS holds, all the time: neither is ever above the capacity. In the end, while
// all hold still, both agree with what the processes say; then everything is given back.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "ledger_fixture.h"
#include "virtual_tensor.h"

namespace kvcached::testing {

namespace {

constexpr int kRacers = 8;
constexpr uint64_t kSmallPage = 4096;
constexpr uint64_t kPages = 512;                    // of the device
constexpr uint64_t kWanted = 2 * kPages / kRacers;  // of each racer
constexpr uint64_t kLongestRun = 8;
constexpr uint64_t kMinimum = 4 * kSmallPage;

// In memory shared with the children.
struct Shared {
  std::atomic<bool> over;
  std::atomic<int> still;      // racers that have raced
  std::atomic<uint64_t> held;  // pages of those
  std::atomic<uint64_t> granted;
  std::atomic<uint64_t> refused;
  std::atomic<uint64_t> looks;
};

class Racer {
 public:
  Racer(const std::string& path, const std::string& device, unsigned seed)
      : client_(value_of(Client::open(value_of(Ledger::open({path, {}, {}})), device,
                                      {.name = "racer", .min_bytes = kMinimum}))),
        tensor_(value_of(VirtualTensor::create(client_, kWanted * kSmallPage))),
        mapped_(kWanted, false),
        random_(seed) {}

  void run(uint64_t operations) {
    for (uint64_t i = 0; i < operations; ++i) step();
    const ClientRecord record = value_of(client_->record());
    CHECK(record.committed_bytes == held() * kSmallPage && record.pending_bytes == 0);
  }
  void close() { CHECK_OK(client_->close()); }

  uint64_t held() const {
    return static_cast<uint64_t>(std::count(mapped_.begin(), mapped_.end(), true));
  }
  uint64_t granted = 0;
  uint64_t refused = 0;

 private:
  // One operation: a run of pages that are all mapped, or all not, changes sides.
  void step() {
    const uint64_t first = random_() % kWanted;
    const bool was = mapped_[first];
    const uint64_t end = std::min(kWanted, first + 1 + random_() % kLongestRun);
    uint64_t last = first + 1;
    while (last < end && mapped_[last] == was) ++last;
    const uint64_t bytes = (last - first) * kSmallPage;
    if (was) {
      CHECK_OK(tensor_->unmap(first * kSmallPage, bytes));
    } else if (const Status status = tensor_->map(first * kSmallPage, bytes); !status.ok()) {
      CHECK_CODE(status, Code::no_room);
      ++refused;
      return;
    } else {
      touch(first, last);
      ++granted;
    }
    std::fill(mapped_.begin() + static_cast<std::ptrdiff_t>(first),
              mapped_.begin() + static_cast<std::ptrdiff_t>(last), !was);
  }

  void touch(uint64_t first, uint64_t last) {
    if (client_->vmm()->location().on_gpu) return;
    for (uint64_t page = first; page < last; ++page) {
      *reinterpret_cast<volatile char*>(tensor_->region()->address() + page * kSmallPage) = 1;
    }
  }

  const std::shared_ptr<Client> client_;
  const std::shared_ptr<VirtualTensor> tensor_;
  std::vector<bool> mapped_;
  std::minstd_rand random_;
};

pid_t start(const std::function<void()>& work) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child > 0) return child;
  work();
  _exit(0);
}

void expect_success(pid_t child) {
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

void race(Shared& shared, Racer& racer, uint64_t operations) {
  racer.run(operations);
  shared.granted += racer.granted;
  shared.refused += racer.refused;
  shared.held += racer.held();
  ++shared.still;
  while (!shared.over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  racer.close();
}

void watch(Shared& shared, const std::string& path) {
  const auto ledger = value_of(Ledger::open({path, {}, {}}));
  for (; shared.still < kRacers; ++shared.looks) {
    CHECK(value_of(ledger->resident_bytes()) <= kPages * kSmallPage);
    const LedgerUsage usage = value_of(ledger->usage());
    uint64_t charged = 0;
    for (const ClientRecord& client : usage.clients) charged += client.charge_bytes();
    CHECK(charged == usage.charged_bytes && charged <= kPages * kSmallPage);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void run_race(const std::string& device, uint64_t operations, unsigned seed) {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  Shared& shared = *new (memory) Shared{};
  const std::string path = fresh_ledger_path();
  const auto ledger = value_of(Ledger::open({path, kPages * kSmallPage, kSmallPage}));
  std::vector<pid_t> children;
  for (unsigned i = 0; i < kRacers; ++i) {
    children.push_back(start([&] {
      Racer racer(path, device, seed + i + 1);
      race(shared, racer, operations / kRacers);
    }));
  }
  expect_success(start([&] { watch(shared, path); }));
  const uint64_t held_bytes = shared.held * kSmallPage;
  CHECK(value_of(ledger->resident_bytes()) == held_bytes);
  uint64_t committed = 0;
  for (const ClientRecord& c : value_of(ledger->usage()).clients) committed += c.committed_bytes;
  CHECK(committed == held_bytes);
  shared.over = true;
  for (const pid_t child : children) expect_success(child);
  CHECK(value_of(ledger->usage()).charged_bytes == 0 && value_of(ledger->resident_bytes()) == 0);
  CHECK_OK(ledger->destroy(false));
  CHECK(shared.granted > 0 && shared.refused > 0 && shared.looks > 0);
  std::printf("%lu operations: %lu runs granted, %lu refused, %lu looks\n", operations,
              shared.granted.load(), shared.refused.load(), shared.looks.load());
}

}  // namespace

}  // namespace kvcached::testing

int main(int count, char** arguments) {
  CHECK(count == 4);
  kvcached::testing::run_race(arguments[1], std::strtoull(arguments[2], nullptr, 10),
                              static_cast<unsigned>(std::strtoul(arguments[3], nullptr, 10)));
  return 0;
}
