#include "ledger_check.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ledger_file.h"
#include "ledger_records.h"
#include "liveness.h"

namespace kvcached {

namespace {

bool is_page_size(uint64_t bytes) {
  return bytes != 0 && bytes % static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) == 0;
}

bool is_capacity(uint64_t bytes, uint64_t page_bytes) {
  return bytes >= page_bytes && bytes % page_bytes == 0 && bytes <= kMaxCapacityBytes;
}

Result<LedgerSegment> read_header(int fd) {
  LedgerSegment header = {};
  if (pread(fd, static_cast<void*>(&header), offsetof(LedgerSegment, lock), 0) < 0) {
    return system_failure("read of the ledger", errno);
  }
  return header;
}

Status check_identity(const LedgerSegment& header, const std::string& path) {
  if (memcmp(header.magic, kLedgerMagic, sizeof(kLedgerMagic)) != 0) {
    return failure(Code::corrupt, path,
                   " is not a kvcached ledger; remove it or use another "
                   "namespace");
  }
  if (const std::string conflict = version_conflict(header); !conflict.empty()) {
    return failure(Code::version, path, " has ", conflict,
                   "; run one version of kvcached, or stop all engines and unlink the device");
  }
  return {};
}

// An abandoned file is replaced, so no process may have it open.
Result<FileState> abandoned(int fd, const std::string& path, const char* why) {
  if (!is_file_locked(fd)) return FileState::abandoned;
  return damaged(path, std::string("it is in use, but ") + why);
}

const char* problem_of(const ClientRecord& client, const LedgerSegment& segment) {
  const uint64_t largest = std::max({client.pending_bytes, client.committed_bytes,
                                     client.static_bytes, client.min_bytes, client.wanted_bytes});
  if (client.used != 1) return "its state is unknown";
  if (strnlen(client.name, sizeof(client.name)) == sizeof(client.name))
    return "its name is not terminated";
  if (largest > segment.capacity_bytes) return "it holds more than the capacity of the device";
  if (client.min_bytes > client.limit_bytes) return "its minimum is above its limit";
  return nullptr;
}

}  // namespace

std::string version_conflict(const LedgerSegment& header) {
  if (header.version != kLedgerVersion) {
    return "version " + std::to_string(header.version) + " of the ledger, this library has " +
           std::to_string(kLedgerVersion);
  }
  if (header.segment_bytes == sizeof(LedgerSegment)) return {};
  return "a ledger of " + std::to_string(header.segment_bytes) +
         " bytes, that of this library has " + std::to_string(sizeof(LedgerSegment)) +
         ": it was created by another build";
}

Status damaged(const std::string& path, const std::string& what) {
  return failure(Code::corrupt, path, " is damaged: ", what,
                 "; stop all engines of the device and unlink it");
}

Result<FileState> examine_file(int fd, const std::string& path) {
  struct stat info = {};
  if (fstat(fd, &info) != 0) return system_failure("fstat of the ledger", errno);
  KV_ASSIGN(const LedgerSegment header, read_header(fd));
  const char unfinished[sizeof(kLedgerMagic)] = {};
  if (memcmp(header.magic, unfinished, sizeof(unfinished)) == 0) {
    return abandoned(fd, path, "it has no header");
  }
  KV_TRY(check_identity(header, path));
  if (info.st_size != static_cast<off_t>(sizeof(LedgerSegment))) {
    return failure(Code::corrupt, path, " has the wrong size; unlink the device");
  }
  if (memchr(header.boot_id, 0, sizeof(header.boot_id)) == nullptr ||
      current_boot_id() != header.boot_id) {
    return abandoned(fd, path, "it is of another boot");
  }
  if (header.destroyed != 0) return FileState::abandoned;
  if (!is_page_size(header.page_bytes) || !is_capacity(header.capacity_bytes, header.page_bytes)) {
    return damaged(path, "its capacity of " + std::to_string(header.capacity_bytes) +
                             " bytes in pages of " + std::to_string(header.page_bytes) +
                             " is not possible");
  }
  return FileState::usable;
}

Status check_geometry_values(const LedgerOptions& options) {
  const uint64_t page = options.page_bytes.value_or(0);
  if (!is_page_size(page)) {
    return failure(Code::not_aligned, "page_bytes ", page, " must be a positive multiple of ",
                   sysconf(_SC_PAGESIZE));
  }
  const uint64_t capacity = options.capacity_bytes.value_or(0);
  if (capacity < page) {
    return failure(Code::invalid_argument, "capacity_bytes ", capacity, " is below one page of ",
                   page, " bytes; give the device more memory");
  }
  if (capacity % page != 0) {
    return failure(Code::not_aligned, "capacity_bytes ", capacity,
                   " must be a multiple of page_bytes ", page);
  }
  if (is_capacity(capacity, page)) return {};
  return failure(Code::invalid_argument, "capacity_bytes ", capacity,
                 " is above the largest device, ", kMaxCapacityBytes, " bytes");
}

Status check_geometry(const LedgerSegment& segment, const LedgerOptions& options) {
  const auto differs = [](uint64_t has, const std::optional<uint64_t>& wanted) {
    return wanted.has_value() && *wanted != has;
  };
  if (differs(segment.capacity_bytes, options.capacity_bytes) ||
      differs(segment.page_bytes, options.page_bytes)) {
    return failure(Code::mismatch, options.path, " has capacity_bytes ", segment.capacity_bytes,
                   " and page_bytes ", segment.page_bytes,
                   "; open it with the same, or unlink the device first");
  }
  return {};
}

Status gone(const LedgerSegment& segment) {
  if (segment.destroyed != kFileRemoved) {
    return failure(Code::gone, "the device was destroyed; close the client and open it again");
  }
  return failure(
      Code::gone,
      "the ledger's file in /dev/shm was removed while processes used it, so another ledger could "
      "count the same memory; restart all clients of the device. systemd removes the files of a "
      "user when the user's last login ends, unless RemoveIPC=no is set in logind.conf or the user "
      "is a system user");
}

Status held_up_by(const LedgerSegment& segment) {
  const LockHolder holder = holder_of(segment.lock);
  if (!holder.held) {
    return failure(Code::corrupt, "the ledger was locked for too long; it is free now: try again");
  }
  if (!holder.known) {
    return failure(Code::corrupt,
                   "the ledger is locked by a process that did not record its pid; find one that "
                   "is stopped, and resume or kill it. If there is none, the ledger is damaged: "
                   "stop all engines of the device and unlink it");
  }
  const std::string pid = std::to_string(holder.pid);
  if (holder.pid_namespace != this_pid_namespace()) {
    return failure(Code::corrupt, "the ledger has been locked for too long by process ", pid,
                   " of another pid namespace (a container's); resume or kill it there");
  }
  const bool stopped = is_stopped(holder.pid);
  return failure(Code::corrupt, "the ledger has been locked for too long by process ", pid,
                 stopped ? ", which is stopped; resume it (kill -CONT "
                         : ", which makes no progress; wait for it or kill it (kill -9 ",
                 pid, stopped ? ") or kill it (kill -9 " + pid + ")" : std::string(")"));
}

Status check_records(const LedgerSegment& segment, const std::string& path) {
  for (int slot = 0; slot < kMaxClients; ++slot) {
    const ClientRecord& client = segment.clients[slot];
    const char* problem = client.used == 0 ? nullptr : problem_of(client, segment);
    if (problem == nullptr) continue;
    return damaged(path, "client record " + std::to_string(slot) + ": " + problem);
  }
  if (segment.charged_bytes == total_charge(segment)) return {};
  return damaged(path, "the total of its charges does not match its records");
}

}  // namespace kvcached
