// The weight arena and its loads for Python.
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding_tools.h"
#include "cuda_reader.h"
#include "dlpack.h"
#include "weight_load.h"

namespace nb = nanobind;

namespace kvcached {

namespace {

using PieceTuple = std::tuple<std::string, uint64_t, uint64_t, uint64_t>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig>;

std::vector<WeightPiece> to_pieces(const std::vector<PieceTuple>& tuples) {
  std::vector<WeightPiece> pieces;
  for (const auto& [path, file_offset, bytes, arena_offset] : tuples) {
    pieces.push_back({path, file_offset, bytes, arena_offset});
  }
  return pieces;
}

nb::object view_of(const void* data, size_t bytes) {
  static char nothing = 0;  // address for an empty array
  auto* const first = static_cast<char*>(const_cast<void*>(data));
  return nb::steal(PyMemoryView_FromMemory(first != nullptr ? first : &nothing,
                                           static_cast<Py_ssize_t>(bytes), PyBUF_READ));
}

bool is_of_cpu(const AnyArray& array) {
  constexpr int kCudaHost = 3,
                kCudaManaged = 13;  // DLPack device types of CUDA memory that the CPU can read
  const int type = array.device_type();
  return type == nb::device::cpu::value || type == kCudaHost || type == kCudaManaged;
}

// (content, DLPack type code, bits, shape). The content is a memoryview of CPU memory, or the
// address of other memory. Valid as long as the array.
nb::object array_content(const AnyArray& array) {
  nb::list shape;
  for (size_t i = 0; i < array.ndim(); ++i) shape.append(array.shape(i));
  const nb::object content = is_of_cpu(array) ? view_of(array.data(), array.nbytes())
                                              : nb::cast(reinterpret_cast<uint64_t>(array.data()));
  const nb::dlpack::dtype type = array.dtype();
  return nb::make_tuple(content, type.code, type.bits * type.lanes, nb::tuple(shape));
}

void bind_reader(nb::module_& module) {
  nb::class_<CudaReader>(module, "CudaReader")
      .def_static("open", unlocked(&CudaReader::open))
      .def_prop_ro("stream", &CudaReader::stream)
      .def_prop_ro("buffer_bytes", &CudaReader::buffer_bytes)
      .def_prop_ro("is_pinned", &CudaReader::is_pinned)
      .def("read", [](CudaReader& self, uint64_t address, uint64_t bytes) {
        const std::span<const char> read = checked([&] { return self.read(address, bytes); });
        return view_of(read.data(), read.size());
      });
}

void bind_arena(nb::module_& module) {
  nb::class_<WeightArena>(module, "WeightArena")
      .def_static("create", unlocked(&WeightArena::create))
      .def_prop_ro("size_bytes", &WeightArena::bytes)
      .def_prop_ro("backed_bytes", &WeightArena::backed_bytes)
      .def("back",
           [](WeightArena& self, uint64_t bytes) { checked([&] { return self.back(bytes); }); })
      .def("fill", unlocked(&WeightArena::fill))
      .def_prop_ro("address", [](const WeightArena& self) { return self.region()->address(); })
      .def("view",
           [](const WeightArena& self, uint64_t offset, std::vector<int64_t> shape,
              std::string dtype) {
             return take(TensorView::make(self.region(), offset, dense(std::move(shape)),
                                          std::move(dtype)));
           })
      .def("close", unlocked(&WeightArena::close));
}

void bind_links(nb::module_& module) {
  nb::class_<WeightLinks>(module, "WeightLinks")
      .def_static("open",
                  [](std::shared_ptr<Client> target, size_t threads, uint64_t staging_bytes) {
                    const LinkOptions options{threads, staging_bytes};
                    return checked([&] { return WeightLinks::open(target, options); });
                  })
      .def("add", unlocked(&WeightLinks::add))
      .def("drop", unlocked(&WeightLinks::drop))
      .def("close", unlocked(&WeightLinks::close));
}

void bind_load(nb::module_& module) {
  nb::class_<WeightLoad>(module, "WeightLoad")
      .def_static(
          "start",
          [](std::shared_ptr<WeightArena> arena, const std::vector<PieceTuple>& pieces,
             std::shared_ptr<WeightLinks> links, uint64_t chunk_bytes, uint64_t bytes_per_s) {
            const LoadOptions options{chunk_bytes, bytes_per_s};
            return checked(
                [&] { return WeightLoad::start(arena, to_pieces(pieces), links, options); });
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
  bind_reader(module);
  module.def("array_content", &array_content, nb::arg("array").noconvert());
}

}  // namespace kvcached
