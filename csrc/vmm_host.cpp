#include "vmm_host.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "host_stream.h"
#include "page_window.h"
#include "steps.h"

namespace kvcached {

namespace {

constexpr uint64_t kFileBytes = uint64_t{1} << 60;

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

// With PROT_READ the hole shows zeros.
bool make_hole(uint64_t address, uint64_t bytes, int protection = PROT_NONE) {
  return mmap(pointer(address), bytes, protection,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
}

// Length of the run of consecutive handles that starts at `first`.
size_t run_length(std::span<const Handle> handles, size_t first) {
  size_t end = first + 1;
  while (end < handles.size() && handles[end] == handles[end - 1] + 1) ++end;
  return end - first;
}

Status mapping_failure(int error) {
  Status status = system_failure("mmap", error);
  if (error == ENOMEM) {
    status.message +=
        "; the process may have reached vm.max_map_count mappings: use a larger page_bytes or "
        "raise it with sysctl";
  }
  return status;
}

}  // namespace

Result<std::shared_ptr<Vmm>> HostVmm::make(uint64_t page_bytes) {
  const auto os_page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (page_bytes == 0 || page_bytes % os_page_bytes != 0) {
    return failure(Code::not_aligned, "page_bytes ", page_bytes, " must be a positive multiple of ",
                   os_page_bytes);
  }
  const int fd = memfd_create("kvcached", MFD_CLOEXEC);
  if (fd < 0) return system_failure("memfd_create", errno);
  if (ftruncate(fd, static_cast<off_t>(kFileBytes)) != 0) {
    const int error = errno;
    ::close(fd);
    return system_failure("ftruncate of the device memory file", error);
  }
  return std::shared_ptr<Vmm>(new HostVmm(page_bytes, fd));
}

HostVmm::HostVmm(uint64_t page_bytes, int fd) : books_(page_bytes), fd_(fd) {
  guard_against_fork(this);
}

HostVmm::~HostVmm() {
  unguard_against_fork(this);
  for (const auto& [address, reservation] : books_.reservations()) {
    munmap(pointer(address), reservation.bytes);
  }
  if (fd_ >= 0) ::close(fd_);
}

Status HostVmm::check_open() const {
  if (forked_) {
    return failure(Code::forked,
                   "this client belongs to the parent process; open a new client after the fork");
  }
  if (closed_) return failure(Code::closed, "the client is closed");
  return {};
}

Result<uint64_t> HostVmm::reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_reserve(bytes));
  const uint64_t page = books_.page_bytes();
  // Aligned to the page like CUDA's reservations: reserves one page more and unmaps both ends.
  const uint64_t padded = bytes + page;
  void* raw = mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    return failure(Code::invalid_argument, "cannot reserve ", bytes,
                   " bytes of address space; ask for a smaller virtual size");
  }
  const auto begin = reinterpret_cast<uint64_t>(raw);
  const uint64_t address = (begin + page - 1) / page * page;
  if (address > begin) munmap(raw, address - begin);
  if (begin + padded > address + bytes) {
    munmap(pointer(address + bytes), begin + padded - address - bytes);
  }
  books_.add_reservation(address, bytes);
  return address;
}

Status HostVmm::free_address(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(books_.check_free_address(address, bytes));
  if (munmap(pointer(address), bytes) != 0) return system_failure("munmap", errno);
  books_.remove_reservation(address);
  return {};
}

Result<std::vector<Handle>> HostVmm::create(size_t count) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_create(count));
  return books_.create(count);
}

Result<std::vector<Handle>> HostVmm::create_block(size_t count) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_create(count));
  return books_.create_block(count);
}

Status HostVmm::check_create(size_t count) const {
  KV_TRY(check_open());
  if (count == 0) return failure(Code::invalid_argument, "cannot create 0 pages");
  if (count > kFileBytes / page_bytes() - books_.next_handle()) {
    return failure(Code::system_call, "the client has used up its page handles; open a new client");
  }
  return {};
}

Status HostVmm::release(std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_ASSIGN(std::vector<Handle> idle, books_.mark_released(handles));
  if (Status status = punch(idle); !status.ok()) {
    books_.unmark_released(handles);
    return status;
  }
  books_.forget(idle);
  return {};
}

Status HostVmm::punch(std::span<const Handle> handles) {
  for (size_t first = 0; first < handles.size();) {
    const size_t count = run_length(handles, first);
    const auto offset = static_cast<off_t>(handles[first] * page_bytes());
    const auto bytes = static_cast<off_t>(count * page_bytes());
    if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes) != 0) {
      return system_failure("fallocate(PUNCH_HOLE)", errno);
    }
    step("host: a run is given back");
    first += count;
  }
  return {};
}

