// The rules of vmm.h for blocks: pages that are created, mapped and released together.
#include "backends.h"
#include "check.h"

namespace kvcached::testing {

namespace {

void a_block_is_moved_whole(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(8 * page));
  CHECK_CODE(vmm->create_block(0).status(), Code::invalid_argument);
  const auto block = value_of(vmm->create_block(4));
  const std::span all(block);
  const auto single = value_of(vmm->create(1));
  CHECK_CODE(vmm->map(address, all.first(3)), Code::invalid_argument);
  CHECK_CODE(vmm->map(address, all.subspan(1)), Code::invalid_argument);
  const Handle swapped[] = {block[0], block[2], block[1], block[3]};
  CHECK_CODE(vmm->map(address, swapped), Code::invalid_argument);
  CHECK_CODE(vmm->release(all.last(1)), Code::invalid_argument);
  const Handle mixed[] = {single[0], block[0], block[1], block[2], block[3]};
  CHECK_OK(vmm->map_accessible(address, mixed));
  b.fill(address, 5 * page, 6);
  CHECK(holds(b, *vmm, 5 * page));
  CHECK_CODE(vmm->unmap(address, 2 * page), Code::invalid_argument);
  CHECK_CODE(vmm->unmap(address + 2 * page, page), Code::invalid_argument);
  CHECK_CODE(vmm->set_access(address + 2 * page, page), Code::invalid_argument);
  CHECK(b.read_at(address + 4 * page) == 6);
  // Mapped again elsewhere, it keeps its content.
  CHECK_OK(vmm->unmap(address, 5 * page));
  CHECK_OK(vmm->map_accessible(address + 4 * page, all));
  CHECK(b.read_at(address + 4 * page) == 6 && b.read_at(address + 7 * page) == 6);
  // Released while it is mapped, it is freed by its unmap.
  CHECK_OK(vmm->release(all));
  CHECK(b.read_at(address + 5 * page) == 6);
  CHECK_OK(vmm->unmap(address + 4 * page, 4 * page));
  CHECK_CODE(vmm->release(all), Code::unknown_handle);
  CHECK_OK(vmm->release(single));
  CHECK(holds(b, *vmm, 0));
}

void a_block_of_one_is_a_page(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(2 * page));
  const auto first = value_of(vmm->create_block(1));
  const auto second = value_of(vmm->create(1));
  const Handle both[] = {second[0], first[0]};
  CHECK_OK(vmm->map_accessible(address, both));
  CHECK_OK(vmm->unmap(address + page, page));
  CHECK_OK(vmm->release(both));
}

void a_range_is_filled(const Backend& b) {
  auto vmm = b.make();
  const uint64_t page = vmm->page_bytes();
  const uint64_t address = value_of(vmm->reserve(4 * page));
  CHECK_OK(vmm->map_accessible(address, value_of(vmm->create_block(3))));
  CHECK_OK(vmm->fill(address, 3 * page, 0xA5));
  CHECK_OK(vmm->fill(address + page, page, 3));
  CHECK(b.read_at(address + page - 1) == 0xA5 && b.read_at(address + page) == 3);
  CHECK(b.read_at(address + 2 * page) == 0xA5);
  CHECK_CODE(vmm->fill(address, 4 * page, 1), Code::not_mapped);
  CHECK(b.read_at(address) == 0xA5);
  const auto fresh = value_of(vmm->create(1));
  CHECK_OK(vmm->map_accessible(address + 3 * page, fresh));
  CHECK(!vmm->makes_zeros() || b.read_at(address + 3 * page) == 0);
}

}  // namespace

void blocks_conform(const Backend& b) {
  a_block_is_moved_whole(b);
  a_block_of_one_is_a_page(b);
  a_range_is_filled(b);
}

}  // namespace kvcached::testing
