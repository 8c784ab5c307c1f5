#include "vmm_books.h"

#include <algorithm>

namespace kvcached {

namespace {

constexpr uint64_t kMaxPages = uint64_t{1} << 26;  // of one reservation, to bound the books

bool is_mapped(Handle page) { return page != kNoHandle && page != kGuard && page != kBare; }
bool is_backed(Handle page) { return page != kNoHandle && page != kBare; }

// Maximal runs of `wanted` pages, among pages that begin at `address`.
template <class Wanted>
void find_runs(uint64_t address, uint64_t page_bytes, std::span<const Handle> pages, Wanted wanted,
               std::vector<AddressRange>& found) {
  auto first = std::find_if(pages.begin(), pages.end(), wanted);
  while (first != pages.end()) {
    const auto end = std::find_if_not(first, pages.end(), wanted);
    found.push_back({address + static_cast<uint64_t>(first - pages.begin()) * page_bytes,
                     static_cast<uint64_t>(end - first) * page_bytes});
    first = std::find_if(end, pages.end(), wanted);
  }
}

}  // namespace

Status VmmBooks::check_range(uint64_t address, uint64_t bytes) const {
  if (bytes == 0) return failure(Code::invalid_argument, "size is 0 bytes; give a positive size");
  if (address % page_bytes_ != 0 || bytes % page_bytes_ != 0) {
    return failure(Code::not_aligned, "offset and size must be multiples of the page size, ",
                   page_bytes_, " bytes");
  }
  return {};
}

std::span<const Handle> VmmBooks::find_pages(uint64_t address, uint64_t bytes) const {
  auto after = reservations_.upper_bound(address);
  if (after == reservations_.begin()) return {};
  const auto& [start, reservation] = *std::prev(after);
  const uint64_t offset = address - start;
  if (offset >= reservation.bytes || bytes > reservation.bytes - offset) return {};
  return std::span(reservation.pages).subspan(offset / page_bytes_, bytes / page_bytes_);
}

std::span<Handle> VmmBooks::find_pages(uint64_t address, uint64_t bytes) {
  const std::span<const Handle> found = std::as_const(*this).find_pages(address, bytes);
  return {const_cast<Handle*>(found.data()), found.size()};
}

Status VmmBooks::check_reserve(uint64_t bytes) const {
  KV_TRY(check_range(0, bytes));
  if (bytes / page_bytes_ <= kMaxPages) return {};
  return failure(Code::invalid_argument, bytes, " bytes are more than ", kMaxPages,
                 " pages; ask for less or use larger pages");
}

void VmmBooks::add_reservation(uint64_t address, uint64_t bytes) {
  std::vector<Handle> holes(bytes / page_bytes_, kNoHandle);
  reservations_.emplace(address, Reservation{bytes, std::move(holes)});
}

Status VmmBooks::check_free_address(uint64_t address, uint64_t bytes) const {
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second.bytes != bytes) {
    return failure(Code::invalid_argument, "not a reservation; free exactly what was reserved");
  }
  const auto& pages = found->second.pages;
  if (std::any_of(pages.begin(), pages.end(), is_mapped)) {
    return failure(Code::already_mapped, "pages are mapped in the reservation; unmap them first");
  }
  return {};
}

std::vector<Handle> VmmBooks::create(size_t count) {
  std::vector<Handle> handles(count);
  for (Handle& handle : handles) {
    handle = next_handle_++;
    uses_.emplace(handle, Use{});
  }
  return handles;
}

std::vector<Handle> VmmBooks::create_block(size_t count) {
  std::vector<Handle> handles = create(count);
  if (count > 1) blocks_.emplace(handles[0], count);
  return handles;
}

size_t VmmBooks::pages_from(Handle handle) const {
  const auto block = blocks_.find(handle);
  return block == blocks_.end() ? 1 : block->second;
}

bool VmmBooks::is_in_block(Handle handle) const {
  const auto after = blocks_.upper_bound(handle);
  if (after == blocks_.begin()) return false;
  const auto block = std::prev(after);
  return handle - block->first < block->second;
}

Status VmmBooks::check_whole(std::span<const Handle> handles) const {
  size_t pages = 0;
  for (size_t i = 0; i < handles.size(); i += pages) {
    pages = pages_from(handles[i]);
    bool whole = pages > 1 ? pages <= handles.size() - i : !is_in_block(handles[i]);
    for (size_t k = 1; whole && k < pages; ++k) whole = handles[i + k] == handles[i] + k;
    if (whole) continue;
    return failure(
        Code::invalid_argument,
        "pages of one block must be mapped, unmapped and released together and in order");
  }
  return {};
}

