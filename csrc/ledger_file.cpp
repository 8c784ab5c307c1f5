#include "ledger_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "liveness.h"

namespace kvcached {

namespace {

constexpr mode_t kMode = 0660;

// A file of another user in a sticky directory may not be opened with O_CREAT (protected_regular),
// hence the two attempts.
Result<int> open_file(const std::string& path, bool create) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 && errno == ENOENT && create) {
      fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kMode);
    }
    if (fd >= 0) return fd;
    if (errno != EEXIST && !(errno == ENOENT && create)) break;
  }
  return open_failure(path, errno);
}

// The file at `path` with byte 0 locked; retries when it is removed between open and lock.
Result<int> open_locked(const std::string& path, bool create) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    Result<int> fd = open_file(path, create);
    if (!fd.ok()) return fd;
    Status locked = lock_byte(fd.value(), 0, true);
    if (locked.ok() && is_still_at(fd.value(), path)) return fd;
    ::close(fd.value());
    if (!locked.ok()) return locked;
  }
  return failure(Code::busy, path + " is created and removed over and over; try again");
}

Status check_geometry_values(const LedgerOptions& options) {
  const auto os_page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t page = options.page_bytes.value_or(0);
  if (page == 0 || page % os_page_bytes != 0) {
    return failure(Code::not_aligned, "page_bytes " + std::to_string(page) +
                                          " must be a positive multiple of " +
                                          std::to_string(os_page_bytes));
  }
  const uint64_t capacity = options.capacity_bytes.value_or(0);
  if (capacity < page) {
    return failure(Code::invalid_argument, "capacity_bytes " + std::to_string(capacity) +
                                               " is below one page of " + std::to_string(page) +
                                               " bytes; give the device more memory");
  }
  if (capacity % page != 0) {
    return failure(Code::not_aligned, "capacity_bytes " + std::to_string(capacity) +
                                          " must be a multiple of page_bytes " +
                                          std::to_string(page));
  }
  return {};
}

Status init_mutex(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error = pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  return error == 0 ? Status{} : system_failure("pthread_mutex_init", error);
}

