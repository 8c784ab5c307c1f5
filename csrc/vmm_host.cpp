#include "vmm_host.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace kvcached {

namespace {

constexpr uint64_t kFileBytes = uint64_t{1} << 60;
constexpr uint64_t kMaxPages = uint64_t{1} << 26;  // of one reservation: bounds the books

void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

bool make_hole(uint64_t address, uint64_t bytes) {
  return mmap(pointer(address), bytes, PROT_NONE,
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
    return failure(Code::not_aligned, "page_bytes " + std::to_string(page_bytes) +
                                          " must be a positive multiple of " +
                                          std::to_string(os_page_bytes));
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

HostVmm::HostVmm(uint64_t page_bytes, int fd) : page_bytes_(page_bytes), fd_(fd) {
  guard_against_fork(this);
}

HostVmm::~HostVmm() {
  unguard_against_fork(this);
  for (const auto& [address, reservation] : reservations_) {
    munmap(pointer(address), reservation.bytes);
  }
  if (fd_ >= 0) ::close(fd_);
}

Status HostVmm::check_open() const {
  if (forked_) {
    return failure(Code::forked,
                   "this client belongs to the parent process; open a client of your own after "
                   "the fork");
  }
  if (closed_) return failure(Code::closed, "the client is closed");
  return {};
}

Status HostVmm::check_range(uint64_t address, uint64_t bytes) const {
  if (bytes == 0) return failure(Code::invalid_argument, "size is 0 bytes; give a positive size");
  if (address % page_bytes_ != 0 || bytes % page_bytes_ != 0) {
    return failure(Code::not_aligned, "offset and size must be multiples of the page size, " +
                                          std::to_string(page_bytes_) + " bytes");
  }
  return {};
}

std::span<Handle> HostVmm::find_pages(uint64_t address, uint64_t bytes) {
  auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return {};
  auto& [start, reservation] = *std::prev(after);
  const uint64_t offset = address - start;
  if (offset >= reservation.bytes || bytes > reservation.bytes - offset) return {};
  return std::span(reservation.pages).subspan(offset / page_bytes_, bytes / page_bytes_);
}

std::span<Handle> HostVmm::find_mapped_pages(uint64_t address, uint64_t bytes) {
  const std::span<Handle> pages = find_pages(address, bytes);
  return std::find(pages.begin(), pages.end(), kNoHandle) == pages.end() ? pages
                                                                         : std::span<Handle>{};
}

Result<uint64_t> HostVmm::reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (Status status = check_open(); !status.ok()) return status;
  if (Status status = check_range(0, bytes); !status.ok()) return status;
  if (bytes / page_bytes_ > kMaxPages) {
    return failure(Code::invalid_argument, std::to_string(bytes) + " bytes are more than " +
                                               std::to_string(kMaxPages) +
                                               " pages; ask for less or use larger pages");
  }
  // Aligned to the page as CUDA's reservations are: reserve a page more and cut both ends off.
  const uint64_t padded = bytes + page_bytes_;
  void* raw = mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    return failure(Code::invalid_argument,
                   "cannot reserve " + std::to_string(bytes) +
                       " bytes of address space; ask for a smaller virtual size");
  }
  const auto begin = reinterpret_cast<uint64_t>(raw);
  const uint64_t address = (begin + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  if (address > begin) munmap(raw, address - begin);
  if (begin + padded > address + bytes) {
    munmap(pointer(address + bytes), begin + padded - address - bytes);
  }
  reservations_.emplace(address,
                        Reservation{bytes, std::vector<Handle>(bytes / page_bytes_, kNoHandle)});
  return address;
}

Status HostVmm::free_address(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second.bytes != bytes) {
    return failure(Code::invalid_argument, "not a reservation; free exactly what was reserved");
  }
  const auto& pages = found->second.pages;
  if (std::any_of(pages.begin(), pages.end(), [](Handle h) { return h != kNoHandle; })) {
    return failure(Code::already_mapped, "pages are mapped in the reservation; unmap them first");
  }
  if (munmap(pointer(address), bytes) != 0) return system_failure("munmap", errno);
  reservations_.erase(found);
  return {};
}

Result<std::vector<Handle>> HostVmm::create(size_t count) {
  const std::lock_guard lock(mutex_);
  if (Status status = check_open(); !status.ok()) return status;
  if (count == 0) return failure(Code::invalid_argument, "cannot create 0 pages");
  if (count > kFileBytes / page_bytes_ - next_handle_) {
    return failure(Code::system_call, "the client has used up its page handles; open a new client");
  }
  std::vector<Handle> handles(count);
  for (Handle& handle : handles) {
    handle = next_handle_++;
    uses_.emplace(handle, Use{});
  }
  return handles;
}

Status HostVmm::release(std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  const auto unmark = [&](size_t count) {
    for (const Handle handle : handles.first(count)) uses_[handle].released = false;
  };
  std::vector<Handle> idle;  // released and not mapped: their memory goes back now
  for (size_t i = 0; i < handles.size(); ++i) {
    auto use = uses_.find(handles[i]);
    if (use == uses_.end() || use->second.released) {
      unmark(i);
      return failure(Code::unknown_handle, "page handle " + std::to_string(handles[i]) +
                                               " was released before or never created");
    }
    use->second.released = true;
    if (!use->second.mapped) idle.push_back(handles[i]);
  }
  if (Status status = punch(idle); !status.ok()) {
    unmark(handles.size());
    return status;
  }
  for (const Handle handle : idle) uses_.erase(handle);
  return {};
}

Status HostVmm::punch(std::span<const Handle> handles) {
  for (size_t first = 0; first < handles.size();) {
    const size_t count = run_length(handles, first);
    const auto offset = static_cast<off_t>(handles[first] * page_bytes_);
    const auto bytes = static_cast<off_t>(count * page_bytes_);
    if (fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes) != 0) {
      return system_failure("fallocate(PUNCH_HOLE)", errno);
    }
    first += count;
  }
  return {};
}

