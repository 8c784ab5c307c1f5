// The Vmm of a host device: Linux memory that stands in for a GPU's.
//
// One memfd per client holds its pages, so they die with the process (as on CUDA) and the kernel
// can be asked for their resident bytes. A handle is a slot of that file:
//   map     = mmap(MAP_FIXED | MAP_SHARED) of the slot     unmap = PROT_NONE over it
//   release = fallocate(PUNCH_HOLE) of the slot
// Slots are handed out in ascending order and never reused (the file is sparse and 2^60 bytes
// long): pages that are created together lie together, so a run of them is one mmap call and one
// kernel mapping, whatever was freed before. Holes merge into one mapping by themselves. Both
// matter because vm.max_map_count allows a process 65,530 mappings.
// MAP_FIXED overwrites silently; the books kept here are what enforces the rules of vmm.h.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>

#include "fork_guard.h"
#include "vmm.h"

namespace kvcached {

class HostVmm final : public Vmm, private ForkGuarded {
 public:
  static Result<std::shared_ptr<Vmm>> make(uint64_t page_bytes);
  ~HostVmm() override;
  HostVmm(const HostVmm&) = delete;
  HostVmm& operator=(const HostVmm&) = delete;

  uint64_t page_bytes() const override { return page_bytes_; }
  Result<uint64_t> reserve(uint64_t bytes) override;
  Status free_address(uint64_t address, uint64_t bytes) override;
  Result<std::vector<Handle>> create(size_t count) override;
  Status release(std::span<const Handle> handles) override;
  Status map(uint64_t address, std::span<const Handle> handles) override;
  Status map_accessible(uint64_t address, std::span<const Handle> handles) override;
  Status set_access(uint64_t address, uint64_t bytes) override;
  Status unmap(uint64_t address, uint64_t bytes) override;
  Status close() override;
  Status check_open() const override;
  int memory_fd() const override { return fd_; }

 private:
  struct Reservation {
    uint64_t bytes;
    std::vector<Handle> pages;  // what is mapped there, kNoHandle for a hole
  };
  struct Use {
    bool mapped = false;
    bool released = false;
  };

  HostVmm(uint64_t page_bytes, int fd);

  Status check_range(uint64_t address, uint64_t bytes) const;
  // The pages of a range that lies within one reservation; empty if it does not.
  std::span<Handle> find_pages(uint64_t address, uint64_t bytes);
  // The same if every page of the range is mapped, else an empty span.
  std::span<Handle> find_mapped_pages(uint64_t address, uint64_t bytes);
  // Marks every handle as mapped, or none.
  Status claim(std::span<const Handle> handles);
  void unclaim(std::span<const Handle> handles);
  Status map_with(uint64_t address, std::span<const Handle> handles, int protection);
  Status map_slots(uint64_t address, std::span<const Handle> handles, int protection);
  // Gives back the memory of handles, runs of adjacent slots in one call.
  Status punch(std::span<const Handle> handles);

  void lock_for_fork() override { mutex_.lock(); }
  void unlock_after_fork() override { mutex_.unlock(); }
  void abandon_in_child() override;

  const uint64_t page_bytes_;
  int fd_;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> forked_ = false;
  Handle next_handle_ = 1;
  std::map<uint64_t, Reservation> reservations_;  // by address
  std::unordered_map<Handle, Use> uses_;
  mutable std::mutex mutex_;
};

}  // namespace kvcached
