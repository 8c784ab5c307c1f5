// Whether the bytes of a segment can be a ledger's. What a file says is not trusted: it may be of
// another boot, half made, destroyed, or damaged.
#pragma once

#include <string>

#include "ledger.h"

namespace kvcached {

// Beyond this, sums of charges could overflow.
inline constexpr uint64_t kMaxCapacityBytes = uint64_t{1} << 52;

enum class FileState {
  usable,
  abandoned,  // cannot be used any more: unfinished, of an earlier boot, or destroyed
};

// REQUIRES: byte 0 of the file is locked.
// Code::corrupt, Code::version
Result<FileState> examine_file(int fd, const std::string& path);

// page_bytes and capacity_bytes of the options, which are to become a ledger's.
Status check_geometry_values(const LedgerOptions& options);

// Whether the options agree with the ledger. Code::mismatch
Status check_geometry(const LedgerSegment& segment, const LedgerOptions& options);

// Why nothing is granted any more, and what to do about that. Code::gone
Status gone(const LedgerSegment& segment);

// That the lock has been held for too long, by whom, and what to do about that. Code::corrupt
Status held_up_by(const LedgerSegment& segment);

// REQUIRES: the segment's lock is held. Code::corrupt
Status check_records(const LedgerSegment& segment, const std::string& path);

// Why this library cannot use a ledger, "" if it can: its version, or the size of its records.
std::string version_conflict(const LedgerSegment& header);

Status damaged(const std::string& path, const std::string& what);

}  // namespace kvcached
