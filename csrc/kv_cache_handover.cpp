// A KV cache's pages as others read them, and theirs as it does.
#include <set>

#include "page_move_lock.h"

namespace kvcached {

Result<SharedPages> KvCache::export_pages(std::span<const uint64_t> pages) {
  const PageMoveLock moving(*this);
  KV_TRY(check_open());
  KV_ASSIGN(std::vector<Handle> handles, region_->backing(pages));
  return client_->vmm()->export_pages(handles);
}

Status KvCache::copy_in(PageWindow& window, std::span<const CopyRun> runs) {
  KV_TRY(client_->streams().wait());
  const PageMoveLock moving(*this);
  KV_TRY(check_open());
  std::vector<CopyRun> placed(runs.begin(), runs.end());
  std::set<uint64_t> pages;
  for (CopyRun& run : placed) {
    if (run.bytes == 0 || run.target >= region_->bytes() ||
        run.bytes > region_->bytes() - run.target) {
      return failure(Code::invalid_argument, "a copy reaches beyond the KV cache");
    }
    const uint64_t last = (run.target + run.bytes - 1) / page_bytes_;
    for (uint64_t page = run.target / page_bytes_; page <= last; ++page) pages.insert(page);
    run.target += region_->address();
  }
  const std::vector<uint64_t> touched(pages.begin(), pages.end());
  if (auto mapped = region_->backing(touched); !mapped.ok()) return mapped.status();
  return window.copy(placed);
}

}  // namespace kvcached
