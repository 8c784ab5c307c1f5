// What the windows of all backends share.
#pragma once

#include "vmm.h"

namespace kvcached {

// Code::invalid_argument unless there are pages, each at a whole number of pages in a file.
Status check_shared(const SharedPages& pages, uint64_t page_bytes);
// Code::invalid_argument unless all lie in a window of that size.
Status check_copy(std::span<const CopyRun> runs, uint64_t window_bytes);

// Over memory files: mappings that only read, and no fork's child has.
Result<std::unique_ptr<PageWindow>> open_host_window(const SharedPages& pages, uint64_t page_bytes);

}  // namespace kvcached
