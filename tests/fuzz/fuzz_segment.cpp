// fuzz_segment SEED ROUNDS: damages the bytes of a ledger's segment, at random and field by field,
// and makes every call on it: of a process that attaches to it then, and of one that had it open.
// Any status is right; a crash, a hang or a huge allocation ends the program.
// Each round runs in a child. If it fails, its seed is printed: run it alone with that seed.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <random>

#include "futex.h"
#include "ledger_fixture.h"
#include "ledger_lock.h"
#include "segments.h"

namespace kvcached::testing {

namespace {

constexpr unsigned kRoundSeconds = 20;

struct Field {
  size_t offset;
  size_t bytes;
};

#define FIELD(type, name) \
  Field { offsetof(type, name), sizeof(type::name) }

constexpr Field kHeader[] = {
    FIELD(LedgerSegment, magic),          FIELD(LedgerSegment, version),
    FIELD(LedgerSegment, segment_bytes),  FIELD(LedgerSegment, boot_id),
    FIELD(LedgerSegment, capacity_bytes), FIELD(LedgerSegment, page_bytes),
    FIELD(LedgerSegment, destroyed),      FIELD(LedgerSegment, charged_bytes),
    FIELD(LedgerSegment, lock),           FIELD(LedgerSegment, room),
    FIELD(LedgerSegment, has_waiters),    FIELD(LedgerSegment, tickets),
    FIELD(LedgerSegment, asks),
};

constexpr Field kRecord[] = {
    FIELD(ClientRecord, used),
    FIELD(ClientRecord, pid),
    FIELD(ClientRecord, memory_fd),
    FIELD(ClientRecord, pid_namespace),
    FIELD(ClientRecord, start_ticks),
    FIELD(ClientRecord, pending_bytes),
    FIELD(ClientRecord, committed_bytes),
    FIELD(ClientRecord, static_bytes),
    FIELD(ClientRecord, min_bytes),
    FIELD(ClientRecord, limit_bytes),
    FIELD(ClientRecord, name),
    FIELD(ClientRecord, joined),
    FIELD(ClientRecord, spare_bytes),
    FIELD(ClientRecord, evictable_bytes),
    FIELD(ClientRecord, active_ns),
    FIELD(ClientRecord, asked),
    FIELD(ClientRecord, answered),
    FIELD(ClientRecord, asked_bytes),
    FIELD(ClientRecord, asked_until_ns),
    FIELD(ClientRecord, wanted_bytes),
    FIELD(ClientRecord, wanted_until_ns),
    FIELD(ClientRecord, wanted_since),
};

class Damager {
 public:
  explicit Damager(unsigned seed) : random_(seed) {}

  size_t below(size_t bound) { return random_() % bound; }

  void damage(std::span<unsigned char> segment) {
    for (size_t times = 1 + below(4); times-- > 0;) {
      switch (below(4)) {
        case 0:
          segment[below(segment.size())] ^= static_cast<unsigned char>(1u << below(8));
          break;
        case 1:
          overwrite(segment, kHeader[below(std::size(kHeader))], 0);
          break;
        case 2:
          overwrite(segment, kRecord[below(std::size(kRecord))], record_offset(below(4)));
          break;
        default:
          memmove(&segment[record_offset(below(kMaxClients))], &segment[record_offset(below(3))],
                  sizeof(ClientRecord));
      }
    }
  }

 private:
  size_t record_offset(size_t slot) {
    return offsetof(LedgerSegment, clients) + slot * sizeof(ClientRecord);
  }

  void overwrite(std::span<unsigned char> segment, const Field& field, size_t base) {
    const uint64_t choices[] = {0,
                                1,
                                2,
                                kCapacity,
                                kCapacity + 1,
                                UINT64_MAX,
                                UINT64_MAX - 1,
                                uint64_t{1} << 63,
                                uint64_t{1} << 31,
                                random_()};
    const uint64_t value = choices[below(std::size(choices))];
    const size_t first = field.bytes <= 8 ? 0 : below(field.bytes - 7);
    if (field.bytes > 8 && below(2) == 0) {
      memset(&segment[base + field.offset], static_cast<int>(random_() % 256), field.bytes);
    } else {
      memcpy(&segment[base + field.offset + first], &value, std::min<size_t>(8, field.bytes));
    }
  }

