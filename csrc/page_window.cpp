#include "page_window.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvcached {

namespace {

using Place = SharedPages::Place;

class HostWindow final : public PageWindow {
 public:
  HostWindow(void* start, uint64_t bytes) : start_(static_cast<char*>(start)), bytes_(bytes) {}
  ~HostWindow() override { munmap(start_, bytes_); }

  uint64_t address() const override { return reinterpret_cast<uint64_t>(start_); }
  uint64_t bytes() const override { return bytes_; }
  Status copy(std::span<const CopyRun> runs) override;
  Status show(const SharedPages& pages, uint64_t page_bytes);

 private:
  char* const start_;
  const uint64_t bytes_;
};

// Number of places from `first` on that are one run of a file.
size_t run_length(std::span<const Place> places, size_t first, uint64_t page_bytes) {
  size_t end = first + 1;
  while (end < places.size() && places[end].file == places[first].file &&
         places[end].offset == places[end - 1].offset + page_bytes) {
    ++end;
  }
  return end - first;
}

// Memory beyond the end of its file can be mapped, but not read.
Status check_length(int file, uint64_t offset, uint64_t bytes) {
  struct stat about{};
  if (fstat(file, &about) != 0) return system_failure("fstat of another process's pages", errno);
  const auto size = static_cast<uint64_t>(about.st_size);
  if (offset <= size && bytes <= size - offset) return {};
  return failure(Code::invalid_argument, "another process's pages are beyond the end of its file");
}

Status HostWindow::show(const SharedPages& pages, uint64_t page_bytes) {
  for (size_t first = 0; first < pages.places.size();) {
    const size_t count = run_length(pages.places, first, page_bytes);
    const Place& place = pages.places[first];
    const int file = pages.files[place.file].get();
    const uint64_t bytes = count * page_bytes;
    KV_TRY(check_length(file, place.offset, bytes));
    if (mmap(start_ + first * page_bytes, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file,
             static_cast<off_t>(place.offset)) == MAP_FAILED) {
      return system_failure("mmap of another process's pages", errno);
    }
    first += count;
  }
  if (madvise(start_, bytes_, MADV_DONTFORK) != 0) return system_failure("madvise", errno);
  return {};
}

Status HostWindow::copy(std::span<const CopyRun> runs) {
  KV_TRY(check_copy(runs, bytes_));
  for (const CopyRun& run : runs) {
    std::memcpy(reinterpret_cast<void*>(run.target), start_ + run.source_offset, run.bytes);
  }
  return {};
}

}  // namespace

Status check_shared(const SharedPages& pages, uint64_t page_bytes) {
  const auto is_wrong = [&](const Place& place) {
    return place.file >= pages.files.size() || place.offset % page_bytes != 0;
  };
  if (!pages.places.empty() && std::none_of(pages.places.begin(), pages.places.end(), is_wrong)) {
    return {};
  }
  return failure(Code::invalid_argument, "these are not pages of ", page_bytes,
                 " bytes that another process shares");
}

Status check_copy(std::span<const CopyRun> runs, uint64_t window_bytes) {
  const auto fits = [&](const CopyRun& run) {
    return run.source_offset <= window_bytes && run.bytes <= window_bytes - run.source_offset;
  };
  if (std::all_of(runs.begin(), runs.end(), fits)) return {};
  return failure(Code::invalid_argument, "a copy reaches beyond its window");
}

Result<std::unique_ptr<PageWindow>> open_host_window(const SharedPages& pages,
                                                     uint64_t page_bytes) {
  KV_TRY(check_shared(pages, page_bytes));
  const uint64_t bytes = pages.places.size() * page_bytes;
  void* start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return system_failure("mmap of a window", errno);
  auto window = std::make_unique<HostWindow>(start, bytes);
  KV_TRY(window->show(pages, page_bytes));
  return std::unique_ptr<PageWindow>(std::move(window));
}

}  // namespace kvcached
