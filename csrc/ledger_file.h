// The file that holds a ledger: its creation, opening and removal.
#pragma once

#include "descriptor.h"
#include "ledger.h"

namespace kvcached {

struct LedgerFile {
  Opening opening;
  LedgerSegment* segment;
};

// Creates the file if it is missing and a capacity is given. Checks version and geometry. Replaces
// a ledger of an earlier boot by a new one.
Result<LedgerFile> open_ledger_file(const LedgerOptions& options);

// Opens the file again for a forked child, under the same descriptor and at the same address. If
// the process is out of descriptors, the child keeps the parent's opening, and a death of either
// with the lock is only found once both are dead. Async-signal-safe.
Opening reopen(const Opening& parents, LedgerSegment* segment);

// True if the file open as `fd` is the one at `path`.
bool is_still_at(int fd, const std::string& path);

// Lock on the byte that serialises creation and removal, on its own open file description.
class FileLock {
 public:
  static Result<FileLock> take(const std::string& path);
  // The locked file.
  int fd() const { return file_.get(); }

 private:
  explicit FileLock(int fd) : file_(fd) {}
  Descriptor file_;
};

// Id of this boot of the machine, cut to the length of LedgerSegment::boot_id.
std::string current_boot_id();

// Status of a failed open or unlink of a ledger file.
Status open_failure(const std::string& path, int error);

// Byte of the file that client `slot` keeps locked while it lives. Byte 0 is that of FileLock.
inline off_t liveness_byte(int slot) { return 1 + slot; }

// Byte that every process with the ledger open, client or not, holds a shared lock on.
inline constexpr off_t kOpenByte = 1 + kMaxClients;  // those of openings follow it (owned_lock.cpp)

}  // namespace kvcached
