// Windows on the pages of another process, for Python. The protocol is in kvcached/handover.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "binding_tools.h"
#include "kv_cache.h"

namespace nb = nanobind;

namespace kvcached {

namespace {

using Places = std::vector<std::tuple<uint64_t, uint64_t>>;

// Keeps the client alive, whose memory the window reads into.
class Window {
 public:
  Window(std::shared_ptr<Client> client, std::unique_ptr<PageWindow> pages)
      : client_(std::move(client)), pages_(std::move(pages)) {}
  PageWindow& pages() {
    if (pages_ == nullptr) check(failure(Code::closed, "the window was closed"));
    return *pages_;
  }
  void close() { pages_ = nullptr; }

 private:
  const std::shared_ptr<Client> client_;
  std::unique_ptr<PageWindow> pages_;
};

// (descriptors, which the caller closes; file and offset of each page)
std::tuple<std::vector<int>, Places> export_pages(KvCache& cache,
                                                  const std::vector<uint64_t>& pages) {
  SharedPages shared = checked([&] { return cache.export_pages(pages); });
  std::vector<int> files;
  Places places;
  for (Descriptor& file : shared.files) files.push_back(file.release());
  for (const auto& place : shared.places) places.emplace_back(place.file, place.offset);
  return {std::move(files), std::move(places)};
}

// Takes the descriptors, also if it fails.
std::unique_ptr<Window> open_window(std::shared_ptr<Client> client, const std::vector<int>& files,
                                    const Places& places) {
  SharedPages shared;
  for (const int file : files) shared.files.emplace_back(file);
  for (const auto& [file, offset] : places) shared.places.push_back({file, offset});
  auto pages = checked([&] { return client->vmm()->open_window(shared); });
  return std::make_unique<Window>(std::move(client), std::move(pages));
}

void copy_in(KvCache& cache, Window& window,
             const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& runs) {
  std::vector<CopyRun> copies;
  for (const auto& [source, target, bytes] : runs) copies.push_back({source, target, bytes});
  checked([&] { return cache.copy_in(window.pages(), copies); });
}

}  // namespace

void bind_handover(nb::module_& module) {
  nb::class_<Window>(module, "Window").def("close", unlocked(&Window::close));
  module.def("export_pages", export_pages);
  module.def("open_window", open_window);
  module.def("copy_in", copy_in);
  module.def("share_liveness", [](Client& client) {
    return checked([&] { return client.share_liveness(); }).release();
  });
  module.def("wait_for_streams",
             [](Client& client) { checked([&] { return client.streams().wait(); }); });
  // (whether on a GPU, which)
  module.def("location", [](const Client& client) {
    const Location place = client.vmm()->location();
    return std::tuple(place.on_gpu, place.ordinal);
  });
  module.def("can_share_with", [](const Client& client, bool on_gpu, int ordinal) {
    return without_gil([&] { return client.vmm()->can_share_with({on_gpu, ordinal}); });
  });
}

}  // namespace kvcached
