// vmm_cuda on a failing driver: a call that fails changes nothing and loses nothing. Runs on the
// test libcuda and checks its used bytes and leaks.
#include "backends.h"
#include "check.h"
#include "control.h"
#include "vmm_cuda.h"

namespace kvcached::testing {

namespace {

constexpr int kInvalidValue = 1;

struct Driver {
  decltype(&test_cuda_calls) calls = cuda_function<decltype(test_cuda_calls)>("test_cuda_calls");
  decltype(&test_cuda_reset_calls) reset =
      cuda_function<decltype(test_cuda_reset_calls)>("test_cuda_reset_calls");
  decltype(&test_cuda_fail_at) fail_at =
      cuda_function<decltype(test_cuda_fail_at)>("test_cuda_fail_at");
  decltype(&test_cuda_used_bytes) used_bytes =
      cuda_function<decltype(test_cuda_used_bytes)>("test_cuda_used_bytes");
};

struct Fixture {
  Driver driver;
  std::shared_ptr<Vmm> vmm = value_of(make_vmm("cuda:1", kPage));
  uint64_t address = value_of(vmm->reserve(8 * kPage));

  ~Fixture() {
    driver.fail_at(0, 0, 0);
    CHECK_OK(vmm->close());
    CHECK(driver.used_bytes(1) == 0);
  }
  uint64_t used_pages() const { return driver.used_bytes(1) / kPage; }
  // Runs `call` with its driver calls failing one after another, `times` in a row, until it
  // passes. Checks `unchanged` after each failure. Returns the number of failures.
  template <class Call, class Check>
  uint64_t fail_everywhere(uint64_t times, Call call, Check unchanged) {
    for (uint64_t nth = 1;; ++nth) {
      driver.fail_at(nth, times, kInvalidValue);
      const Status status = call();
      driver.fail_at(0, 0, 0);
      if (status.ok()) return nth - 1;
      CHECK(status.message.find("CUDA_ERROR_INVALID_VALUE (1): invalid argument") !=
            std::string::npos);
      unchanged(status);
    }
  }
};

void a_failed_create_gives_all_back() {
  Fixture f;
  std::vector<Handle> pages;
  const uint64_t calls = f.fail_everywhere(
      1,
      [&] {
        auto made = f.vmm->create(3);
        if (!made.ok()) return made.status();
        pages = made.value();
        return Status{};
      },
      [&](const Status& status) {
        CHECK(status.code == Code::system_call);
        CHECK(f.used_pages() == 0);
      });
  CHECK(calls == 3 && f.used_pages() == 3);
}

void a_failed_map_leaves_the_range_unmapped() {
  Fixture f;
  const auto pages = value_of(f.vmm->create(3));
  const uint64_t calls = f.fail_everywhere(
      1, [&] { return f.vmm->map_accessible(f.address, pages); },
      [&](const Status& status) {
        CHECK(status.code == Code::system_call);
        CHECK_CODE(f.vmm->unmap(f.address, kPage), Code::not_mapped);
      });
  CHECK(calls == 4);  // a map for each page, one set_access
  CHECK(is_accessible(f.address + 2 * kPage));
}

// Also keeps handles of which the driver freed the memory before it failed.
void a_failed_release_keeps_every_handle() {
  for (const uint64_t times : {1, 5}) {
    Fixture f;
    const auto pages = value_of(f.vmm->create(3));
    const uint64_t calls = f.fail_everywhere(
        times, [&] { return f.vmm->release(pages); },
        [&](const Status& status) {
          CHECK(status.code == Code::system_call);
          CHECK_OK(f.vmm->map_accessible(f.address, pages));
          CHECK(f.used_pages() == 3 && is_accessible(f.address + 2 * kPage));
          CHECK_OK(f.vmm->unmap(f.address, 3 * kPage));
        });
    CHECK(calls == 3 && f.used_pages() == 0);
  }
}

void memory_that_cannot_be_made_again_is_a_failed_map() {
  Fixture f;
  const auto pages = value_of(f.vmm->create(3));
  f.driver.fail_at(3, 1, kInvalidValue);
  CHECK_CODE(f.vmm->release(pages), Code::system_call);
  CHECK(f.used_pages() == 1);
  (void)f.fail_everywhere(
      1, [&] { return f.vmm->map_accessible(f.address, pages); },
      [&](const Status&) { CHECK_CODE(f.vmm->unmap(f.address, kPage), Code::not_mapped); });
  CHECK(f.used_pages() == 3 && is_accessible(f.address + 2 * kPage));
}

void a_failed_unmap_leaves_the_range_mapped() {
  Fixture f;
  const auto pages = value_of(f.vmm->create(3));
  CHECK_OK(f.vmm->map_accessible(f.address, pages));
  const uint64_t calls = f.fail_everywhere(
      1, [&] { return f.vmm->unmap(f.address, 3 * kPage); },
      [&](const Status&) { CHECK(is_accessible(f.address)); });
  CHECK(calls == 1);  // whatever the number of pages
}

// The rollback fails as well: the rest is owed, and close() releases it.
void a_failed_rollback_is_paid_at_close() {
  for (uint64_t nth = 1; nth <= 4; ++nth) {
    Fixture f;
    f.driver.fail_at(nth, 2, kInvalidValue);
    (void)f.vmm->create(3);
    f.driver.fail_at(0, 0, 0);
    const auto pages = value_of(f.vmm->create(3));
    f.driver.fail_at(nth, 2, kInvalidValue);
    (void)f.vmm->map_accessible(f.address, pages);
    f.driver.fail_at(nth, 2, kInvalidValue);
    (void)f.vmm->release(pages);
  }
}

void released_while_mapped_goes_with_the_mapping() {
  Fixture f;
  const auto pages = value_of(f.vmm->create(2));
  CHECK_OK(f.vmm->map_accessible(f.address, pages));
  CHECK_OK(f.vmm->release(pages));
  CHECK(f.used_pages() == 2);
  f.driver.fail_at(2, 1, kInvalidValue);  // the first release of the unmap: owed
  CHECK_OK(f.vmm->unmap(f.address, 2 * kPage));
  CHECK(f.used_pages() == 1);
}

void close_can_be_tried_again() {
  for (uint64_t nth = 1; nth <= 3; ++nth) {
    Fixture f;
    const auto pages = value_of(f.vmm->create(2));
    CHECK_OK(f.vmm->map_accessible(f.address, pages));
    f.driver.fail_at(nth, 1, kInvalidValue);
    CHECK_CODE(f.vmm->close(), Code::system_call);
    CHECK(f.used_pages() > 0);
  }
}

void a_full_gpu_is_no_room() {
  Fixture f;
  f.driver.fail_at(3, 1, kCuOutOfMemory);
  const Status status = f.vmm->create(5).status();
  CHECK(status.code == Code::no_room && status.need_bytes == kPage);
  CHECK(status.message.find("CUDA_ERROR_OUT_OF_MEMORY") != std::string::npos);
  CHECK(f.used_pages() == 0);
}

void a_failed_guard_gives_all_back() {
  for (uint64_t nth = 1; nth <= 10; ++nth) {
    Fixture f;
    f.driver.fail_at(nth, 1, kInvalidValue);
    const Status status = f.vmm->guard_holes();
    f.driver.fail_at(0, 0, 0);
    // create, reserve, map, set_access, memset, wait; without read-only access, and without the
    // unmap and the free of where it was filled, it works as well.
    CHECK(status.ok() == (nth > 6) && f.used_pages() == (nth > 6 ? 1 : 0));
    CHECK_OK(f.vmm->guard_holes());
    CHECK(f.used_pages() == 1);
  }
}

// An unmap succeeds even if covering its holes fails. The next one covers those holes.
void holes_that_are_not_covered_are_tried_again() {
  Fixture f;
  CHECK_OK(f.vmm->guard_holes());
  const auto pages = value_of(f.vmm->create(4));
  const std::span all(pages);
  CHECK_OK(f.vmm->map_accessible(f.address + 4 * kPage, all.subspan(3)));
  for (uint64_t nth = 2; nth <= 5; ++nth) {  // after the unmap: 3 maps and a set_access
    CHECK_OK(f.vmm->map_accessible(f.address, all.first(3)));
    f.driver.fail_at(nth, 1, kInvalidValue);
    CHECK_OK(f.vmm->unmap(f.address, 3 * kPage));
    f.driver.fail_at(0, 0, 0);
    CHECK(is_accessible(f.address + 2 * kPage) == false);
    CHECK_OK(f.vmm->unmap(f.address + 4 * kPage, kPage));
    for (const uint64_t i : {0, 1, 2, 4}) CHECK(is_accessible(f.address + i * kPage));
    CHECK_OK(f.vmm->map_accessible(f.address + 4 * kPage, all.subspan(3)));
  }
  f.driver.fail_at(2, 1, kInvalidValue);
  CHECK_OK(f.vmm->cover(f.address + 5 * kPage, 3 * kPage));  // it does not block any tensor
  f.driver.fail_at(0, 0, 0);
  CHECK(!is_accessible(f.address + 7 * kPage));
  CHECK_OK(f.vmm->unmap(f.address + 4 * kPage, kPage));
  for (const uint64_t i : {5, 6, 7}) CHECK(is_accessible(f.address + i * kPage));
  f.driver.fail_at(1, 1, kInvalidValue);
  CHECK_CODE(f.vmm->free_address(f.address, 8 * kPage), Code::system_call);
  CHECK_OK(f.vmm->free_address(f.address, 8 * kPage));
}

void a_failed_map_shows_the_guard_again() {
  Fixture f;
  CHECK_OK(f.vmm->guard_holes());
  const auto pages = value_of(f.vmm->create(3));
  CHECK_OK(f.vmm->map_accessible(f.address, pages));
  CHECK_OK(f.vmm->unmap(f.address, 3 * kPage));
  const uint64_t calls = f.fail_everywhere(
      1, [&] { return f.vmm->map_accessible(f.address, pages); },
      [&](const Status& status) {
        CHECK(status.code == Code::system_call);
        for (uint64_t i = 0; i < 3; ++i) CHECK(is_accessible(f.address + i * kPage));
        CHECK_CODE(f.vmm->unmap(f.address, kPage), Code::not_mapped);
      });
  CHECK(calls == 5);  // the guard's unmap, 3 maps, set_access
}

void a_failed_scrub_keeps_the_pages() {
  Fixture f;
  f.vmm->scrub_pages();
  const auto pages = value_of(f.vmm->create(2));
  CHECK_OK(f.vmm->map_accessible(f.address, pages));
  const uint64_t calls = f.fail_everywhere(
      3, [&] { return f.vmm->unmap(f.address, 2 * kPage); },
      [&](const Status&) { CHECK(is_accessible(f.address)); });
  CHECK(calls > 0);
}

// Neither descriptors nor handles are left, which test_cuda_leaks() checks at the end.
void a_failed_export_or_window_leaves_nothing() {
  Fixture f;
  const auto pages = value_of(f.vmm->create(3));
  CHECK_OK(f.vmm->map_accessible(f.address, pages));
  SharedPages shared;
  const uint64_t exports = f.fail_everywhere(
      1,
      [&] {
        auto made = f.vmm->export_pages(pages);
        if (!made.ok()) return made.status();
        shared = std::move(made.value());
        return Status{};
      },
      [](const Status& status) { CHECK(status.code == Code::system_call); });
  CHECK(exports == 3 && f.used_pages() == 3);
  auto other = value_of(make_vmm("cuda:0", kPage));  // over the link between the two
  std::unique_ptr<PageWindow> window;
  for (const uint64_t times : {1, 2}) {
    window = nullptr;
    (void)f.fail_everywhere(
        times,
        [&] {
          auto opened = other->open_window(shared);
          if (!opened.ok()) return opened.status();
          window = std::move(opened.value());
          return Status{};
        },
        [](const Status&) {});
  }
  const uint64_t here = value_of(other->reserve(kPage));
  CHECK_OK(other->map_accessible(here, value_of(other->create(1))));
  const CopyRun runs[] = {{kPage, here, 8}, {0, here + 8, 8}};
  CHECK(f.fail_everywhere(1, [&] { return window->copy(runs); }, [](const Status&) {}) == 3);
  window = nullptr;
  CHECK(f.driver.used_bytes(0) == kPage);
}

void names_and_page_sizes_are_checked() {
  CHECK_CODE(make_vmm("cuda:2", kPage).status(), Code::unknown_device);
  CHECK_CODE(make_vmm("cuda:9999", kPage).status(), Code::unknown_device);
  for (const uint64_t bytes : {uint64_t{2048}, kPage + 4096, 3 * kPage}) {
    CHECK_CODE(make_vmm("cuda:0", bytes).status(), Code::not_aligned);
  }
  auto large = value_of(make_vmm("cuda:1", 4 * kPage));
  const uint64_t address = value_of(large->reserve(8 * kPage));
  CHECK(address % (4 * kPage) == 0);
  CHECK_OK(large->map_accessible(address, value_of(large->create(2))));
  CHECK(is_accessible(address + 8 * kPage - 1));
  CHECK(large->location().on_gpu && large->location().ordinal == 1);
}

}  // namespace

void test_cuda_faults() {
  a_failed_create_gives_all_back();
  a_failed_map_leaves_the_range_unmapped();
  a_failed_release_keeps_every_handle();
  memory_that_cannot_be_made_again_is_a_failed_map();
  a_failed_unmap_leaves_the_range_mapped();
  a_failed_rollback_is_paid_at_close();
  released_while_mapped_goes_with_the_mapping();
  close_can_be_tried_again();
  a_full_gpu_is_no_room();
  a_failed_guard_gives_all_back();
  holes_that_are_not_covered_are_tried_again();
  a_failed_map_shows_the_guard_again();
  a_failed_scrub_keeps_the_pages();
  a_failed_export_or_window_leaves_nothing();
  names_and_page_sizes_are_checked();
}

}  // namespace kvcached::testing
