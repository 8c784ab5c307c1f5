// The Vmm of a host device: Linux memory in place of a GPU's.
//
// One memfd per client holds its pages, so they die with the process (as on CUDA) and the kernel
// reports their resident bytes. A handle is a slot of that file:
//   map     = mmap(MAP_FIXED | MAP_SHARED) of the slot     unmap = PROT_NONE over it
//   release = fallocate(PUNCH_HOLE) of the slot, and so is scrubbing it
// The guard page is the kernel's page of zeros, mapped read-only, which costs no memory here. Slots
// are used in ascending order and never reused (the file is sparse and 2^60 bytes long), so pages
// that are created together are adjacent: a run of them is one mmap call and one kernel mapping,
// whatever was freed before. The kernel merges adjacent holes into one mapping. Both matter because
// vm.max_map_count allows a process 65,530 mappings. MAP_FIXED overwrites silently, so the books
// enforce the rules of vmm.h.
#pragma once

#include <atomic>
#include <mutex>

#include "fork_guard.h"
#include "vmm_books.h"

namespace kvcached {

class HostVmm final : public Vmm, private ForkGuarded {
 public:
  static Result<std::shared_ptr<Vmm>> make(uint64_t page_bytes);
  ~HostVmm() override;

  uint64_t page_bytes() const override { return books_.page_bytes(); }
  Location location() const override { return {}; }
  Result<uint64_t> reserve(uint64_t bytes) override;
  Status free_address(uint64_t address, uint64_t bytes) override;
  Result<std::vector<Handle>> create(size_t count) override;
  Result<std::vector<Handle>> create_block(size_t count) override;
  Status release(std::span<const Handle> handles) override;
  Status map(uint64_t address, std::span<const Handle> handles) override;
  Status map_accessible(uint64_t address, std::span<const Handle> handles) override;
  Status set_access(uint64_t address, uint64_t bytes) override;
  Status unmap(uint64_t address, uint64_t bytes) override;
  Status fill(uint64_t address, uint64_t bytes, unsigned char value) override;
  bool makes_zeros() const override { return true; }
  Result<std::unique_ptr<StreamEvent>> record_event(Stream stream) override;
  bool can_share_with(const Location& other) const override { return !other.on_gpu; }
  Result<SharedPages> export_pages(std::span<const Handle> handles) override;
  Result<std::unique_ptr<PageWindow>> open_window(const SharedPages& pages) override;
  Status guard_holes() override;
  Status cover(uint64_t address, uint64_t bytes) override;
  void scrub_pages() override;
  Status close() override;
  Status check_open() const override;
  int memory_fd() const override { return fd_; }

 private:
  HostVmm(uint64_t page_bytes, int fd);

  Status check_create(size_t count) const;
  Status map_with(uint64_t address, std::span<const Handle> handles, int protection);
  // `mapped` is the number of leading handles that were mapped, also on failure.
  Status map_slots(uint64_t address, std::span<const Handle> handles, int protection,
                   size_t* mapped);
  // Restores the holes in the first `bytes` of a failed map, with the guard page where it was
  // before.
  bool undo_map(uint64_t address, uint64_t bytes, std::span<const AddressRange> guarded);
  // Frees the memory of handles, with one call for each run of adjacent slots.
  Status punch(std::span<const Handle> handles);

  void lock_for_fork() override { mutex_.lock(); }
  void unlock_after_fork() override { mutex_.unlock(); }
  void abandon_in_child() override;

  VmmBooks books_;
  int fd_;
  bool guard_ = false;
  bool scrub_ = false;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> forked_ = false;
  mutable std::mutex mutex_;
};

}  // namespace kvcached