  std::mt19937_64 random_;
};

// Every call that takes the ledger as it is.
void call_everything(Ledger& ledger, int slot) {
  (void)ledger.reserve(slot, kPage);
  (void)ledger.commit(slot, kPage);
  (void)ledger.release(slot, kPage);
  (void)ledger.reserve(slot, 2 * kCapacity);
  (void)ledger.cancel(slot, kPage);
  (void)ledger.reserve_static(slot, 7);
  (void)ledger.release_static(slot, 7);
  (void)ledger.set_limit(slot, 50 * kPage);
  (void)ledger.set_min(slot, kPage);
  (void)ledger.set_limit({.name = "b", .pid = {}}, kNoLimit);
  (void)ledger.set_min({.name = {}, .pid = getpid()}, 2 * kPage);
  (void)ledger.available(slot);
  (void)ledger.usage();
  (void)ledger.resident_bytes();
  (void)ledger.client(slot);
  (void)ledger.reap();
  const int64_t soon_ns = monotonic_ns() + 1'000'000;
  Result<std::optional<uint32_t>> seen = ledger.want(slot, kCapacity, false, soon_ns);
  if (seen.ok() && seen.value()) ledger.sleep(*seen.value(), soon_ns);
  ledger.end_wait(slot);
  Result<BalloonView> view = ledger.balloon_view();
  if (view.ok()) {
    std::vector<Ask> plan;
    for (size_t i = 0; i < view.value().slots.size(); ++i) {
      plan.push_back({view.value().slots[i], view.value().clients[i].joined, kPage});
    }
    (void)ledger.ask(plan, view.value().asks, monotonic_ns() + 1'000'000);
  }
  const Result<std::optional<ShrinkRequest>> request = ledger.shrink_request(slot);
  if (request.ok()) (void)ledger.answer(slot, {.number = 1, .bytes = kPage}, {});
}

void join_and_call_everything(Ledger& ledger) {
  const int lock_fd = value_of(ledger.open_lock_fd());
  Result<int> slot = ledger.join({.name = "late", .min_bytes = kPage}, lock_fd, -1);
  if (slot.ok()) {
    call_everything(ledger, slot.value());
    (void)ledger.leave(slot.value());
  }
  ::close(lock_fd);
}

int join(Ledger& ledger, const char* name) {
  return value_of(
      ledger.join({.name = name, .min_bytes = kPage}, value_of(ledger.open_lock_fd()), -1));
}

std::span<unsigned char> map_segment(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR);
  void* memory = mmap(nullptr, sizeof(LedgerSegment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(memory != MAP_FAILED);
  ::close(fd);
  return {static_cast<unsigned char*>(memory), sizeof(LedgerSegment)};
}

// A child's work. It ends without leaving: its clients die.
void damage_and_call(const std::string& path, unsigned seed) {
  Damager damager(seed);
  const auto open = value_of(Ledger::open({path, kCapacity, kPage}));
  const int slot = join(*open, "a");
  CHECK_OK(open->reserve(slot, 3 * kPage));
  CHECK_OK(open->reserve_static(join(*open, "b"), 5));
  damager.damage(map_segment(path));
  if (damager.below(8) == 0) {
    CHECK(truncate(path.c_str(), sizeof(LedgerSegment) + damager.below(2 * kPage)) == 0);
  }
  (void)inspect_segment(path);
  if (damager.below(2) == 0) call_everything(*open, slot);
  Result<std::shared_ptr<Ledger>> attached = Ledger::open({path, {}, {}});
  if (attached.ok()) join_and_call_everything(*attached.value());
  Result<std::shared_ptr<Ledger>> created = Ledger::open({path, kCapacity, kPage});
  if (created.ok()) join_and_call_everything(*created.value());
  (void)remove_if_stale(path);
  (void)open->destroy(damager.below(2) == 0);
  (void)inspect_segment(path);
}

bool survives(const std::string& path, unsigned seed) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(kRoundSeconds);
    damage_and_call(path, seed);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  ::unlink(path.c_str());
  return status == 0;
}

}  // namespace

}  // namespace kvcached::testing

int main(int count, char** arguments) {
  using namespace kvcached::testing;
  CHECK(count == 3);
  kvcached::lock_timeout_ns = 20'000'000;
  const auto seed = static_cast<unsigned>(std::strtoul(arguments[1], nullptr, 10));
  const auto rounds = static_cast<unsigned>(std::strtoul(arguments[2], nullptr, 10));
  const std::string path = fresh_ledger_path();
  for (unsigned round = 0; round < rounds; ++round) {
    if (survives(path, seed + round)) continue;
    std::printf("fails: fuzz_segment %u 1\n", seed + round);
    return 1;
  }
  std::printf("%u rounds from seed %u\n", rounds, seed);
  return 0;
}
