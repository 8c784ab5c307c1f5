// The rules of vmm.h. Written against the interface: a new backend is one more line in test_vmm.
#include <cstring>

#include "check.h"
#include "vmm.h"
#include "vmm_host.h"

namespace kvcached::testing {

namespace {

using Make = std::shared_ptr<Vmm> (*)();

std::shared_ptr<Vmm> make_host() { return value_of(make_vmm("host:0", kPage)); }

void fill(uint64_t address, uint64_t bytes, int value) {
  std::memset(reinterpret_cast<void*>(address), value, bytes);
}

int read_at(uint64_t address) { return *reinterpret_cast<volatile unsigned char*>(address); }

void names_choose_the_backend() {
  CHECK_CODE(make_vmm("cuda:0", kPage).status(), Code::unavailable);
  for (const char* name : {"", "host", "host:", "host:x", "gpu:0", "host:12345", ":0"}) {
    CHECK_CODE(make_vmm(name, kPage).status(), Code::unknown_device);
  }
  CHECK_CODE(make_vmm("host:0", 1000).status(), Code::not_aligned);
}

void a_reservation_is_a_hole(Make make) {
  auto vmm = make();
  const uint64_t address = value_of(vmm->reserve(8 * kPage));
  CHECK(address % kPage == 0);
  CHECK(!is_readable(address));
  CHECK(resident_bytes(vmm->memory_fd()) == 0);
  CHECK_CODE(vmm->reserve(0).status(), Code::invalid_argument);
  CHECK_CODE(vmm->reserve(kPage + 1).status(), Code::not_aligned);
  CHECK_CODE(vmm->reserve(uint64_t{1} << 62).status(), Code::invalid_argument);
  CHECK_CODE(vmm->free_address(address, kPage), Code::invalid_argument);
  CHECK_CODE(vmm->free_address(address + kPage, 7 * kPage), Code::invalid_argument);
  CHECK_OK(vmm->free_address(address, 8 * kPage));
  CHECK_CODE(vmm->free_address(address, 8 * kPage), Code::invalid_argument);
}

void pages_are_accessible_after_set_access_only(Make make) {
  auto vmm = make();
  const uint64_t address = value_of(vmm->reserve(4 * kPage));
  const auto pages = value_of(vmm->create(2));
  CHECK_OK(vmm->map(address + kPage, pages));
  CHECK(!is_readable(address + kPage));
  CHECK_CODE(vmm->set_access(address, 2 * kPage), Code::not_mapped);
  CHECK_CODE(vmm->set_access(address + kPage, 100), Code::not_aligned);
  CHECK_OK(vmm->set_access(address + kPage, 2 * kPage));
  fill(address + kPage, 2 * kPage, 7);
  CHECK(!is_readable(address) && !is_readable(address + 3 * kPage));
  CHECK(resident_bytes(vmm->memory_fd()) == 2 * kPage);
}

void map_takes_unmapped_addresses_and_free_handles(Make make) {
  auto vmm = make();
  const uint64_t address = value_of(vmm->reserve(4 * kPage));
  const auto pages = value_of(vmm->create(3));
  const std::span all(pages);
  CHECK_OK(vmm->map_accessible(address + kPage, all.first(1)));
  fill(address + kPage, kPage, 5);
  CHECK_CODE(vmm->map(address, all.subspan(1)), Code::already_mapped);
  CHECK_CODE(vmm->map(address + 2 * kPage, all.first(2)), Code::already_mapped);
  const Handle twice[] = {pages[1], pages[1]};
  CHECK_CODE(vmm->map(address + 2 * kPage, twice), Code::already_mapped);
  const Handle unknown[] = {pages[1], 999};
  CHECK_CODE(vmm->map(address + 2 * kPage, unknown), Code::unknown_handle);
  CHECK_CODE(vmm->map(address + 3 * kPage, all.subspan(1)), Code::invalid_argument);
  CHECK_CODE(vmm->map(address + 1, all.subspan(1)), Code::not_aligned);
  CHECK_CODE(vmm->map(address, {}), Code::invalid_argument);
  // None of them changed anything.
  CHECK(read_at(address + kPage) == 5);
  CHECK_OK(vmm->map_accessible(address + 2 * kPage, all.subspan(1)));
}

void unmap_takes_what_is_mapped(Make make) {
  auto vmm = make();
  const uint64_t address = value_of(vmm->reserve(4 * kPage));
  const auto pages = value_of(vmm->create(2));
  CHECK_OK(vmm->map_accessible(address, pages));
  fill(address, 2 * kPage, 3);
  CHECK_CODE(vmm->unmap(address, 3 * kPage), Code::not_mapped);
  CHECK_CODE(vmm->unmap(address + 2 * kPage, kPage), Code::not_mapped);
  CHECK_CODE(vmm->unmap(address, kPage / 2), Code::not_aligned);
  CHECK_CODE(vmm->unmap(address, 0), Code::invalid_argument);
  CHECK_CODE(vmm->free_address(address, 4 * kPage), Code::already_mapped);
  CHECK(read_at(address) == 3);
  CHECK_OK(vmm->unmap(address, kPage));
  CHECK(!is_readable(address) && is_readable(address + kPage));
  // The page keeps its content and can be mapped elsewhere.
  CHECK_OK(vmm->map_accessible(address + 3 * kPage, std::span(pages).first(1)));
  CHECK(read_at(address + 3 * kPage) == 3);
}

void memory_returns_when_released_and_unmapped(Make make) {
  auto vmm = make();
  const uint64_t address = value_of(vmm->reserve(4 * kPage));
  const auto pages = value_of(vmm->create(3));
  const std::span all(pages);
  CHECK_OK(vmm->map_accessible(address, all));
  fill(address, 3 * kPage, 1);
  CHECK_OK(vmm->release(all.first(1)));
  CHECK(resident_bytes(vmm->memory_fd()) == 3 * kPage);
  CHECK_OK(vmm->unmap(address, 2 * kPage));
  CHECK(resident_bytes(vmm->memory_fd()) == 2 * kPage);
  CHECK_CODE(vmm->release(all.first(2)), Code::unknown_handle);
  const Handle twice[] = {pages[1], pages[1]};
  CHECK_CODE(vmm->release(twice), Code::unknown_handle);
  CHECK_OK(vmm->release(all.subspan(1, 1)));
  CHECK(resident_bytes(vmm->memory_fd()) == kPage);
  CHECK_CODE(vmm->map(address, all.subspan(1, 1)), Code::unknown_handle);
}

void close_returns_everything(Make make) {
  auto vmm = make();
  const uint64_t address = value_of(vmm->reserve(2 * kPage));
  const auto pages = value_of(vmm->create(2));
  CHECK_OK(vmm->map_accessible(address, pages));
  fill(address, 2 * kPage, 1);
  CHECK_OK(vmm->close());
  CHECK_OK(vmm->close());
  CHECK(!is_readable(address));
  CHECK_CODE(vmm->create(1).status(), Code::closed);
  CHECK_CODE(vmm->unmap(address, kPage), Code::closed);
  CHECK_OK(vmm->free_address(address, 2 * kPage));
}

void conforms(Make make) {
  a_reservation_is_a_hole(make);
  pages_are_accessible_after_set_access_only(make);
  map_takes_unmapped_addresses_and_free_handles(make);
  unmap_takes_what_is_mapped(make);
  memory_returns_when_released_and_unmapped(make);
  close_returns_everything(make);
}

}  // namespace

void test_vmm() {
  names_choose_the_backend();
  conforms(make_host);
}

}  // namespace kvcached::testing
