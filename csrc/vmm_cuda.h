// The Vmm of a GPU: the CUDA driver's virtual memory calls, with one allocation of page_bytes() per
// handle, or one for all handles of a block. Breaking a rule of the driver is often undefined
// behaviour instead of an error, so the books refuse first, with the same error as on a host
// device.
//
// Calls per run of n pages: map n x cuMemMap and one cuMemSetAccess; unmap one cuMemUnmap (a range
// of whole mappings is one call). Where a call fails half way, the driver's state is rolled back.
//   release of a mapped handle calls cuMemRelease at its unmap, so that the whole call can still
//   be refused; a release that fails half way creates the freed pages again.
// A driver handle whose release failed in a rollback is kept and released again by close().
// With a guard page an unmap maps it at each freed page (n x cuMemMap and one cuMemSetAccess), and
// a map unmaps it first, one cuMemUnmap per run of such holes. Between the two calls the range
// faults, because the driver cannot replace a mapping.
// memory_fd() is -1, and the ledger counts committed bytes instead of resident ones.
#pragma once

#include <atomic>
#include <mutex>

#include "cuda_guard.h"
#include "fork_guard.h"
#include "vmm_books.h"

namespace kvcached {

class CudaVmm final : public Vmm, private ForkGuarded {
 public:
  // Code::unknown_device if the GPU does not exist, Code::not_aligned if page_bytes is not the
  // driver's granularity times a power of two, Code::forked after a fork of a process that used
  // CUDA.
  static Result<std::shared_ptr<Vmm>> make(int ordinal, uint64_t page_bytes);
  ~CudaVmm() override;

  uint64_t page_bytes() const override { return books_.page_bytes(); }
  Location location() const override { return {true, device_->ordinal()}; }
  Result<uint64_t> reserve(uint64_t bytes) override;
  Status free_address(uint64_t address, uint64_t bytes) override;
  Result<std::vector<Handle>> create(size_t count) override;
  Result<std::vector<Handle>> create_block(size_t count) override;
  Status release(std::span<const Handle> handles) override;
  Status map(uint64_t address, std::span<const Handle> handles) override;
  Status set_access(uint64_t address, uint64_t bytes) override;
  Status unmap(uint64_t address, uint64_t bytes) override;
  Status fill(uint64_t address, uint64_t bytes, unsigned char value) override;
  bool makes_zeros() const override { return false; }
  Result<std::unique_ptr<StreamEvent>> record_event(Stream stream) override;
  bool can_share_with(const Location& other) const override;
  Result<SharedPages> export_pages(std::span<const Handle> handles) override;
  Result<std::unique_ptr<PageWindow>> open_window(const SharedPages& pages) override;
  Status guard_holes() override;
  Status cover(uint64_t address, uint64_t bytes) override;
  void scrub_pages() override;
  Status close() override;
  Status check_open() const override;
  int memory_fd() const override { return -1; }

 private:
  CudaVmm(std::shared_ptr<CudaDevice> device, uint64_t page_bytes);

  Status check_not_forked() const;
  Status create_all(std::span<CuHandle> made);
  // Corrects the books if the driver fails. REQUIRES: mapped in the books
  Status map_all(uint64_t address, std::span<const Handle> handles);
  // Unmaps the guard page from the range, which makes its holes bare.
  Status uncover(uint64_t address, uint64_t bytes);
  // The driver's calls of uncover. `done`: number of ranges before a failure.
  Status unmap_guard(std::span<const AddressRange> guarded, size_t& done);
  void bared(std::span<const AddressRange> ranges);
  // Zeroes pages that are about to be unmapped, after scrub_pages.
  Status scrub(uint64_t address, uint64_t bytes);
  // Maps the guard page at every bare hole, as far as the driver permits.
  void cover_bare();
  Status release_all(std::span<const Handle> handles);
  // Creates the memory again if a release that failed half way freed it.
  Result<CuHandle> memory_of(Handle handle);
  Status map_page(uint64_t address, Handle handle);
  // Releases memory that no handle refers to any more. What fails is released again by close().
  void drop(std::span<const CuHandle> unowned);
  Status give_back_everything();

  void lock_for_fork() override { mutex_.lock(); }
  void unlock_after_fork() override { mutex_.unlock(); }
  void abandon_in_child() override;

  const std::shared_ptr<CudaDevice> device_;
  VmmBooks books_;
  std::unordered_map<Handle, CuHandle> made_;  // by handle of a page, or of a block's first page
  std::vector<CuHandle> owed_;
  std::unique_ptr<CudaGuard> guard_;  // null: holes fault
  std::vector<AddressRange> bare_;    // ranges that may have bare holes
  bool scrub_ = false;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> forked_ = false;
  mutable std::mutex mutex_;
};

}  // namespace kvcached
