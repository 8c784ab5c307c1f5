// Program of kv_ledger.py: leases of the ledger against a bare robust mutex.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>

#include "ledger.h"

namespace kvcached {

namespace {

constexpr uint64_t kPage = 65536;
constexpr uint64_t kPages = 128;

// Variables in memory shared with the children.
struct Shared {
  pthread_mutex_t mutex;
  std::atomic<int> waiting;
  std::atomic<bool> started;
  std::atomic<bool> over;
  std::atomic<uint64_t> refused;
};

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "kv_ledger: %s\n", what);
  std::exit(1);
}

Shared* make_shared_memory() {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  require(memory != MAP_FAILED, "mmap failed");
  auto* shared = new (memory) Shared{};
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&shared->mutex, &attributes);
  return shared;
}

// Returns the path, which is computed before the fork, so that the children have the same.
const std::string& ledger_path() {
  static const std::string path =
      "/dev/shm/prism-kvcached.bench-" + std::to_string(getpid()) + ".host:0";
  return path;
}

int join(Ledger& ledger) {
  Result<int> lock = ledger.open_lock_fd();
  require(lock.ok(), "no lock");
  Result<int> slot = ledger.join({.name = "bench"}, lock.value(), -1);
  require(slot.ok(), "cannot join");
  return slot.value();
}

// Makes a lease and ends it. Counts a refused one.
uint64_t lease(Ledger& ledger, int slot, uint64_t pages) {
  const uint64_t bytes = pages * kPage;
  const Status reserved = ledger.reserve(slot, bytes);
  if (reserved.code == Code::no_room) return 1;
  require(reserved.ok() && ledger.commit(slot, bytes).ok() && ledger.release(slot, bytes).ok(),
          "a lease failed");
  return 0;
}

void lock_and_unlock(Shared& shared) {
  pthread_mutex_lock(&shared.mutex);
  pthread_mutex_unlock(&shared.mutex);
}

double seconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e9;
}

double cpu_seconds_of(int count, const std::function<void()>& step) {
  const double begin = seconds(CLOCK_THREAD_CPUTIME_ID);
  for (int i = 0; i < count; ++i) step();
  return seconds(CLOCK_THREAD_CPUTIME_ID) - begin;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void compare_alone(Ledger& ledger, Shared& shared, int count, int pairs) {
  const int slot = join(ledger);
  std::vector<double> leases, bare, ratios;
  for (int i = 0; i < pairs; ++i) {
    leases.push_back(cpu_seconds_of(count, [&] { (void)lease(ledger, slot, 1); }));
    bare.push_back(cpu_seconds_of(count, [&] { lock_and_unlock(shared); }));
    ratios.push_back(leases.back() / bare.back());
  }
  std::printf("alone: lease %.1f ns against lock and unlock %.1f ns: ratio %.2f (target 10)\n",
              median(leases) / count * 1e9, median(bare) / count * 1e9, median(ratios));
  require(ledger.leave(slot).ok(), "cannot leave");
}

// Marks the end of a child's set-up and waits for the common start.
void wait_for_start(Shared& shared) {
  ++shared.waiting;
  while (!shared.started) usleep(100);
}

// Runs `work`, which calls wait_for_start, in that many concurrent children. Returns the seconds
// from their common start to the end of the last.
double together(Shared& shared, int processes, const std::function<void(int)>& work) {
  shared.waiting = 0;
  shared.started = false;
  for (int i = 0; i < processes; ++i) {
    if (const pid_t child = fork(); child == 0) {
      work(i);
      std::_Exit(0);
    } else {
      require(child > 0, "fork failed");
    }
  }
  while (shared.waiting < processes) usleep(100);
  const double begin = seconds(CLOCK_MONOTONIC);
  shared.started = true;
  for (int i = 0; i < processes; ++i) {
    int outcome = 0;
    require(wait(&outcome) > 0 && outcome == 0, "a process failed");
  }
  return seconds(CLOCK_MONOTONIC) - begin;
}

// Reads the ledger until the others are done. Fails if more is charged than the device has.
pid_t start_watching(Shared& shared) {
  const pid_t watcher = fork();
  if (watcher != 0) return watcher;
  auto ledger = Ledger::open({ledger_path(), {}, {}});
  require(ledger.ok(), "the watcher cannot attach");
  while (!shared.over) {
    Result<LedgerUsage> usage = ledger.value()->usage();
    require(usage.ok() && usage.value().charged_bytes <= kPages * kPage, "over-commit");
    usleep(1000);
  }
  std::_Exit(0);
}

// Makes leases of up to `largest` pages.
void hammer(Shared& shared, int seed, int count, unsigned largest) {
  auto ledger = Ledger::open({ledger_path(), {}, {}});
  require(ledger.ok(), "a process cannot attach");
  const int slot = join(*ledger.value());
  std::minstd_rand random(static_cast<unsigned>(seed) + 1);
  uint64_t refused = 0;
  wait_for_start(shared);
  for (int i = 0; i < count; ++i) refused += lease(*ledger.value(), slot, 1 + random() % largest);
  shared.refused += refused;
}

// Each pair has leases, then a bare loop of as many locks and unlocks as the leases took: three for
// a granted one, one for a refused one.
void compare_together(Shared& shared, int processes, int count, unsigned largest, int pairs) {
  std::vector<double> rates, refused, of_bare, of_one_lock;
  const double tries = 1.0 * processes * count;
  for (int pair = 0; pair < pairs; ++pair) {
    shared.refused = 0;
    const double lease_s =
        together(shared, processes, [&](int i) { hammer(shared, i, count, largest); });
    refused.push_back(static_cast<double>(shared.refused.load()) / tries);
    const int locks = static_cast<int>(count * (3 - 2 * refused.back()));
    const double bare_s = together(shared, processes, [&](int) {
      wait_for_start(shared);
      for (int i = 0; i < locks; ++i) lock_and_unlock(shared);
    });
    rates.push_back(tries / lease_s);
    of_bare.push_back(bare_s / lease_s);
    of_one_lock.push_back(bare_s / lease_s * count / locks);
  }
  std::printf(
      "%d processes, 1 to %u of %lu pages: %.0f leases a second, %.0f %% refused; of the bare loop "
      "%.2f (target 0.5; %.2f of one with a single lock for each lease)\n",
      processes, largest, kPages, median(rates), 100 * median(refused), median(of_bare),
      median(of_one_lock));
}

}  // namespace

}  // namespace kvcached

int main(int, char** arguments) {
  using namespace kvcached;
  Shared& shared = *make_shared_memory();
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  auto ledger = Ledger::open({ledger_path(), kPages * kPage, kPage});
  require(ledger.ok(), "cannot make a ledger");
  compare_alone(*ledger.value(), shared, std::atoi(arguments[1]), std::atoi(arguments[2]));
  const pid_t watcher = start_watching(shared);
  // Room for all of them, then a device that is full most of the time.
  for (const unsigned largest : {16u, 120u}) {
    compare_together(shared, std::atoi(arguments[3]), std::atoi(arguments[4]), largest,
                     std::atoi(arguments[2]));
  }
  shared.over = true;
  int outcome = 0;
  require(waitpid(watcher, &outcome, 0) == watcher && outcome == 0, "over-commit was seen");
  require(ledger.value()->destroy(true).ok(), "cannot remove the ledger");
  return 0;
}
