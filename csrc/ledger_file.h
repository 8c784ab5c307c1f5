// Creating, attaching and removing the file that holds a ledger.
#pragma once

#include "descriptor.h"
#include "ledger.h"

namespace kvcached {

struct LedgerFile {
  Opening opening;
  LedgerSegment* segment;
};

// Creates the file if it is missing and a capacity is given; checks version and geometry.
// A ledger of an earlier boot is started afresh.
Result<LedgerFile> open_ledger_file(const LedgerOptions& options);

// The file opened once more, under the same descriptor and at the same address, for a forked child;
// without a descriptor to spare it stays the parent's opening, and a death of either inside the
// lock is found once both are over. Async-signal-safe.
Opening reopen(const Opening& parents, LedgerSegment* segment);

// Whether the file open as `fd` is the one found at `path`.
bool is_still_at(int fd, const std::string& path);

// Holds the byte that serialises creation and removal, on its own open file description.
class FileLock {
 public:
  static Result<FileLock> take(const std::string& path);
  // The locked file.
  int fd() const { return file_.get(); }

 private:
  explicit FileLock(int fd) : file_(fd) {}
  Descriptor file_;
};

// This machine's boot, as a ledger keeps it.
std::string current_boot_id();

// The status for an open or unlink of a ledger file that failed.
Status open_failure(const std::string& path, int error);

// Byte of the file that client `slot` keeps locked while it lives; byte 0 is FileLock's.
inline off_t liveness_byte(int slot) { return 1 + slot; }

// Byte that everybody who has the ledger open shares a lock on, clients or not.
inline constexpr off_t kOpenByte = 1 + kMaxClients;  // those of openings are above (owned_lock.cpp)

// Sum of the charges of all used records.
uint64_t total_charge(const LedgerSegment& segment);

}  // namespace kvcached
