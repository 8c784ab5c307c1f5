// Checks of the windows of all backends, and the window of host devices.
#pragma once

#include "vmm.h"

namespace kvcached {

// Code::invalid_argument unless there are pages, each at a multiple of the page size in a file.
Status check_shared(const SharedPages& pages, uint64_t page_bytes);
// Code::invalid_argument unless all sources are within a window of that size.
Status check_copy(std::span<const CopyRun> runs, uint64_t window_bytes);

// Maps memory files read-only, not inherited by forked children.
Result<std::unique_ptr<PageWindow>> open_host_window(const SharedPages& pages, uint64_t page_bytes);

}  // namespace kvcached
