#include "vmm_cuda.h"

#include <bit>

#include "cuda_window.h"

namespace kvcached {

namespace {

Status check_page_bytes(uint64_t page_bytes, uint64_t granularity_bytes) {
  if (page_bytes != 0 && page_bytes % granularity_bytes == 0 &&
      std::has_single_bit(page_bytes / granularity_bytes)) {
    return {};
  }
  return failure(Code::not_aligned, "page_bytes ", page_bytes,
                 " must be the driver's granularity of ", granularity_bytes,
                 " bytes, or that times a power of two");
}

class CudaEvent final : public StreamEvent {
 public:
  CudaEvent(std::shared_ptr<const CudaDevice> device, CuEvent event, Stream stream)
      : device_(std::move(device)), event_(event), stream_(stream) {}
  ~CudaEvent() override { device_->destroy_event(event_); }
  Result<bool> has_passed() override { return device_->has_passed(event_, stream_); }

 private:
  const std::shared_ptr<const CudaDevice> device_;
  const CuEvent event_;
  const Stream stream_;
};

}  // namespace

Result<std::shared_ptr<Vmm>> CudaVmm::make(int ordinal, uint64_t page_bytes) {
  KV_ASSIGN(std::unique_ptr<CudaDevice> device, CudaDevice::open(ordinal));
  Status status = check_page_bytes(page_bytes, device->granularity_bytes());
  if (!status.ok()) return status;
  return std::shared_ptr<Vmm>(new CudaVmm(std::move(device), page_bytes));
}

CudaVmm::CudaVmm(std::shared_ptr<CudaDevice> device, uint64_t page_bytes)
    : device_(std::move(device)), books_(page_bytes) {
  guard_against_fork(this);
}

CudaVmm::~CudaVmm() {
  unguard_against_fork(this);
  // What fails here is freed when the process ends.
  (void)close();
  if (forked_) return;
  for (const auto& [address, reservation] : books_.reservations()) {
    (void)device_->free_address(address, reservation.bytes);
  }
}

Status CudaVmm::check_not_forked() const {
  if (!forked_) return {};
  return failure(Code::forked,
                 "this client belongs to the parent process; CUDA does not survive a fork: spawn, "
                 "or fork before the first client is opened");
}

Status CudaVmm::check_open() const {
  KV_TRY(check_not_forked());
  if (closed_) return failure(Code::closed, "the client is closed");
  return {};
}

Result<uint64_t> CudaVmm::reserve(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_reserve(bytes));
  Result<uint64_t> address = device_->reserve(bytes, page_bytes());
  if (address.ok()) books_.add_reservation(address.value(), bytes);
  return address;
}

Status CudaVmm::free_address(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_not_forked());
  KV_TRY(books_.check_free_address(address, bytes));
  KV_TRY(uncover(address, bytes));
  KV_TRY(device_->free_address(address, bytes));
  books_.remove_reservation(address);
  return {};
}

Status CudaVmm::map_page(uint64_t address, Handle handle) {
  KV_ASSIGN(CuHandle memory, memory_of(handle));
  return device_->map(address, books_.pages_from(handle) * page_bytes(), memory);
}

Status CudaVmm::map_all(uint64_t address, std::span<const Handle> handles) {
  for (size_t i = 0; i < handles.size(); i += books_.pages_from(handles[i])) {
    const Status status = map_page(address + i * page_bytes(), handles[i]);
    if (status.ok()) continue;
    const uint64_t done = i * page_bytes();
    const bool undone = i == 0 || device_->unmap(address, done).ok();
    // Pages that stay mapped stay in the books, and close() unmaps them.
    const uint64_t kept = undone ? 0 : done;
    (void)books_.unmap(address + kept, handles.size() * page_bytes() - kept);
    return undone ? status
                  : failure(Code::stranded, "a failed map could not be undone: ", status.message);
  }
  return {};
}

Status CudaVmm::map(uint64_t address, std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  const uint64_t bytes = handles.size() * page_bytes();
  const std::vector<AddressRange> guarded = books_.holes(address, bytes, kGuard);
  const std::vector<AddressRange> bare = books_.holes(address, bytes, kBare);
  KV_TRY(books_.map(address, handles));
  size_t uncovered = 0;
  Status status = unmap_guard(guarded, uncovered);
  if (status.ok()) {
    status = map_all(address, handles);
  } else {
    (void)books_.unmap(address, bytes);
  }
  if (status.ok() || status.code == Code::stranded) return status;
  for (const AddressRange& range : guarded) books_.set_holes(range, kGuard);
  for (const AddressRange& range : bare) books_.set_holes(range, kBare);
  bared(std::span(guarded).first(uncovered));
  cover_bare();
  return status;
}

Status CudaVmm::unmap_guard(std::span<const AddressRange> guarded, size_t& done) {
  for (done = 0; done < guarded.size(); ++done) {
    KV_TRY(device_->unmap(guarded[done].address, guarded[done].bytes));
  }
  return {};
}

void CudaVmm::bared(std::span<const AddressRange> ranges) {
  for (const AddressRange& range : ranges) books_.set_holes(range, kBare);
  bare_.insert(bare_.end(), ranges.begin(), ranges.end());
}

