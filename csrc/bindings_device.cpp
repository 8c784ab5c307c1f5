// Ledger and Client for Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding_tools.h"
#include "client.h"
#include "host_stream.h"
#include "ledger_lock.h"
#include "segments.h"

namespace nb = nanobind;

namespace kvcached {

namespace {

Streams::Clock::duration duration_of(double seconds) {
  return std::chrono::duration_cast<Streams::Clock::duration>(
      std::chrono::duration<double>(seconds));
}

void bind_record(nb::module_& module) {
  nb::class_<ClientRecord>(module, "ClientRecord")
      .def_ro("pid", &ClientRecord::pid)
      .def_prop_ro("reserved_bytes", &ClientRecord::elastic_bytes)
      .def_ro("committed_bytes", &ClientRecord::committed_bytes)
      .def_ro("static_bytes", &ClientRecord::static_bytes)
      .def_ro("min_bytes", &ClientRecord::min_bytes)
      .def_prop_ro("limit_bytes",
                   [](const ClientRecord& self) -> std::optional<uint64_t> {
                     if (self.limit_bytes == kNoLimit) return std::nullopt;
                     return self.limit_bytes;
                   })
      .def_ro("maps", &ClientRecord::maps)
      .def_ro("unmaps", &ClientRecord::unmaps)
      .def_prop_ro("name", [](const ClientRecord& self) { return text(name_of(self)); })
      .def_ro("joined", &ClientRecord::joined)
      .def_ro("spare_bytes", &ClientRecord::spare_bytes)
      .def_ro("evictable_bytes", &ClientRecord::evictable_bytes)
      .def_ro("active_ns", &ClientRecord::active_ns)
      .def_ro("evicted_tokens", &ClientRecord::evicted_tokens)
      .def_ro("evicted_bytes", &ClientRecord::evicted_bytes)
      .def_ro("asked", &ClientRecord::asked)
      .def_ro("answered", &ClientRecord::answered)
      .def_prop_ro("asked_bytes",  // 0 once the request was answered
                   [](const ClientRecord& self) -> uint64_t {
                     return self.asked == self.answered ? 0 : self.asked_bytes;
                   })
      .def_ro("asked_until_ns", &ClientRecord::asked_until_ns)
      .def_ro("ask_not_before_ns", &ClientRecord::ask_not_before_ns)
      .def_ro("given_bytes", &ClientRecord::given_bytes)
      .def_ro("wanted_bytes", &ClientRecord::wanted_bytes)
      .def_ro("wanted_until_ns", &ClientRecord::wanted_until_ns)
      .def_ro("wanted_since", &ClientRecord::wanted_since)
      .def("resident_bytes",
           [](const ClientRecord& self) { return checked([&] { return resident_bytes(self); }); });
}

void bind_ledger(nb::module_& module) {
  nb::class_<Ledger>(module, "Ledger")
      .def_static(
          "open",
          [](std::string path, std::optional<uint64_t> capacity, std::optional<uint64_t> page) {
            return take(
                without_gil([&] { return Ledger::open({std::move(path), capacity, page}); }));
          },
          nb::arg("path"), nb::arg("capacity_bytes").none(), nb::arg("page_bytes").none())
      .def_prop_ro("capacity_bytes", &Ledger::capacity_bytes)
      .def_prop_ro("page_bytes", &Ledger::page_bytes)
      .def("usage",
           [](Ledger& self) {
             LedgerUsage usage = checked([&] { return self.usage(); });
             return std::tuple(usage.charged_bytes, std::move(usage.clients));
           })
      .def(
          "set_limit",
          [](Ledger& self, std::optional<std::string> name, std::optional<int32_t> pid,
             std::optional<uint64_t> joined, std::optional<uint64_t> bytes) {
            const ClientQuery query{std::move(name), pid, joined};
            checked([&] { return self.set_limit(query, bytes.value_or(kNoLimit)); });
          },
          nb::arg("name").none(), nb::arg("pid").none(), nb::arg("joined").none(),
          nb::arg("bytes").none())
      .def(
          "set_min",
          [](Ledger& self, std::optional<std::string> name, std::optional<int32_t> pid,
             std::optional<uint64_t> joined, uint64_t bytes) {
            const ClientQuery query{std::move(name), pid, joined};
            checked([&] { return self.set_min(query, bytes); });
          },
          nb::arg("name").none(), nb::arg("pid").none(), nb::arg("joined").none(), nb::arg("bytes"))
      .def("resident_bytes", unlocked(&Ledger::resident_bytes))
      .def("reap", unlocked(&Ledger::reap))
      .def("destroy", unlocked(&Ledger::destroy), nb::arg("force"));
}

void bind_client_record(nb::class_<Client>& client) {
  client
      .def_static(
          "open",
          [](std::shared_ptr<Ledger> ledger, const std::string& device, std::string name,
             uint64_t min_bytes, std::optional<uint64_t> limit_bytes, bool background) {
            const ClientOptions options{std::move(name), min_bytes, limit_bytes.value_or(kNoLimit)};
            auto client = checked([&] { return Client::open(ledger, device, options); });
            if (background) client->spares().allow();
            return client;
          },
          nb::arg("ledger"), nb::arg("device"), nb::arg("name"), nb::arg("min_bytes"),
          nb::arg("limit_bytes").none(), nb::arg("background"))
      // Ordinal of the GPU, or -1 on a host device.
      .def_prop_ro("gpu",
                   [](const Client& self) {
                     const Location location = self.vmm()->location();
                     return location.on_gpu ? location.ordinal : -1;
                   })
      .def("available_bytes",
           [](Client& self) { return checked([&] { return self.available(); }); })
      .def("record", unlocked(&Client::record))
      .def(
          "set_limit",
          [](Client& self, std::optional<uint64_t> bytes) {
            checked([&] { return self.set_limit(bytes.value_or(kNoLimit)); });
          },
          nb::arg("bytes").none())
      .def("set_min", unlocked(&Client::set_min))
      .def("close", unlocked(&Client::close));
}

void bind_client_memory(nb::class_<Client>& client) {
  client
      .def("set_create_wait",
           [](Client& self, double wait_s) { self.set_create_wait(duration_of(wait_s)); })
      .def("guard_holes", unlocked(&Client::guard_holes))
      .def("scrub_pages", unlocked(&Client::scrub_pages))
      .def(
          "set_streams",
          [](Client& self, std::vector<Stream> handles, double max_wait_s) {
            checked(
                [&] { return self.streams().set(std::move(handles), duration_of(max_wait_s)); });
          },
          nb::arg("handles"), nb::arg("max_wait_s"))
      .def("reserve_static", unlocked(&Client::reserve_static))
      .def("release_static", unlocked(&Client::release_static))
      .def("reserve_addresses", unlocked(&Client::reserve_addresses))
      .def("addresses",
           [](Client& self) -> std::optional<std::tuple<uint64_t, uint64_t, uint64_t>> {
             const std::shared_ptr<AddressSpace> space = self.addresses();
             if (space == nullptr) return std::nullopt;
             return std::tuple(space->bytes(), space->free_bytes(), space->largest_free_bytes());
           });
}

void bind_host_stream(nb::module_& module) {
  nb::class_<HostStream>(module, "HostStream")
      .def(nb::init<>())
      .def_prop_ro("handle", &HostStream::handle)
      .def_prop_ro("pending", &HostStream::pending)
      .def("submit", &HostStream::submit)
      .def("complete", &HostStream::complete)
      .def("complete_all", &HostStream::complete_all);
}

void bind_segments(nb::module_& module) {
  nb::class_<SegmentClient>(module, "SegmentClient")
      .def_prop_ro("name", [](const SegmentClient& self) { return text(self.name); })
      .def_ro("pid", &SegmentClient::pid)
      .def_ro("alive", &SegmentClient::alive);
  nb::class_<SegmentReport>(module, "SegmentReport")
      .def_ro("version", &SegmentReport::version)
      .def_ro("capacity_bytes", &SegmentReport::capacity_bytes)
      .def_ro("page_bytes", &SegmentReport::page_bytes)
      .def_ro("clients", &SegmentReport::clients)
      .def_ro("stale_reason", &SegmentReport::stale_reason);
  module.def("inspect_segment", unlocked(&inspect_segment));
  module.def("remove_if_stale", unlocked(&remove_if_stale));
}

}  // namespace

void bind_device(nb::module_& module) {
  // Time that a call of this process waits for a ledger that another process keeps locked.
  module.def("set_lock_timeout",
             [](double wait_s) { lock_timeout_ns = static_cast<int64_t>(wait_s * 1e9); });
  module.def("check_device_name", [](const std::string& name) { check(check_device_name(name)); });
  bind_record(module);
  bind_ledger(module);
  nb::class_<Client> client(module, "Client");
  bind_client_record(client);
  bind_client_memory(client);
  bind_host_stream(module);
  bind_segments(module);
}

}  // namespace kvcached
