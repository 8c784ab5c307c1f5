// The rules of vmm.h. Written against the interface: a new backend is one more line in backends().
#include "backends.h"
#include "check.h"

namespace kvcached::testing {

namespace {

void names_choose_the_backend() {
  for (const char* name : {"", "host", "host:", "host:x", "gpu:0", "host:12345", ":0"}) {
    CHECK_CODE(make_vmm(name, kPage).status(), Code::unknown_device);
  }
  CHECK_CODE(make_vmm("host:0", 1000).status(), Code::not_aligned);
}

void a_reservation_is_a_hole(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(8 * page));
  CHECK(address % page == 0);
  CHECK(!b.is_readable(address));
  CHECK(holds(b, *vmm, 0));
  CHECK_CODE(vmm->reserve(0).status(), Code::invalid_argument);
  CHECK_CODE(vmm->reserve(page + 1).status(), Code::not_aligned);
  CHECK_CODE(vmm->reserve(uint64_t{1} << 62).status(), Code::invalid_argument);
  CHECK_CODE(vmm->free_address(address, page), Code::invalid_argument);
  CHECK_CODE(vmm->free_address(address + page, 7 * page), Code::invalid_argument);
  CHECK_OK(vmm->free_address(address, 8 * page));
  CHECK_CODE(vmm->free_address(address, 8 * page), Code::invalid_argument);
}

void pages_are_accessible_after_set_access_only(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(4 * page));
  const auto pages = value_of(vmm->create(2));
  CHECK_OK(vmm->map(address + page, pages));
  CHECK(!b.is_readable(address + page));
  CHECK_CODE(vmm->set_access(address, 2 * page), Code::not_mapped);
  CHECK_CODE(vmm->set_access(address + page, 100), Code::not_aligned);
  CHECK_OK(vmm->set_access(address + page, 2 * page));
  b.fill(address + page, 2 * page, 7);
  CHECK(!b.is_readable(address) && !b.is_readable(address + 3 * page));
  CHECK(holds(b, *vmm, 2 * page));
}

void map_takes_unmapped_addresses_and_free_handles(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(4 * page));
  const auto pages = value_of(vmm->create(3));
  const std::span all(pages);
  CHECK_OK(vmm->map_accessible(address + page, all.first(1)));
  b.fill(address + page, page, 5);
  CHECK_CODE(vmm->map(address, all.subspan(1)), Code::already_mapped);
  CHECK_CODE(vmm->map(address + 2 * page, all.first(2)), Code::already_mapped);
  const Handle twice[] = {pages[1], pages[1]};
  CHECK_CODE(vmm->map(address + 2 * page, twice), Code::already_mapped);
  const Handle unknown[] = {pages[1], 999};
  CHECK_CODE(vmm->map(address + 2 * page, unknown), Code::unknown_handle);
  CHECK_CODE(vmm->map(address + 3 * page, all.subspan(1)), Code::invalid_argument);
  CHECK_CODE(vmm->map(address + 1, all.subspan(1)), Code::not_aligned);
  CHECK_CODE(vmm->map(address, {}), Code::invalid_argument);
  // None of them changed anything.
  CHECK(b.read_at(address + page) == 5);
  CHECK_OK(vmm->map_accessible(address + 2 * page, all.subspan(1)));
}

void unmap_takes_what_is_mapped(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(4 * page));
  const auto pages = value_of(vmm->create(2));
  CHECK_OK(vmm->map_accessible(address, pages));
  b.fill(address, 2 * page, 3);
  CHECK_CODE(vmm->unmap(address, 3 * page), Code::not_mapped);
  CHECK_CODE(vmm->unmap(address + 2 * page, page), Code::not_mapped);
  CHECK_CODE(vmm->unmap(address, page / 2), Code::not_aligned);
  CHECK_CODE(vmm->unmap(address, 0), Code::invalid_argument);
  CHECK_CODE(vmm->free_address(address, 4 * page), Code::already_mapped);
  CHECK(b.read_at(address) == 3);
  CHECK_OK(vmm->unmap(address, page));
  CHECK(!b.is_readable(address) && b.is_readable(address + page));
  // The page keeps its content and can be mapped elsewhere.
  CHECK_OK(vmm->map_accessible(address + 3 * page, std::span(pages).first(1)));
  CHECK(b.read_at(address + 3 * page) == 3);
}

// Groups of pages are large compared with the memory that a driver takes itself.
void memory_returns_when_released_and_unmapped(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  constexpr size_t kGroup = 8;
  const uint64_t group = kGroup * page;
  const uint64_t address = value_of(vmm->reserve(3 * group));
  const auto pages = value_of(vmm->create(3 * kGroup));
  const std::span all(pages);
  CHECK_OK(vmm->map_accessible(address, all));
  b.fill(address, 3 * group, 1);
  CHECK_OK(vmm->release(all.first(kGroup)));
  CHECK(holds(b, *vmm, 3 * group));
  CHECK_OK(vmm->unmap(address, 2 * group));
  CHECK(holds(b, *vmm, 2 * group));
  CHECK_CODE(vmm->release(all.first(kGroup + 1)), Code::unknown_handle);
  const Handle twice[] = {pages[kGroup], pages[kGroup]};
  CHECK_CODE(vmm->release(twice), Code::unknown_handle);
  CHECK_OK(vmm->release(all.subspan(kGroup, kGroup)));
  CHECK(holds(b, *vmm, group));
  CHECK_CODE(vmm->map(address, all.subspan(kGroup, 1)), Code::unknown_handle);
}

