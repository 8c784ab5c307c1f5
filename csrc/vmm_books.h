// What is reserved, created and mapped in one Vmm: the rules of vmm.h without any memory. A
// backend asks the books, makes its calls to the OS or the driver, and writes down what came of
// them, so that every backend refuses the same things with the same words.
// Thread rule: the backend's lock is held in every call.
#pragma once

#include <map>
#include <unordered_map>

#include "vmm.h"

namespace kvcached {

// What a page of a reservation shows where no handle is mapped: nothing, the guard page, or nothing
// for now where it should be the guard page.
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
    std::vector<Handle> pages;  // what is mapped there, or kNoHandle, kGuard, kBare for a hole
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
  // The same as a block: map, unmap, set_access and release take it whole and in order.
  std::vector<Handle> create_block(size_t count);
  // How many pages there are from this one to the end of what begins with it: a block, or a page of
  // its own.
  size_t pages_from(Handle handle) const;
  bool is_in_block(Handle handle) const;
  // Marks all handles as released, or none. Answers those that are not mapped: their memory can
  // go at once, and then they are forgotten.
  Result<std::vector<Handle>> mark_released(std::span<const Handle> handles);
  void unmark_released(std::span<const Handle> handles);
  void forget(std::span<const Handle> handles);
  // Code::unknown_handle unless all exist.
  Status check_known(std::span<const Handle> handles) const;

  // Checks a map and writes it down, over holes of any kind. unmap takes it back should the backend
  // fail.
  Status map(uint64_t address, std::span<const Handle> handles);
  // `call` is named in the message if part of the range is not mapped.
  Status check_mapped(uint64_t address, uint64_t bytes, const char* call) const;
  // The same, and that no block is cut.
  Status check_whole_mapped(uint64_t address, uint64_t bytes, const char* call) const;
  // The handles mapped there. REQUIRES: check_mapped
  std::span<const Handle> mapped(uint64_t address, uint64_t bytes) const;
  // Leaves holes of a kind. Those of the handles mapped there that were released before: they are
  // forgotten now. REQUIRES: check_mapped
  std::vector<Handle> unmap(uint64_t address, uint64_t bytes, Handle hole = kNoHandle);
  // The maximal runs of one kind of hole in a range.
  std::vector<AddressRange> holes(uint64_t address, uint64_t bytes, Handle kind) const;
  // REQUIRES: holes
  void set_holes(const AddressRange& range, Handle kind);
  // The maximal runs of pages with something mapped, the guard page included.
  std::vector<AddressRange> mapped_ranges() const;
  // Forgets all handles and what was mapped; reservations stay.
  void clear();

 private:
  struct Use {
    bool mapped = false;
    bool released = false;
  };

  Status check_range(uint64_t address, uint64_t bytes) const;
  // The pages of a range that lies within one reservation; empty if it does not.
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
