#include "book.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <set>

namespace test_libcuda {

namespace {

constexpr int kSlots = 192;
constexpr uint32_t kSharedRanges = 8192;
constexpr int64_t kMutexByte = 0;
constexpr int64_t kFirstSlotByte = 1;

uint64_t now_ns() {
  timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

struct Book::Shared {
  uint64_t name;
  uint64_t bytes;
  int64_t gpu;
};

struct Book::Slot {
  int64_t pid;             // 0: free
  uint64_t found_dead_ns;  // 0: not yet
  uint64_t bytes[kBookGpus];
  uint64_t shared_ranges;
};

struct Book::File {
  uint64_t last_name;
  Slot slots[kSlots];
  Shared shared[kSlots][kSharedRanges];
};

class Book::Locked {
 public:
  explicit Locked(Book& book) : book_(book) {
    (void)book_.lock_byte(kMutexByte, F_WRLCK, true);
    book_.bury_dead();
  }
  ~Locked() { (void)book_.lock_byte(kMutexByte, F_UNLCK, true); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  Book& book_;
};

bool Book::lock_byte(int64_t byte, int16_t type, bool waits) const {
  struct flock lock = {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return fcntl(fd_, waits ? F_OFD_SETLKW : F_OFD_SETLK, &lock) == 0;
}

bool Book::is_alive(int slot) const {
  if (slot == slot_) return true;
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = kFirstSlotByte + slot;
  lock.l_len = 1;
  return fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

void Book::bury_dead() {
  for (int i = 0; i < kSlots; ++i) {
    Slot& slot = file_->slots[i];
    if (slot.pid == 0 || is_alive(i)) continue;
    if (slot.found_dead_ns == 0) slot.found_dead_ns = now_ns();
    if (now_ns() - slot.found_dead_ns < teardown_ns_) continue;
    slot = {};
  }
}

bool Book::take_slot() {
  for (int i = 0; i < kSlots; ++i) {
    if (file_->slots[i].pid != 0 || !lock_byte(kFirstSlotByte + i, F_WRLCK, false)) continue;
    file_->slots[i].pid = getpid();
    slot_ = i;
    return true;
  }
  return false;
}

bool Book::open(const std::string& path, uint64_t teardown_ms, bool joins) {
  teardown_ns_ = teardown_ms * 1'000'000;
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd_ < 0 || ftruncate(fd_, sizeof(File)) != 0) return false;
  void* mapped = mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (mapped == MAP_FAILED) return false;
  (void)madvise(mapped, sizeof(File), MADV_DONTFORK);
  file_ = static_cast<File*>(mapped);
  const Locked locked(*this);
  return !joins || take_slot();
}

Book::Slot& Book::own() { return file_->slots[slot_]; }

uint64_t Book::sum(int gpu) const {
  uint64_t bytes = 0;
  std::set<uint64_t> counted;
  for (int owner = 0; owner < kSlots; ++owner) {
    const Slot& slot = file_->slots[owner];
    if (slot.pid == 0) continue;
    bytes += slot.bytes[gpu];
    for (uint64_t i = 0; i < slot.shared_ranges; ++i) {
      const Shared& shared = file_->shared[owner][i];
      if (shared.gpu == gpu && counted.insert(shared.name).second) bytes += shared.bytes;
    }
  }
  return bytes;
}

bool Book::take(int gpu, uint64_t bytes, uint64_t capacity_bytes) {
  const Locked locked(*this);
  const uint64_t used = sum(gpu);
  if (used > capacity_bytes || bytes > capacity_bytes - used) return false;
  own().bytes[gpu] += bytes;
  return true;
}

void Book::give(int gpu, uint64_t bytes) {
  const Locked locked(*this);
  own().bytes[gpu] -= bytes;
}

uint64_t Book::name_shared() {
  const Locked locked(*this);
  return ++file_->last_name;
}

bool Book::hold_shared(uint64_t name, int gpu, uint64_t bytes) {
  const Locked locked(*this);
  Slot& slot = own();
  if (slot.shared_ranges == kSharedRanges) return false;
  file_->shared[slot_][slot.shared_ranges++] = {name, bytes, gpu};
  return true;
}

void Book::drop_shared(uint64_t name) {
  const Locked locked(*this);
  uint64_t& ranges = own().shared_ranges;
  Shared* const shared = file_->shared[slot_];
  for (uint64_t i = 0; i < ranges; ++i) {
    if (shared[i].name != name) continue;
    shared[i] = shared[--ranges];
    return;
  }
}

uint64_t Book::used_bytes(int gpu) {
  const Locked locked(*this);
  return sum(gpu);
}

std::vector<ProcessUse> Book::processes(int gpu) {
  const Locked locked(*this);
  std::vector<ProcessUse> found;
  for (int owner = 0; owner < kSlots; ++owner) {
    const Slot& slot = file_->slots[owner];
    if (slot.pid == 0 || slot.found_dead_ns != 0) continue;
    uint64_t bytes = slot.bytes[gpu];
    for (uint64_t i = 0; i < slot.shared_ranges; ++i) {
      const Shared& shared = file_->shared[owner][i];
      if (shared.gpu == gpu) bytes += shared.bytes;
    }
    if (bytes != 0) found.push_back({static_cast<pid_t>(slot.pid), bytes});
  }
  return found;
}

void Book::abandon() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
  file_ = nullptr;
}

}  // namespace test_libcuda
