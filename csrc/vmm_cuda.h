// The Vmm of a GPU: the CUDA driver's virtual memory calls, one allocation of page_bytes() per
// handle, or one for all the handles of a block. The driver enforces its rules by undefined
// behaviour as often as by errors; the books refuse first, so that a mistake is the same named
// error as on a host device.
//
// Calls per run of n pages: map n x cuMemMap and one cuMemSetAccess; unmap one cuMemUnmap (a range
// of whole mappings is one call). Where a call fails half way, the driver's state is rolled back.
//   release of a mapped handle calls cuMemRelease at its unmap, not before, so that it can still
//   be refused as a whole; a release that fails half way makes the pages that are gone anew.
// A driver handle whose release failed in a rollback is kept and released again by close().
// With a guard page an unmap maps that at each page that it leaves (n x cuMemMap and one
// cuMemSetAccess), and a map unmaps it first, one cuMemUnmap per run of such holes. Between the two
// calls the range is a hole that faults: the driver cannot exchange a mapping.
// There is no memory file: memory_fd() is -1, and the ledger counts what is committed instead.
#pragma once

#include <atomic>
#include <mutex>

#include "cuda_guard.h"
#include "fork_guard.h"
#include "vmm_books.h"

namespace kvcached {

class CudaVmm final : public Vmm, private ForkGuarded {
 public:
  // Code::unknown_device if there is no such GPU, Code::not_aligned if page_bytes is not the
  // driver's granularity times a power of two, Code::forked after a fork of a user of CUDA.
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
  // REQUIRES: the books say mapped. They are put right if the driver fails.
  Status map_all(uint64_t address, std::span<const Handle> handles);
  // Unmaps the guard page from the range: its holes are bare then.
  Status uncover(uint64_t address, uint64_t bytes);
  // The driver's part of that: `done` ranges before it failed.
  Status unmap_guard(std::span<const AddressRange> guarded, size_t& done);
  void bared(std::span<const AddressRange> ranges);
  // Zeroes pages that are to leave, if that was asked for.
  Status scrub(uint64_t address, uint64_t bytes);
  // Maps it at every bare hole, as far as the driver agrees.
  void cover_bare();
  Status release_all(std::span<const Handle> handles);
  // Made anew if a release that failed half way took it.
  Result<CuHandle> memory_of(Handle handle);
  Status map_page(uint64_t address, Handle handle);
  // Gives back what no handle stands for any more; what fails is owed until close().
  void drop(std::span<const CuHandle> unowned);
  Status give_back_everything();

  void lock_for_fork() override { mutex_.lock(); }
  void unlock_after_fork() override { mutex_.unlock(); }
  void abandon_in_child() override;

  const std::shared_ptr<CudaDevice> device_;
  VmmBooks books_;
  std::unordered_map<Handle, CuHandle> made_;  // of each page of ours, and of a block's first
  std::vector<CuHandle> owed_;
  std::unique_ptr<CudaGuard> guard_;  // null: holes fault
  std::vector<AddressRange> bare_;    // where holes may be bare
  bool scrub_ = false;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> forked_ = false;
  mutable std::mutex mutex_;
};

}  // namespace kvcached
