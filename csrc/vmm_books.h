// Records of what is reserved, created and mapped in one Vmm: the rules of vmm.h without any
// memory. A backend checks the books, makes its calls to the OS or the driver, and records the
// result, so that every backend refuses the same calls with the same messages. Thread rule: the
// backend's lock is held in every call.
#pragma once

#include <map>
#include <unordered_map>

#include "vmm.h"

namespace kvcached {

// State of a page of a reservation without a handle: a hole, the guard page, or a hole that should
// show the guard page.
inline constexpr Handle kGuard = UINT64_MAX;
inline constexpr Handle kBare = UINT64_MAX - 1;

struct AddressRange {
  uint64_t address;
  uint64_t bytes;
};

class VmmBooks {
 public:
  struct Reservation {
    uint64_t bytes;
    std::vector<Handle> pages;  // handle mapped there, or kNoHandle, kGuard, kBare for a hole
  };

  explicit VmmBooks(uint64_t page_bytes) : page_bytes_(page_bytes) {}
  uint64_t page_bytes() const { return page_bytes_; }

  Status check_reserve(uint64_t bytes) const;
  void add_reservation(uint64_t address, uint64_t bytes);
  Status check_free_address(uint64_t address, uint64_t bytes) const;
  void remove_reservation(uint64_t address) { reservations_.erase(address); }
  const std::map<uint64_t, Reservation>& reservations() const { return reservations_; }

  Handle next_handle() const { return next_handle_; }
  // REQUIRES: count > 0
  std::vector<Handle> create(size_t count);
  // The same as a block, which map, unmap, set_access and release take whole and in order.
  std::vector<Handle> create_block(size_t count);
  // Number of pages of the block that begins with this one, or 1 for a single page.
  size_t pages_from(Handle handle) const;
  bool is_in_block(Handle handle) const;
  // Marks all handles as released, or none. Returns those that are not mapped, which are removed
  // because their memory can be freed at once.
  Result<std::vector<Handle>> mark_released(std::span<const Handle> handles);
  void unmark_released(std::span<const Handle> handles);
  void forget(std::span<const Handle> handles);
  // Code::unknown_handle unless all exist.
  Status check_known(std::span<const Handle> handles) const;

  // Checks a map over holes of any kind and records it. If the backend fails, unmap undoes it.
  Status map(uint64_t address, std::span<const Handle> handles);
  // Code::not_mapped, naming `call`, if part of the range is not mapped.
  Status check_mapped(uint64_t address, uint64_t bytes, const char* call) const;
  // The same, and Code::invalid_argument if a block is cut.
  Status check_whole_mapped(uint64_t address, uint64_t bytes, const char* call) const;
  // Returns the handles mapped there. REQUIRES: check_mapped
  std::span<const Handle> mapped(uint64_t address, uint64_t bytes) const;
  // Replaces mapped pages by holes of a kind. Returns the handles mapped there that were released
  // before, which are removed. REQUIRES: check_mapped
  std::vector<Handle> unmap(uint64_t address, uint64_t bytes, Handle hole = kNoHandle);
  // Maximal runs of one kind of hole in a range.
  std::vector<AddressRange> holes(uint64_t address, uint64_t bytes, Handle kind) const;
  // REQUIRES: holes
  void set_holes(const AddressRange& range, Handle kind);
  // Maximal runs of mapped pages, including the guard page.
  std::vector<AddressRange> mapped_ranges() const;
  // Removes all handles and mappings, but no reservation.
  void clear();

 private:
  struct Use {
    bool mapped = false;
    bool released = false;
  };

  Status check_range(uint64_t address, uint64_t bytes) const;
  // Pages of a range within one reservation. Empty if the range is not.
  std::span<const Handle> find_pages(uint64_t address, uint64_t bytes) const;
  std::span<Handle> find_pages(uint64_t address, uint64_t bytes);
  // Code::invalid_argument if a block is cut or out of order.
  Status check_whole(std::span<const Handle> handles) const;
  // Marks every handle as mapped, or none.
  Status claim(std::span<const Handle> handles);
  void unclaim(std::span<const Handle> handles);

  const uint64_t page_bytes_;
  Handle next_handle_ = 1;
  std::map<uint64_t, Reservation> reservations_;  // by address
  std::unordered_map<Handle, Use> uses_;
  std::map<Handle, size_t> blocks_;  // pages of each, by its first
};

}  // namespace kvcached
