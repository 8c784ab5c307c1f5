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
  abandoned,  // nobody can use it any more: unfinished, of an earlier boot, or destroyed
};

// REQUIRES: byte 0 of the file is locked.
// Code::corrupt, Code::version
Result<FileState> examine_file(int fd, const std::string& path);

// page_bytes and capacity_bytes of the options, which are to become a ledger's.
Status check_geometry_values(const LedgerOptions& options);

// Whether the options agree with the ledger. Code::mismatch
Status check_geometry(const LedgerSegment& segment, const LedgerOptions& options);

// Whether the mutex is one that init_mutex made; its state aside. Cheap.
bool is_ledger_mutex(const pthread_mutex_t& mutex);
Status init_mutex(pthread_mutex_t* mutex);

// REQUIRES: the segment's mutex is held. Code::corrupt
Status check_records(const LedgerSegment& segment, const std::string& path);

Status damaged(const std::string& path, const std::string& what);

}  // namespace kvcached
