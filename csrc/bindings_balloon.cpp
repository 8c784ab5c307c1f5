// Waiting for memory and asking other clients for some, for Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding_tools.h"
#include "client.h"

namespace nb = nanobind;

namespace kvcached {

namespace {

// (slot, joined, bytes)
using AskTuple = std::tuple<int, uint64_t, uint64_t>;

void bind_balloon_view(nb::module_& module) {
  nb::class_<BalloonView>(module, "BalloonView")
      .def_ro("now_ns", &BalloonView::now_ns)
      .def_ro("asks", &BalloonView::asks)
      .def_ro("free_bytes", &BalloonView::free_bytes)
      .def_ro("seen", &BalloonView::seen)
      .def_ro("slots", &BalloonView::slots)
      .def_ro("clients", &BalloonView::clients);
}

nb::object ask(Ledger& ledger, const std::vector<AskTuple>& plan, uint64_t asks, int64_t until_ns) {
  std::vector<Ask> parts;
  for (const auto& [slot, joined, bytes] : plan) parts.push_back({slot, joined, bytes});
  auto numbers = without_gil([&] { return ledger.ask(parts, asks, until_ns); });
  if (!numbers.ok() && numbers.status().code == Code::busy) return nb::none();
  return nb::cast(take(std::move(numbers)));
}

nb::object shrink_request(Client& client) {
  if (!client.has_request()) {
    check(client.check_open());
    return nb::none();
  }
  const auto request = checked([&] { return client.shrink_request(); });
  if (!request) return nb::none();
  return nb::cast(std::tuple(request->number, request->bytes));
}

}  // namespace

void bind_balloon(nb::module_& module) {
  bind_balloon_view(module);
  module.def("balloon_view", unlocked(&Ledger::balloon_view));
  module.def("sleep", unlocked(&Ledger::sleep));
  module.def("ask", ask);
  module.def("ledger_of", [](Client& client) {
    check(client.check_open());
    return client.ledger();
  });
  module.def("slot_of", &Client::slot);
  module.def("want", unlocked(&Client::want));
  module.def("end_wait", unlocked(&Client::end_wait));
  module.def("fileno", unlocked(&Client::fileno));
  module.def("shrink_request", shrink_request);
  module.def("answer", [](Client& client, uint32_t number, uint64_t bytes, uint64_t given,
                          uint64_t evicted_tokens, uint64_t evicted_bytes) {
    const ShrinkAnswer answer{given, evicted_tokens, evicted_bytes};
    checked([&] { return client.answer({number, bytes}, answer); });
  });
  module.def("publish_evictable", [](Client& client, uint64_t bytes) {
    check(client.check_open());
    client.publish_evictable(bytes);
  });
}

}  // namespace kvcached
