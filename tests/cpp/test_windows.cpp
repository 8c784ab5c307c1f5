// Windows on pages of another Vmm, such as another process's, on every backend.
#include <array>
#include <cstring>

#include "backends.h"
#include "check.h"
#include "vmm_fault.h"

namespace kvcached::testing {

namespace {

// An owner of three pages that hold 1, 2 and 3, and another Vmm with room for as many.
struct Pair {
  explicit Pair(const Backend& b) : owner(b.make()), other(b.make()), page(owner->page_bytes()) {
    CHECK_OK(owner->map_accessible(there, pages));
    for (int i = 0; i < 3; ++i) b.fill(there + static_cast<uint64_t>(i) * page, page, i + 1);
    CHECK_OK(other->map_accessible(here, value_of(other->create(3))));
    b.fill(here, 3 * page, 9);
  }
  std::shared_ptr<Vmm> owner;
  std::shared_ptr<Vmm> other;
  uint64_t page;
  uint64_t there = value_of(owner->reserve(3 * page));
  uint64_t here = value_of(other->reserve(3 * page));
  std::vector<Handle> pages = value_of(owner->create(3));
};

void a_window_shows_pages_in_the_order_given(const Backend& b) {
  Pair p(b);
  CHECK(p.owner->can_share_with(p.other->location()));
  CHECK(!p.owner->can_share_with({.on_gpu = !b.on_gpu, .ordinal = 0}));
  const Handle wanted[] = {p.pages[2], p.pages[0], p.pages[1]};
  {
    const SharedPages shared = value_of(p.owner->export_pages(wanted));
    CHECK(shared.places.size() == 3);
    auto window = value_of(p.other->open_window(shared));
    CHECK(window->bytes() == 3 * p.page);
    CHECK(b.read_at(window->address()) == 3 && b.read_at(window->address() + p.page) == 1);
    // From within a page over a page boundary. Other bytes do not change.
    const CopyRun runs[] = {{p.page / 2, p.here, p.page}, {2 * p.page, p.here + p.page, 1}};
    CHECK_OK(window->copy(runs));
    CHECK(b.read_at(p.here) == 3 && b.read_at(p.here + p.page / 2) == 1);
    CHECK(b.read_at(p.here + p.page) == 2 && b.read_at(p.here + p.page + 1) == 9);
    const CopyRun beyond[] = {{0, p.here, 1}, {2 * p.page, p.here, p.page + 1}};
    CHECK_CODE(window->copy(beyond), Code::invalid_argument);
    CHECK(b.read_at(p.here) == 3);
  }
  // Nothing changed for the owner, which sees no mapping of the other Vmm.
  CHECK(b.read_at(p.there) == 1 && b.read_at(p.there + 2 * p.page) == 3);
  CHECK_OK(p.owner->unmap(p.there, 3 * p.page));
  CHECK_OK(p.owner->release(p.pages));
}

void only_pages_that_exist_are_shared(const Backend& b) {
  Pair p(b);
  const Handle unknown[] = {p.pages[0], 999};
  CHECK_CODE(p.owner->export_pages(unknown).status(), Code::unknown_handle);
  CHECK_OK(p.owner->release(std::span(p.pages).first(1)));
  CHECK_CODE(p.owner->export_pages(p.pages).status(), Code::unknown_handle);
  const SharedPages shared = value_of(p.owner->export_pages(std::span(p.pages).subspan(1)));
  CHECK_OK(p.owner->close());
  CHECK_CODE(p.owner->export_pages(std::span(p.pages).first(1)).status(), Code::closed);
  CHECK_CODE(p.owner->open_window(shared).status(), Code::closed);
}

void only_shared_pages_are_shown(const Backend& b) {
  Pair p(b);
  SharedPages shared = value_of(p.owner->export_pages(p.pages));
  CHECK_CODE(p.other->open_window({}).status(), Code::invalid_argument);
  const auto first = shared.places[0];
  shared.places[0].file = 99;
  CHECK_CODE(p.other->open_window(shared).status(), Code::invalid_argument);
  shared.places[0] = {first.file, first.offset + 1};
  CHECK_CODE(p.other->open_window(shared).status(), Code::invalid_argument);
  shared.places[0] = {first.file, uint64_t{1} << 62};
  CHECK_CODE(p.other->open_window(shared).status(), Code::invalid_argument);
  shared.places[0] = first;
  shared.files[first.file] = Descriptor(-1);
  CHECK_CODE(p.other->open_window(shared).status(), Code::system_call);
}

void a_failure_is_passed_on(const Backend& b) {
  Pair p(b);
  auto* const faulty = dynamic_cast<FaultVmm*>(p.owner.get());
  if (faulty == nullptr) return;
  faulty->fail_at(1, 2);
  CHECK_CODE(faulty->export_pages(p.pages).status(), Code::system_call);
  CHECK_CODE(faulty->open_window({}).status(), Code::system_call);
  CHECK(faulty->calls().back() == VmmCall::open_window);
  CHECK(value_of(p.other->open_window(value_of(faulty->export_pages(p.pages)))) != nullptr);
}

}  // namespace

void windows_conform(const Backend& backend) {
  a_window_shows_pages_in_the_order_given(backend);
  only_pages_that_exist_are_shared(backend);
  only_shared_pages_are_shown(backend);
  a_failure_is_passed_on(backend);
}

}  // namespace kvcached::testing