Result<LedgerSegment*> map_segment(int fd) {
  void* memory = mmap(nullptr, sizeof(LedgerSegment), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return system_failure("mmap of the ledger", errno);
  return static_cast<LedgerSegment*>(memory);
}

Result<LedgerSegment*> create_segment(int fd, const LedgerOptions& options) {
  if (Status status = check_geometry_values(options); !status.ok()) return status;
  if (ftruncate(fd, 0) != 0) return system_failure("ftruncate of the ledger", errno);
  if (const int error = posix_fallocate(fd, 0, sizeof(LedgerSegment)); error != 0) {
    if (error == ENOSPC || error == EDQUOT) {
      return failure(Code::shm_full, "no room for the ledger at " + options.path +
                                         "; free space in /dev/shm or enlarge it");
    }
    return system_failure("fallocate of the ledger", error);
  }
  Result<LedgerSegment*> mapped = map_segment(fd);
  if (!mapped.ok()) return mapped;
  LedgerSegment& segment = *mapped.value();
  segment.version = kLedgerVersion;
  segment.segment_bytes = sizeof(LedgerSegment);
  strncpy(segment.boot_id, current_boot_id().c_str(), sizeof(segment.boot_id) - 1);
  segment.capacity_bytes = *options.capacity_bytes;
  segment.page_bytes = *options.page_bytes;
  if (Status status = init_mutex(&segment.mutex); !status.ok()) {
    munmap(&segment, sizeof(LedgerSegment));
    return status;
  }
  memcpy(segment.magic, kLedgerMagic, sizeof(kLedgerMagic));
  return &segment;
}

Status check_header(const LedgerSegment& segment, const std::string& path) {
  if (memcmp(segment.magic, kLedgerMagic, sizeof(kLedgerMagic)) != 0) {
    return failure(Code::corrupt, path +
                                      " is not a kvcached ledger; remove it or use another "
                                      "namespace");
  }
  if (segment.version != kLedgerVersion || segment.segment_bytes != sizeof(LedgerSegment)) {
    return failure(Code::version, path + " has ledger version " + std::to_string(segment.version) +
                                      ", this library has " + std::to_string(kLedgerVersion) +
                                      "; run one version of kvcached, or stop all engines and "
                                      "unlink the device");
  }
  return {};
}

Status check_geometry(const LedgerSegment& segment, const LedgerOptions& options) {
  const auto differs = [](uint64_t has, const std::optional<uint64_t>& wanted) {
    return wanted.has_value() && *wanted != has;
  };
  if (differs(segment.capacity_bytes, options.capacity_bytes) ||
      differs(segment.page_bytes, options.page_bytes)) {
    return failure(Code::mismatch, options.path + " has capacity_bytes " +
                                       std::to_string(segment.capacity_bytes) + " and page_bytes " +
                                       std::to_string(segment.page_bytes) +
                                       "; open it with the same, or unlink the device first");
  }
  return {};
}

// REQUIRES: byte 0 is locked. An empty file, one whose creator died before it was done, and one of
// an earlier boot are started afresh.
Result<LedgerSegment*> attach_or_create(int fd, const LedgerOptions& options) {
  struct stat info = {};
  if (fstat(fd, &info) != 0) return system_failure("fstat of the ledger", errno);
  const char unfinished[sizeof(kLedgerMagic)] = {};
  char magic[sizeof(kLedgerMagic)] = {};
  if (pread(fd, magic, sizeof(magic), 0) < 0) return system_failure("read of the ledger", errno);
  if (memcmp(magic, unfinished, sizeof(magic)) == 0) return create_segment(fd, options);
  LedgerSegment header = {};
  if (pread(fd, &header, offsetof(LedgerSegment, mutex), 0) < 0) {
    return system_failure("read of the ledger", errno);
  }
  if (Status status = check_header(header, options.path); !status.ok()) return status;
  if (info.st_size != static_cast<off_t>(sizeof(LedgerSegment))) {
    return failure(Code::corrupt, options.path + " has the wrong size; unlink the device");
  }
  if (current_boot_id() != header.boot_id && options.capacity_bytes.has_value()) {
    return create_segment(fd, options);
  }
  if (Status status = check_geometry(header, options); !status.ok()) return status;
  return map_segment(fd);
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
    return failure(Code::unknown_device,
                   "no ledger at " + path + "; open the device with capacity_bytes to create it");
  }
  if (error == EACCES || error == EPERM) {
    return failure(Code::permission, "no permission on " + path +
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
    if (Status status = check_geometry_values(options); !status.ok()) return status;
  }
  Result<int> fd = open_locked(options.path, create);
  if (!fd.ok()) return fd.status();
  Result<LedgerSegment*> segment = attach_or_create(fd.value(), options);
  if (!segment.ok()) {
    struct stat info = {};
    if (fstat(fd.value(), &info) == 0 && info.st_size == 0) ::unlink(options.path.c_str());
    ::close(fd.value());
    return segment.status();
  }
  if (Status shared = share_byte(fd.value(), kOpenByte); !shared.ok()) {
    munmap(segment.value(), sizeof(LedgerSegment));
    ::close(fd.value());
    return shared;
  }
  // The lock belongs to this open file description: unlock by byte, the fd stays.
  struct flock unlock = {};
  unlock.l_type = F_UNLCK;
  unlock.l_len = 1;
  fcntl(fd.value(), F_OFD_SETLK, &unlock);
  return LedgerFile{fd.value(), segment.value()};
}

Result<FileLock> FileLock::take(const std::string& path) {
  Result<int> fd = open_locked(path, false);
  if (!fd.ok()) return fd.status();
  return FileLock(fd.value());
}

FileLock::~FileLock() {
  if (fd_ >= 0) ::close(fd_);
}

uint64_t total_charge(const LedgerSegment& segment) {
  uint64_t total = 0;
  for (const ClientRecord& client : segment.clients) {
    if (client.used != 0) total += client.charge_bytes();
  }
  return total;
}

}  // namespace kvcached
