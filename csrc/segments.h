// Inspection of ledger files from outside: their contents, their clients, and whether they can be
// removed. In every version, each process that has a ledger open holds a lock on one of its bytes
// (ledger_file.h), which the kernel drops with the process. So a file without any lock is unused.
// Thread rule: any thread.
#pragma once

#include <string>
#include <vector>

#include "status.h"

namespace kvcached {

struct SegmentClient {
  std::string name;
  int32_t pid;
  bool alive;
};

struct SegmentReport {
  uint32_t version = 0;  // 0: the file is not a ledger, or is unfinished
  uint64_t capacity_bytes = 0;
  uint64_t page_bytes = 0;
  std::vector<SegmentClient> clients;  // empty unless the version is this library's
  std::string stale_reason;            // empty: the file is in use
};

// Reads without the ledger's lock, and changes nothing. A client that joins or leaves meanwhile may
// be missing. Code::unknown_device for a missing file, Code::permission.
Result<SegmentReport> inspect_segment(const std::string& path);

// Removes the file unless it is in use. Excludes openers and creators meanwhile. Returns true if it
// was removed, false if it is in use or does not exist. Code::permission.
Result<bool> remove_if_stale(const std::string& path);

}  // namespace kvcached
