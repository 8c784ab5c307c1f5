// Streams and events, of every backend with streams that a test can control.
#include "backends.h"
#include "check.h"
#include "test_stream.h"

namespace kvcached::testing {

namespace {

struct Fixture {
  std::shared_ptr<Vmm> vmm;
  TestStream stream{vmm->location().on_gpu};
  uint64_t address = value_of(vmm->reserve(4 * kPage));

  explicit Fixture(const Backend& b) : vmm(b.make()) {
    CHECK_OK(vmm->map_accessible(address, value_of(vmm->create(4))));
  }
  void submit() { stream.submit(address, kPage); }
  std::unique_ptr<StreamEvent> record() { return value_of(vmm->record_event(stream.handle())); }
};

void an_event_passes_with_the_work_before_it(const Backend& b) {
  Fixture f(b);
  CHECK(value_of(f.record()->has_passed()));  // nothing was submitted
  f.submit();
  f.submit();
  const auto both = f.record();
  f.submit();
  const auto all = f.record();
  CHECK(!value_of(both->has_passed()));
  f.stream.complete();
  CHECK(!value_of(both->has_passed()));
  f.stream.complete();
  CHECK(value_of(both->has_passed()) && !value_of(all->has_passed()));
  f.stream.complete();
  CHECK(value_of(all->has_passed()));
}

void the_default_stream_is_always_there(const Backend& b) {
  Fixture f(b);
  CHECK(value_of(value_of(f.vmm->record_event(0))->has_passed()));
}

void streams_wait_for_themselves_alone(const Backend& b) {
  Fixture f(b);
  TestStream other(f.vmm->location().on_gpu);
  other.submit(f.address, kPage);
  f.submit();
  const auto event = f.record();
  f.stream.complete();
  CHECK(value_of(event->has_passed()));
  other.complete();
}

void an_event_outlives_its_stream(const Backend& b) {
  Fixture f(b);
  std::unique_ptr<StreamEvent> event;
  {
    const TestStream brief(f.vmm->location().on_gpu);
    event = value_of(f.vmm->record_event(brief.handle()));
  }
  CHECK(value_of(event->has_passed()));
}

void a_stream_that_is_not_there_is_refused(const Backend& b) {
  Fixture f(b);
  const bool on_gpu = f.vmm->location().on_gpu;
  const Status status = f.vmm->record_event(999'999).status();
  CHECK(status.code == (on_gpu ? Code::system_call : Code::invalid_argument));
  if (on_gpu) CHECK(status.message.find("CUDA_ERROR_INVALID_HANDLE (400)") != std::string::npos);
  CHECK_OK(f.vmm->close());
  CHECK_CODE(f.vmm->record_event(0).status(), Code::closed);
}

}  // namespace

void test_events() {
  for (const Backend& backend : backends()) {
    if (backend.on_gpu && !can_steer_cuda()) continue;
    an_event_passes_with_the_work_before_it(backend);
    the_default_stream_is_always_there(backend);
    streams_wait_for_themselves_alone(backend);
    an_event_outlives_its_stream(backend);
    a_stream_that_is_not_there_is_refused(backend);
  }
}

}  // namespace kvcached::testing