Status HostVmm::map_slots(uint64_t address, std::span<const Handle> handles, int protection,
                          size_t* mapped) {
  for (size_t& first = *mapped; first < handles.size();) {
    const size_t count = run_length(handles, first);
    const uint64_t start = address + first * page_bytes();
    const auto offset = static_cast<off_t>(handles[first] * page_bytes());
    if (mmap(pointer(start), count * page_bytes(), protection, MAP_SHARED | MAP_FIXED, fd_,
             offset) == MAP_FAILED) {
      return mapping_failure(errno);
    }
    step("host: a run is mapped");
    first += count;
  }
  return {};
}

Status HostVmm::map_with(uint64_t address, std::span<const Handle> handles, int protection) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  const uint64_t bytes = handles.size() * page_bytes();
  const std::vector<AddressRange> guarded = books_.holes(address, bytes, kGuard);
  KV_TRY(books_.map(address, handles));
  size_t mapped_pages = 0;
  Status mapped = map_slots(address, handles, protection, &mapped_pages);
  if (mapped.ok()) return mapped;
  (void)books_.unmap(address, bytes);
  if (undo_map(address, mapped_pages * page_bytes(), guarded)) return mapped;
  return failure(Code::stranded, "a failed map could not be undone: ", mapped.message);
}

bool HostVmm::undo_map(uint64_t address, uint64_t bytes, std::span<const AddressRange> guarded) {
  // Pages that were not mapped are still holes. Mapping these again could fail at the kernel's
  // limit of mappings, because it may briefly need one more.
  if (bytes > 0 && !make_hole(address, bytes)) return false;
  for (const AddressRange& range : guarded) {
    const uint64_t end = std::min(range.address + range.bytes, address + bytes);
    const bool was_mapped = range.address < end;
    if (was_mapped && !make_hole(range.address, end - range.address, PROT_READ)) return false;
    books_.set_holes(range, kGuard);
  }
  return true;
}

Status HostVmm::map(uint64_t address, std::span<const Handle> handles) {
  return map_with(address, handles, PROT_NONE);
}

Status HostVmm::map_accessible(uint64_t address, std::span<const Handle> handles) {
  return map_with(address, handles, PROT_READ | PROT_WRITE);
}

Status HostVmm::set_access(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_whole_mapped(address, bytes, "set_access"));
  if (mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) != 0) {
    return system_failure("mprotect", errno);
  }
  return {};
}

Status HostVmm::fill(uint64_t address, uint64_t bytes, unsigned char value) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_mapped(address, bytes, "fill"));
  std::memset(pointer(address), value, bytes);
  return {};
}

Status HostVmm::unmap(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_whole_mapped(address, bytes, "unmap"));
  if (scrub_) KV_TRY(punch(books_.mapped(address, bytes)));
  if (!make_hole(address, bytes, guard_ ? PROT_READ : PROT_NONE)) return mapping_failure(errno);
  step("host: unmapped, not yet given back");
  return punch(books_.unmap(address, bytes, guard_ ? kGuard : kNoHandle));
}

Status HostVmm::guard_holes() {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  guard_ = true;
  return {};
}

Status HostVmm::cover(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  if (!guard_) return {};
  for (const AddressRange& range : books_.holes(address, bytes, kNoHandle)) {
    if (!make_hole(range.address, range.bytes, PROT_READ)) return mapping_failure(errno);
    books_.set_holes(range, kGuard);
  }
  return {};
}

void HostVmm::scrub_pages() {
  const std::lock_guard lock(mutex_);
  scrub_ = true;
}

Result<std::unique_ptr<StreamEvent>> HostVmm::record_event(Stream stream) {
  KV_TRY(check_open());
  return HostStream::record(stream);
}

Result<SharedPages> HostVmm::export_pages(std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_known(handles));
  const std::string self = "/proc/self/fd/" + std::to_string(fd_);
  SharedPages shared;
  shared.files.emplace_back(
      open(self.c_str(), O_RDONLY | O_CLOEXEC));  // no other thread adds a file
  if (shared.files[0].get() < 0) return system_failure("open of the device memory file", errno);
  for (const Handle handle : handles) shared.places.push_back({0, handle * page_bytes()});
  return shared;
}

Result<std::unique_ptr<PageWindow>> HostVmm::open_window(const SharedPages& pages) {
  KV_TRY(check_open());
  return open_host_window(pages, page_bytes());
}

Status HostVmm::close() {
  const std::lock_guard lock(mutex_);
  if (closed_ || forked_) return {};
  for (const auto& [address, reservation] : books_.reservations()) {
    if (!make_hole(address, reservation.bytes)) return mapping_failure(errno);
  }
  step("host: all unmapped");
  books_.clear();
  ::close(fd_);
  step("host: all given back");
  fd_ = -1;
  closed_ = true;
  return {};
}

void HostVmm::abandon_in_child() {
  forked_ = true;
  for (const auto& [address, reservation] : books_.reservations())
    make_hole(address, reservation.bytes);
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace kvcached