Status HostVmm::claim(std::span<const Handle> handles) {
  for (size_t i = 0; i < handles.size(); ++i) {
    auto use = uses_.find(handles[i]);
    const bool known = use != uses_.end() && !use->second.released;
    if (known && !use->second.mapped) {
      use->second.mapped = true;
      continue;
    }
    unclaim(handles.first(i));
    const std::string name = "page handle " + std::to_string(handles[i]);
    return known ? failure(Code::already_mapped, name + " is mapped already; unmap it first")
                 : failure(Code::unknown_handle, name + " was released or never created");
  }
  return {};
}

void HostVmm::unclaim(std::span<const Handle> handles) {
  for (const Handle handle : handles) uses_[handle].mapped = false;
}

Status HostVmm::map_slots(uint64_t address, std::span<const Handle> handles, int protection) {
  for (size_t first = 0; first < handles.size();) {
    const size_t count = run_length(handles, first);
    const uint64_t start = address + first * page_bytes_;
    const auto offset = static_cast<off_t>(handles[first] * page_bytes_);
    if (mmap(pointer(start), count * page_bytes_, protection, MAP_SHARED | MAP_FIXED, fd_,
             offset) == MAP_FAILED) {
      const Status status = mapping_failure(errno);
      if (first > 0 && !make_hole(address, first * page_bytes_)) {
        return failure(Code::stranded, "a failed map could not be undone: " + status.message);
      }
      return status;
    }
    first += count;
  }
  return {};
}

Status HostVmm::map_with(uint64_t address, std::span<const Handle> handles, int protection) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(check_range(address, handles.size() * page_bytes_));
  const std::span<Handle> pages = find_pages(address, handles.size() * page_bytes_);
  if (pages.empty()) return failure(Code::invalid_argument, "the range is not reserved");
  if (std::any_of(pages.begin(), pages.end(), [](Handle h) { return h != kNoHandle; })) {
    return failure(Code::already_mapped, "part of the range is mapped already; unmap it first");
  }
  KV_TRY(claim(handles));
  if (Status status = map_slots(address, handles, protection); !status.ok()) {
    unclaim(handles);
    return status;
  }
  std::copy(handles.begin(), handles.end(), pages.begin());
  return {};
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
  KV_TRY(check_range(address, bytes));
  if (find_mapped_pages(address, bytes).empty()) {
    return failure(Code::not_mapped, "set_access needs every page of the range mapped");
  }
  if (mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) != 0) {
    return system_failure("mprotect", errno);
  }
  return {};
}

Status HostVmm::unmap(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(check_range(address, bytes));
  const std::span<Handle> pages = find_mapped_pages(address, bytes);
  if (pages.empty()) {
    return failure(Code::not_mapped, "unmap needs every page of the range mapped");
  }
  if (!make_hole(address, bytes)) return mapping_failure(errno);
  unclaim(pages);
  std::vector<Handle> released;
  std::copy_if(pages.begin(), pages.end(), std::back_inserter(released),
               [this](Handle handle) { return uses_[handle].released; });
  std::fill(pages.begin(), pages.end(), kNoHandle);
  for (const Handle handle : released) uses_.erase(handle);
  return punch(released);
}

Status HostVmm::close() {
  const std::lock_guard lock(mutex_);
  if (closed_ || forked_) return {};
  for (auto& [address, reservation] : reservations_) {
    if (!make_hole(address, reservation.bytes)) return mapping_failure(errno);
    std::fill(reservation.pages.begin(), reservation.pages.end(), kNoHandle);
  }
  uses_.clear();
  ::close(fd_);
  fd_ = -1;
  closed_ = true;
  return {};
}

void HostVmm::abandon_in_child() {
  forked_ = true;
  for (const auto& [address, reservation] : reservations_) make_hole(address, reservation.bytes);
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

}  // namespace kvcached
