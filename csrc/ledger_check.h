// Checks that the bytes of a file are a usable ledger. The contents of a file are not trusted: it
// may be of another boot, unfinished, destroyed, or damaged.
#pragma once

#include <string>

#include "ledger.h"

namespace kvcached {

// Above this, sums of charges could overflow.
inline constexpr uint64_t kMaxCapacityBytes = uint64_t{1} << 52;

enum class FileState {
  usable,
  abandoned,  // cannot be used any more: unfinished, of an earlier boot, or destroyed
};

// REQUIRES: byte 0 of the file is locked.
// Code::corrupt, Code::version
Result<FileState> examine_file(int fd, const std::string& path);

// Checks page_bytes and capacity_bytes of a ledger to be created.
Status check_geometry_values(const LedgerOptions& options);

// Code::mismatch unless the ledger has the geometry of the options.
Status check_geometry(const LedgerSegment& segment, const LedgerOptions& options);

// Code::gone, with the reason why nothing is granted any more and the remedy.
Status gone(const LedgerSegment& segment);

// Code::corrupt, with the process that has held the lock for too long and the remedy.
Status held_up_by(const LedgerSegment& segment);

// Code::corrupt unless all records and their total are possible. REQUIRES: the segment's lock is
// held
Status check_records(const LedgerSegment& segment, const std::string& path);

// Reason why this library cannot use a ledger (its version or size), "" if it can.
std::string version_conflict(const LedgerSegment& header);

Status damaged(const std::string& path, const std::string& what);

}  // namespace kvcached
