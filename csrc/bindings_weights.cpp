// The weight arena and its loads for Python.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "dlpack.h"
#include "weight_load.h"

namespace nb = nanobind;

namespace kvcached {

namespace {

using PieceTuple = std::tuple<std::string, uint64_t, uint64_t, uint64_t>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

std::vector<WeightPiece> to_pieces(const std::vector<PieceTuple>& tuples) {
  std::vector<WeightPiece> pieces;
  for (const auto& [path, file_offset, bytes, arena_offset] : tuples) {
    pieces.push_back({path, file_offset, bytes, arena_offset});
  }
  return pieces;
}

// (memoryview of the content, DLPack type code, bits, shape). The view lives as long as the array.
nb::object array_content(const AnyArray& array) {
  nb::list shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape.append(array.shape(i));
  char* const data = static_cast<char*>(const_cast<void*>(array.data()));
  static char nothing = 0;  // an empty array may have no address
  nb::object view = nb::steal(PyMemoryView_FromMemory(
      data != nullptr ? data : &nothing, static_cast<Py_ssize_t>(array.nbytes()), PyBUF_READ));
  const nb::dlpack::dtype type = array.dtype();
  return nb::make_tuple(view, type.code, type.bits * type.lanes, nb::tuple(shape));
}

void bind_arena(nb::module_& module) {
  nb::class_<WeightArena>(module, "WeightArena")
      .def_static("create",
                  [](std::shared_ptr<Client> client, uint64_t bytes) {
                    return take(without_gil([&] { return WeightArena::create(client, bytes); }));
                  })
      .def_prop_ro("size_bytes", &WeightArena::bytes)
      .def_prop_ro("backed_bytes", &WeightArena::backed_bytes)
      .def("back", [](WeightArena& self,
                      uint64_t bytes) { check(without_gil([&] { return self.back(bytes); })); })
      .def("view",
           [](const WeightArena& self, uint64_t offset, std::vector<int64_t> shape,
              std::string dtype) {
             return take(TensorView::make(self.region(), offset, dense(std::move(shape)),
                                          std::move(dtype)));
           })
      .def("close", [](WeightArena& self) { check(without_gil([&] { return self.close(); })); });
}

void bind_links(nb::module_& module) {
  nb::class_<WeightLinks>(module, "WeightLinks")
      .def_static("open",
                  [](std::shared_ptr<Client> target, size_t threads, uint64_t staging_bytes) {
                    const LinkOptions options{threads, staging_bytes};
                    return take(without_gil([&] { return WeightLinks::open(target, options); }));
                  })
      .def("add",
           [](WeightLinks& self, std::shared_ptr<Client> other, uint64_t share_bytes) {
             check(without_gil([&] { return self.add(other, share_bytes); }));
           })
      .def("drop",
           [](WeightLinks& self, const Client& other) {
             check(without_gil([&] { return self.drop(other); }));
           })
      .def("close", [](WeightLinks& self) { without_gil([&] { self.close(); }); });
}

void bind_load(nb::module_& module) {
  nb::class_<WeightLoad>(module, "WeightLoad")
      .def_static(
          "start",
          [](std::shared_ptr<WeightArena> arena, const std::vector<PieceTuple>& pieces,
             std::shared_ptr<WeightLinks> links, uint64_t chunk_bytes, uint64_t bytes_per_s) {
            const LoadOptions options{chunk_bytes, bytes_per_s};
            return take(without_gil(
                [&] { return WeightLoad::start(arena, to_pieces(pieces), links, options); }));
          })
      .def_prop_ro("total_bytes", &WeightLoad::total_bytes)
      .def_prop_ro("started_bytes", &WeightLoad::started_bytes)
      .def("cancel", &WeightLoad::cancel)
      .def("wait",
           [](WeightLoad& self, int64_t timeout_ms) {
             return without_gil([&] { return self.wait(std::chrono::milliseconds(timeout_ms)); });
           })
      .def("carried", &WeightLoad::carried)
      .def("lost",
           [](const WeightLoad& self) {
             std::map<std::string, std::string> reasons;
             for (const auto& [link, why] : self.lost()) reasons[link] = why.message;
             return reasons;
           })
      .def("check", [](const WeightLoad& self) { check(self.outcome()); });
}

}  // namespace

void bind_weights(nb::module_& module) {
  bind_arena(module);
  bind_links(module);
  bind_load(module);
  module.def("array_content", &array_content, nb::arg("array").noconvert());
}

}  // namespace kvcached
