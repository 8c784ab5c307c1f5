#include "segments.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "descriptor.h"
#include "ledger.h"
#include "ledger_check.h"
#include "ledger_file.h"
#include "liveness.h"

namespace kvcached {

namespace {

// Reads the file up to the size of a segment, and fills the rest with zeros.
Status read_segment(int fd, LedgerSegment* segment) {
  memset(static_cast<void*>(segment), 0, sizeof(LedgerSegment));
  auto* bytes = reinterpret_cast<char*>(segment);
  size_t done = 0;
  while (done < sizeof(LedgerSegment)) {
    const ssize_t got =
        pread(fd, bytes + done, sizeof(LedgerSegment) - done, static_cast<off_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return system_failure("read of the ledger", errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return {};
}

std::vector<SegmentClient> clients_of(const LedgerSegment& segment, int fd) {
  std::vector<SegmentClient> clients;
  for (int slot = 0; slot < kMaxClients; ++slot) {
    const ClientRecord& record = segment.clients[slot];
    if (record.used == 0) continue;
    const ProcessId owner{record.pid, record.pid_namespace, record.start_ticks};
    const bool alive = is_byte_locked(fd, liveness_byte(slot)) || !is_over(owner);
    clients.push_back({name_of(record), record.pid, alive});
  }
  return clients;
}

bool is_unfinished(const LedgerSegment& segment) {
  const char nothing[sizeof(kLedgerMagic)] = {};
  return memcmp(segment.magic, nothing, sizeof(nothing)) == 0;
}

bool is_ledger(const LedgerSegment& segment) {
  return memcmp(segment.magic, kLedgerMagic, sizeof(kLedgerMagic)) == 0;
}

// Reason why an unused segment was left.
std::string reason_of(const LedgerSegment& segment) {
  if (is_unfinished(segment)) return "its creator died before it was finished";
  if (!is_ledger(segment)) return "it is not a ledger";
  if (std::string conflict = version_conflict(segment); !conflict.empty()) return conflict;
  const std::string boot_id(segment.boot_id, strnlen(segment.boot_id, sizeof(segment.boot_id)));
  if (boot_id != current_boot_id()) return "it is of an earlier boot";
  return "no living process has it open";
}

Result<SegmentReport> report_on(int fd) {
  LedgerSegment segment;
  KV_TRY(read_segment(fd, &segment));
  SegmentReport report;
  bool in_use = is_file_locked(fd);
  if (is_ledger(segment)) {
    report.version = segment.version;
    if (version_conflict(segment).empty()) {
      report.capacity_bytes = segment.capacity_bytes;
      report.page_bytes = segment.page_bytes;
      report.clients = clients_of(segment, fd);
      for (const SegmentClient& client : report.clients) in_use |= client.alive;
    }
  }
  if (!in_use) report.stale_reason = reason_of(segment);
  return report;
}

}  // namespace

Result<SegmentReport> inspect_segment(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (file.get() < 0) return open_failure(path, errno);
  return report_on(file.get());
}

Result<bool> remove_if_stale(const std::string& path) {
  Result<FileLock> lock = FileLock::take(path);
  if (!lock.ok()) {
    if (lock.status().code == Code::unknown_device) return false;
    return lock.status();
  }
  KV_ASSIGN(SegmentReport report, report_on(lock.value().fd()));
  if (report.stale_reason.empty()) return false;
  if (::unlink(path.c_str()) != 0) return open_failure(path, errno);
  return true;
}

}  // namespace kvcached
