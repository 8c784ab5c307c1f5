// Ledger files as a stranger finds them: what they are, who uses them, and whether they may go.
// Each process that has a ledger open holds a lock on one of its bytes (ledger_file.h), which the
// kernel drops with the process. That holds for every version, so a file without any lock has no
// user. Thread rule: any thread.
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
  uint32_t version = 0;  // 0: the file is no ledger, or was never finished
  uint64_t capacity_bytes = 0;
  uint64_t page_bytes = 0;
  std::vector<SegmentClient> clients;  // empty unless the version is this library's
  std::string stale_reason;            // empty: it is in use
};

// Reads without the ledger's lock, and changes nothing. A client that joins or leaves meanwhile
// may be shown or not. Code::unknown_device if there is no file, Code::permission.
Result<SegmentReport> inspect_segment(const std::string& path);

// Removes the file unless it is in use, with openers and creators kept out meanwhile.
// True if it was removed, false if it is in use or gone. Code::permission.
Result<bool> remove_if_stale(const std::string& path);

}  // namespace kvcached