Result<std::vector<Handle>> VmmBooks::mark_released(std::span<const Handle> handles) {
  KV_TRY(check_whole(handles));
  std::vector<Handle> idle;
  for (size_t i = 0; i < handles.size(); ++i) {
    auto use = uses_.find(handles[i]);
    if (use == uses_.end() || use->second.released) {
      unmark_released(handles.first(i));
      return failure(Code::unknown_handle, "page handle ", handles[i],
                     " was released or never created");
    }
    use->second.released = true;
    if (!use->second.mapped) idle.push_back(handles[i]);
  }
  return idle;
}

void VmmBooks::unmark_released(std::span<const Handle> handles) {
  for (const Handle handle : handles) uses_[handle].released = false;
}

void VmmBooks::forget(std::span<const Handle> handles) {
  for (const Handle handle : handles) {
    uses_.erase(handle);
    blocks_.erase(handle);
  }
}

Status VmmBooks::check_known(std::span<const Handle> handles) const {
  for (const Handle handle : handles) {
    const auto use = uses_.find(handle);
    if (use != uses_.end() && !use->second.released) continue;
    return failure(Code::unknown_handle, "page handle ", handle, " was released or never created");
  }
  return {};
}

Status VmmBooks::claim(std::span<const Handle> handles) {
  for (size_t i = 0; i < handles.size(); ++i) {
    auto use = uses_.find(handles[i]);
    const bool known = use != uses_.end() && !use->second.released;
    if (known && !use->second.mapped) {
      use->second.mapped = true;
      continue;
    }
    unclaim(handles.first(i));
    const std::string name = "page handle " + std::to_string(handles[i]);
    return known ? failure(Code::already_mapped, name, " is mapped already; unmap it first")
                 : failure(Code::unknown_handle, name, " was released or never created");
  }
  return {};
}

void VmmBooks::unclaim(std::span<const Handle> handles) {
  for (const Handle handle : handles) uses_[handle].mapped = false;
}

Status VmmBooks::map(uint64_t address, std::span<const Handle> handles) {
  KV_TRY(check_range(address, handles.size() * page_bytes_));
  const std::span<Handle> pages = find_pages(address, handles.size() * page_bytes_);
  if (pages.empty()) return failure(Code::invalid_argument, "the range is not reserved");
  if (std::any_of(pages.begin(), pages.end(), is_mapped)) {
    return failure(Code::already_mapped, "part of the range is mapped already; unmap it first");
  }
  KV_TRY(check_whole(handles));
  KV_TRY(claim(handles));
  std::copy(handles.begin(), handles.end(), pages.begin());
  return {};
}

Status VmmBooks::check_whole_mapped(uint64_t address, uint64_t bytes, const char* call) const {
  KV_TRY(check_mapped(address, bytes, call));
  return check_whole(mapped(address, bytes));
}

Status VmmBooks::check_mapped(uint64_t address, uint64_t bytes, const char* call) const {
  KV_TRY(check_range(address, bytes));
  const std::span<const Handle> pages = find_pages(address, bytes);
  if (!pages.empty() && std::all_of(pages.begin(), pages.end(), is_mapped)) return {};
  return failure(Code::not_mapped, std::string(call), " needs every page of the range mapped");
}

std::span<const Handle> VmmBooks::mapped(uint64_t address, uint64_t bytes) const {
  return find_pages(address, bytes);
}

std::vector<Handle> VmmBooks::unmap(uint64_t address, uint64_t bytes, Handle hole) {
  const std::span<Handle> pages = find_pages(address, bytes);
  unclaim(pages);
  std::vector<Handle> released;
  std::copy_if(pages.begin(), pages.end(), std::back_inserter(released),
               [this](Handle handle) { return uses_[handle].released; });
  std::fill(pages.begin(), pages.end(), hole);
  forget(released);
  return released;
}

std::vector<AddressRange> VmmBooks::holes(uint64_t address, uint64_t bytes, Handle kind) const {
  std::vector<AddressRange> found;
  const auto wanted = [kind](Handle page) { return page == kind; };
  find_runs(address, page_bytes_, find_pages(address, bytes), wanted, found);
  return found;
}

void VmmBooks::set_holes(const AddressRange& range, Handle kind) {
  const std::span<Handle> pages = find_pages(range.address, range.bytes);
  std::fill(pages.begin(), pages.end(), kind);
}

std::vector<AddressRange> VmmBooks::mapped_ranges() const {
  std::vector<AddressRange> found;
  for (const auto& [start, reservation] : reservations_) {
    find_runs(start, page_bytes_, reservation.pages, is_backed, found);
  }
  return found;
}

void VmmBooks::clear() {
  for (auto& [start, reservation] : reservations_) {
    std::fill(reservation.pages.begin(), reservation.pages.end(), kNoHandle);
  }
  uses_.clear();
  blocks_.clear();
}

}  // namespace kvcached
