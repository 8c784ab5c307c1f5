#include "ledger_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "ledger_check.h"
#include "liveness.h"
#include "steps.h"

namespace kvcached {

namespace {

constexpr mode_t kMode = 0600;

// Accepts a file of this user only, because its owner can write to it at any time.
Result<int> own(int fd, const std::string& path) {
  struct stat info = {};
  if (fstat(fd, &info) == 0 && info.st_uid == geteuid()) return fd;
  ::close(fd);
  return open_failure(path, EPERM);
}

// Two attempts, because a file of another user in a sticky directory cannot be opened with O_CREAT
// (protected_regular).
Result<int> open_file(const std::string& path, bool create) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 && errno == ENOENT && create) {
      fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kMode);
    }
    if (fd >= 0) return own(fd, path);
    if (errno != EEXIST && !(errno == ENOENT && create)) break;
  }
  return open_failure(path, errno);
}

// Opens the file at `path` and locks its byte 0. Retries if it is removed between open and lock.
Result<int> open_locked(const std::string& path, bool create) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    KV_ASSIGN(int fd, open_file(path, create));
    step("open: there is a file");
    Status locked = lock_byte(fd, 0, true);
    step("open: the file is locked");
    if (locked.ok() && is_still_at(fd, path)) return fd;
    ::close(fd);
    if (!locked.ok()) return locked;
  }
  return failure(Code::busy, path, " is created and removed repeatedly; try again");
}

Result<LedgerSegment*> map_segment(int fd) {
  void* memory = mmap(nullptr, sizeof(LedgerSegment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return system_failure("mmap of the ledger", errno);
  return static_cast<LedgerSegment*>(memory);
}

Result<LedgerSegment*> create_segment(int fd, const LedgerOptions& options) {
  if (const int error = posix_fallocate(fd, 0, sizeof(LedgerSegment)); error != 0) {
    if (error == ENOSPC || error == EDQUOT) {
      return failure(Code::shm_full, "no room for the ledger at ", options.path,
                     "; free space in /dev/shm or enlarge it");
    }
    return system_failure("fallocate of the ledger", error);
  }
  step("create: the file has its size");
  KV_ASSIGN(auto mapped, map_segment(fd));
  LedgerSegment& segment = *mapped;
  segment.version = kLedgerVersion;
  segment.segment_bytes = sizeof(LedgerSegment);
  strncpy(segment.boot_id, current_boot_id().c_str(), sizeof(segment.boot_id) - 1);
  segment.capacity_bytes = *options.capacity_bytes;
  segment.page_bytes = *options.page_bytes;
  step("create: the geometry is written");
  memcpy(segment.magic, kLedgerMagic, sizeof(kLedgerMagic));
  step("create: done");
  return &segment;
}

// Opens the file of a usable ledger, or an empty one, with byte 0 locked. An unusable file is
// removed first: truncating it in place would fault a process that still maps it.
Result<int> open_usable(const LedgerOptions& options) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    KV_ASSIGN(int fd, open_locked(options.path, options.capacity_bytes.has_value()));
    struct stat info = {};
    if (fstat(fd, &info) == 0 && info.st_size == 0 && options.capacity_bytes) return fd;
    Result<FileState> state = examine_file(fd, options.path);
    if (state.ok() && state.value() == FileState::usable) return fd;
    const int error =
        state.ok() && ::unlink(options.path.c_str()) != 0 && errno != ENOENT ? errno : 0;
    ::close(fd);
    if (!state.ok()) return state.status();
    if (error != 0) return open_failure(options.path, error);
    step("open: an abandoned ledger is removed");
  }
  return failure(Code::busy, options.path, " is created and removed repeatedly; try again");
}

Result<LedgerSegment*> attach(int fd, const LedgerOptions& options) {
  KV_ASSIGN(auto segment, map_segment(fd));
  const Status status = check_geometry(*segment, options);
  if (status.ok()) return segment;
  munmap(segment, sizeof(LedgerSegment));
  return status;
}

Result<LedgerSegment*> attach_or_create(int fd, const LedgerOptions& options) {
  struct stat info = {};
  if (fstat(fd, &info) != 0) return system_failure("fstat of the ledger", errno);
  return info.st_size == 0 ? create_segment(fd, options) : attach(fd, options);
}

}  // namespace

std::string current_boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id.substr(0, sizeof(LedgerSegment::boot_id) - 1);
}

Status open_failure(const std::string& path, int error) {
  if (error == ENOENT) {
    return failure(Code::unknown_device, "no ledger at ", path,
                   "; open the device with capacity_bytes to create it");
  }
  if (error == EACCES || error == EPERM) {
    return failure(Code::permission, "no permission on ", path,
                   "; run as the user that created it, or use another "
                   "namespace");
  }
  return system_failure(("open " + path).c_str(), error);
}

bool is_still_at(int fd, const std::string& path) {
  struct stat by_fd = {};
  struct stat by_path = {};
  return fstat(fd, &by_fd) == 0 && stat(path.c_str(), &by_path) == 0 &&
         by_fd.st_ino == by_path.st_ino && by_fd.st_dev == by_path.st_dev;
}

Result<LedgerFile> open_ledger_file(const LedgerOptions& options) {
  const bool create = options.capacity_bytes.has_value();
  if (create) {
    KV_TRY(check_geometry_values(options));
  }
  KV_ASSIGN(int fd, open_usable(options));
  Result<LedgerSegment*> segment = attach_or_create(fd, options);
  if (!segment.ok()) {
    struct stat info = {};
    if (fstat(fd, &info) == 0 && info.st_size == 0) ::unlink(options.path.c_str());
    ::close(fd);
    return segment.status();
  }
  if (Status shared = share_byte(fd, kOpenByte); !shared.ok()) {
    munmap(segment.value(), sizeof(LedgerSegment));
    ::close(fd);
    return shared;
  }
  step("open: shown to be in use");
  Result<Opening> opening = claim_opening(fd, &segment.value()->lock);
  if (!opening.ok()) {
    munmap(segment.value(), sizeof(LedgerSegment));
    ::close(fd);
    return opening.status();
  }
  unlock_byte(fd, 0);  // without a close, because the fd stays open
  return LedgerFile{opening.value(), segment.value()};
}

Opening reopen(const Opening& parents, LedgerSegment* segment) {
  Opening same = parents;
  same.pid = getpid();
  char path[32];
  snprintf(path, sizeof(path), "/proc/self/fd/%d", parents.fd);
  const Descriptor file(::open(path, O_RDWR | O_CLOEXEC));
  if (file.get() < 0 || !share_byte(file.get(), kOpenByte).ok()) return same;
  Result<Opening> opening = claim_opening(file.get(), &segment->lock);
  if (!opening.ok() || dup3(file.get(), parents.fd, O_CLOEXEC) < 0) return same;
  // The old mapping keeps the parent's opening open.
  (void)mmap(segment, sizeof(LedgerSegment), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             parents.fd, 0);
  opening.value().fd = parents.fd;
  return opening.value();
}

Result<FileLock> FileLock::take(const std::string& path) {
  KV_ASSIGN(int fd, open_locked(path, false));
  return FileLock(fd);
}

}  // namespace kvcached