Status CudaVmm::uncover(uint64_t address, uint64_t bytes) {
  const std::vector<AddressRange> guarded = books_.holes(address, bytes, kGuard);
  size_t done = 0;
  Status status = unmap_guard(guarded, done);
  bared(std::span(guarded).first(done));
  return status;
}

Status CudaVmm::scrub(uint64_t address, uint64_t bytes) {
  if (!scrub_ || device_->fill(address, bytes, 0).ok()) return {};
  // Unmaps pages that were mapped without access.
  KV_TRY(device_->set_access(address, bytes));
  return device_->fill(address, bytes, 0);
}

Status CudaVmm::fill(uint64_t address, uint64_t bytes, unsigned char value) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_mapped(address, bytes, "fill"));
  return device_->fill(address, bytes, value);
}

void CudaVmm::cover_bare() {
  std::vector<AddressRange> left;
  for (const AddressRange& suspected : bare_) {
    for (const AddressRange& range : books_.holes(suspected.address, suspected.bytes, kBare)) {
      const uint64_t covered = guard_->cover(range.address, range.bytes);
      books_.set_holes({range.address, covered}, kGuard);
      if (covered < range.bytes) left.push_back({range.address + covered, range.bytes - covered});
    }
  }
  bare_ = std::move(left);
}

Status CudaVmm::guard_holes() {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  if (guard_ != nullptr) return {};
  KV_ASSIGN(guard_, CudaGuard::make(device_, page_bytes()));
  return {};
}

Status CudaVmm::cover(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  if (guard_ == nullptr) return {};
  bared(books_.holes(address, bytes, kNoHandle));
  cover_bare();
  return {};
}

void CudaVmm::scrub_pages() {
  const std::lock_guard lock(mutex_);
  scrub_ = true;
}

Status CudaVmm::set_access(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_whole_mapped(address, bytes, "set_access"));
  return device_->set_access(address, bytes);
}

Status CudaVmm::unmap(uint64_t address, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_whole_mapped(address, bytes, "unmap"));
  KV_TRY(scrub(address, bytes));
  KV_TRY(device_->unmap(address, bytes));
  std::vector<CuHandle> unowned;
  for (const Handle handle : books_.unmap(address, bytes, guard_ ? kBare : kNoHandle)) {
    if (const auto made = made_.find(handle); made != made_.end()) {
      unowned.push_back(made->second);
      made_.erase(made);
    }
  }
  drop(unowned);
  if (guard_ == nullptr) return {};
  const AddressRange left = {address, bytes};
  bared(std::span(&left, 1));
  cover_bare();
  return {};
}

Result<std::unique_ptr<StreamEvent>> CudaVmm::record_event(Stream stream) {
  KV_TRY(check_open());
  KV_ASSIGN(CuEvent event, device_->record_event(stream));
  return std::unique_ptr<StreamEvent>(new CudaEvent(device_, event, stream));
}

bool CudaVmm::can_share_with(const Location& other) const {
  return check_open().ok() && other.on_gpu && device_->exports_to(other.ordinal);
}

Result<SharedPages> CudaVmm::export_pages(std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  KV_TRY(check_open());
  KV_TRY(books_.check_known(handles));
  if (!device_->exports()) {
    return failure(Code::unavailable,
                   "the driver cannot share memory of this GPU between processes");
  }
  SharedPages shared;
  for (const Handle handle : handles) {
    if (books_.is_in_block(handle)) {
      return failure(Code::unavailable, "pages of a block cannot be shared");
    }
    KV_ASSIGN(CuHandle memory, memory_of(handle));
    KV_ASSIGN(int file, device_->export_file(memory));
    shared.places.push_back({shared.files.size(), 0});
    shared.files.emplace_back(file);
  }
  return shared;
}

Result<std::unique_ptr<PageWindow>> CudaVmm::open_window(const SharedPages& pages) {
  KV_TRY(check_open());
  return CudaWindow::open(device_, pages, page_bytes());
}

Status CudaVmm::give_back_everything() {
  for (const AddressRange& range : books_.mapped_ranges()) {
    KV_TRY(uncover(range.address, range.bytes));
  }
  for (const AddressRange& range : books_.mapped_ranges()) {
    KV_TRY(scrub(range.address, range.bytes));
    KV_TRY(device_->unmap(range.address, range.bytes));
    (void)books_.unmap(range.address, range.bytes);
  }
  if (guard_ != nullptr) KV_TRY(guard_->release());
  guard_ = nullptr;
  while (!made_.empty()) {
    KV_TRY(device_->release(made_.begin()->second));
    made_.erase(made_.begin());
  }
  while (!owed_.empty()) {
    KV_TRY(device_->release(owed_.back()));
    owed_.pop_back();
  }
  return {};
}

Status CudaVmm::close() {
  const std::lock_guard lock(mutex_);
  if (closed_ || forked_) return {};
  // Code::closed: the driver has shut down and freed everything.
  if (Status status = give_back_everything(); !status.ok() && status.code != Code::closed) {
    return status;
  }
  books_.clear();
  closed_ = true;
  return {};
}

void CudaVmm::abandon_in_child() {
  forked_ = true;
  device_->abandon();
}

}  // namespace kvcached
