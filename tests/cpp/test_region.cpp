#include "backends.h"
#include "check.h"
#include "region.h"
#include "vmm_fault.h"

namespace kvcached::testing {

namespace {

std::string device_under_test;

constexpr PageRun kRuns[] = {{0, 2}, {4, 2}, {8, 2}};
constexpr uint64_t kRunPages = 6;

struct Fixture {
  std::shared_ptr<FaultVmm> vmm =
      std::make_shared<FaultVmm>(value_of(make_vmm(device_under_test, kPage)));
  std::shared_ptr<Region> region = value_of(Region::reserve(vmm, 10 * kPage));
  std::vector<Handle> pages = value_of(vmm->create(kRunPages));

  ~Fixture() { CHECK_OK(vmm->close()); }
};

void a_batch_maps_and_unmaps_every_run() {
  Fixture f;
  CHECK_OK(f.region->map(kRuns, f.pages));
  CHECK(f.region->mapped_pages() == kRunPages);
  CHECK(f.region->counters().maps == 3 && f.region->counters().pages_mapped == kRunPages);
  CHECK(is_accessible(f.region->address() + 9 * kPage));
  CHECK(!is_accessible(f.region->address() + 2 * kPage));
  CHECK(value_of(f.region->unmap(kRuns)) == f.pages);
  CHECK(f.region->mapped_pages() == 0);
}

// The host backend maps and sets access in two calls here, so a batch of 3 runs makes 6.
void a_failed_map_is_rolled_back_at_any_point() {
  for (int call = 1; call <= 6; ++call) {
    Fixture f;
    f.vmm->fail_at(call);
    CHECK_CODE(f.region->map(kRuns, f.pages), Code::system_call);
    CHECK(f.region->mapped_pages() == 0);
    for (uint64_t page = 0; page < 10; ++page) {
      CHECK(!is_accessible(f.region->address() + page * kPage));
    }
    CHECK_OK(f.region->map(kRuns, f.pages));
  }
}

void a_failed_unmap_is_rolled_back_at_any_point() {
  for (int call = 1; call <= 3; ++call) {
    Fixture f;
    CHECK_OK(f.region->map(kRuns, f.pages));
    f.vmm->fail_at(call);
    CHECK_CODE(f.region->unmap(kRuns).status(), Code::system_call);
    CHECK(f.region->mapped_pages() == kRunPages);
    CHECK(is_accessible(f.region->address()));
    CHECK(value_of(f.region->unmap(kRuns)) == f.pages);
  }
}

void stranded_pages_are_kept_until_unmap_all() {
  for (const bool while_mapping : {true, false}) {
    Fixture f;
    if (!while_mapping) CHECK_OK(f.region->map(kRuns, f.pages));
    f.vmm->fail_at(3, 2);  // the second run of map, or the third of unmap; then the rollback
    const Status status =
        while_mapping ? f.region->map(kRuns, f.pages) : f.region->unmap(kRuns).status();
    CHECK(status.code == Code::stranded);
    CHECK(value_of(f.region->unmap_all()).size() == kRunPages);
    CHECK(f.region->mapped_pages() == 0);
  }
}

void runs_outside_or_in_the_wrong_state_change_nothing() {
  Fixture f;
  const std::span pages(f.pages);
  const PageRun outside[] = {{0, 2}, {9, 2}};
  CHECK_CODE(f.region->map(outside, pages.first(4)), Code::invalid_argument);
  const PageRun empty[] = {{0, 0}};
  CHECK_CODE(f.region->map(empty, {}), Code::invalid_argument);
  CHECK_CODE(f.region->unmap(kRuns).status(), Code::not_mapped);
  CHECK_OK(f.region->map(std::span(kRuns).first(1), pages.first(2)));
  CHECK_CODE(f.region->map(kRuns, pages), Code::already_mapped);
  CHECK_CODE(f.region->unmap(kRuns).status(), Code::not_mapped);
  CHECK(f.region->mapped_pages() == 2);
}

}  // namespace

void test_region(const std::string& device) {
  device_under_test = device;
  a_batch_maps_and_unmaps_every_run();
  a_failed_map_is_rolled_back_at_any_point();
  a_failed_unmap_is_rolled_back_at_any_point();
  stranded_pages_are_kept_until_unmap_all();
  runs_outside_or_in_the_wrong_state_change_nothing();
}

}  // namespace kvcached::testing