void guarded_holes_read_as_zeros(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(6 * page));
  const auto pages = value_of(vmm->create(4));
  const std::span all(pages);
  CHECK_OK(vmm->guard_holes());
  CHECK_OK(vmm->guard_holes());
  CHECK_OK(vmm->map_accessible(address + page, all));
  b.fill(address + page, 4 * page, 9);
  CHECK_OK(vmm->unmap(address + 2 * page, 2 * page));
  CHECK(b.read_at(address + 2 * page) == 0 && b.read_at(address + 4 * page - 1) == 0);
  CHECK(b.read_at(address + page) == 9 && b.read_at(address + 4 * page) == 9);
  CHECK(!b.is_readable(address) && !b.is_readable(address + 5 * page));
  // Guarded holes are holes for every rule.
  CHECK_CODE(vmm->unmap(address + 2 * page, page), Code::not_mapped);
  CHECK_CODE(vmm->set_access(address + 2 * page, page), Code::not_mapped);
  CHECK_OK(vmm->map_accessible(address + 3 * page, all.subspan(1, 1)));
  CHECK(b.read_at(address + 3 * page) == 9 && b.read_at(address + 2 * page) == 0);
  CHECK_CODE(vmm->map(address, all.subspan(1, 2)), Code::already_mapped);
  CHECK_OK(vmm->unmap(address + page, page));
  CHECK_OK(vmm->unmap(address + 3 * page, 2 * page));
  const Handle one[] = {pages[0], pages[2]};
  CHECK_OK(vmm->map_accessible(address, one));  // over a hole of each kind
  CHECK_OK(vmm->unmap(address, 2 * page));
  CHECK_OK(vmm->free_address(address, 6 * page));
  CHECK(b.held_bytes(*vmm) <= 5 * page + slack_bytes(b));
}

void a_covered_range_reads_as_zeros_before_its_first_page(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(4 * page));
  const auto pages = value_of(vmm->create(2));
  CHECK_OK(vmm->cover(address, 4 * page));  // nothing without a guard page
  CHECK(!b.is_readable(address));
  CHECK_OK(vmm->guard_holes());
  CHECK_OK(vmm->map_accessible(address + page, std::span(pages).first(1)));
  b.fill(address + page, page, 9);
  CHECK_OK(vmm->cover(address, 3 * page));
  CHECK_OK(vmm->cover(address, 3 * page));
  CHECK(b.read_at(address) == 0 && b.read_at(address + page) == 9);
  CHECK(b.read_at(address + 2 * page) == 0 && !b.is_readable(address + 3 * page));
  CHECK_CODE(vmm->unmap(address, page), Code::not_mapped);
  CHECK_OK(vmm->map_accessible(address + 2 * page, std::span(pages).subspan(1)));
  CHECK_OK(vmm->unmap(address + page, 2 * page));
  CHECK(b.read_at(address + 2 * page) == 0);
  CHECK_OK(vmm->free_address(address, 4 * page));
}

void scrubbed_pages_come_back_as_zeros(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(4 * page));
  const auto pages = value_of(vmm->create(2));
  vmm->scrub_pages();
  CHECK_OK(vmm->map_accessible(address, pages));
  b.fill(address, 2 * page, 7);
  CHECK_OK(vmm->unmap(address, 2 * page));
  CHECK_OK(vmm->map(address, pages));
  CHECK_OK(vmm->unmap(address, 2 * page));  // without access
  CHECK_OK(vmm->map_accessible(address + 2 * page, pages));
  CHECK(b.read_at(address + 2 * page) == 0 && b.read_at(address + 4 * page - 1) == 0);
}

void close_returns_everything(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(2 * page));
  const auto pages = value_of(vmm->create(2));
  CHECK_OK(vmm->map_accessible(address, pages));
  b.fill(address, 2 * page, 1);
  CHECK_OK(vmm->close());
  CHECK_OK(vmm->close());
  CHECK(!b.is_readable(address));
  CHECK_CODE(vmm->create(1).status(), Code::closed);
  CHECK_CODE(vmm->unmap(address, page), Code::closed);
  CHECK_OK(vmm->free_address(address, 2 * page));
}

void conforms(const Backend& b) {
  a_reservation_is_a_hole(b);
  pages_are_accessible_after_set_access_only(b);
  map_takes_unmapped_addresses_and_free_handles(b);
  unmap_takes_what_is_mapped(b);
  memory_returns_when_released_and_unmapped(b);
  guarded_holes_read_as_zeros(b);
  a_covered_range_reads_as_zeros_before_its_first_page(b);
  scrubbed_pages_come_back_as_zeros(b);
  close_returns_everything(b);
  windows_conform(b);
  blocks_conform(b);
}

}  // namespace

void test_vmm() {
  names_choose_the_backend();
  for (const Backend& backend : backends()) {
    conforms(backend);
    std::printf("%s: conforms to vmm.h\n", backend.name.c_str());
    std::fflush(stdout);  // a forked child must not print it again
  }
}

}  // namespace kvcached::testing
