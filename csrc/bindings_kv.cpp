// KV caches for Python. alloc and free run once per engine step and sequence. A call that needs no
// driver keeps the GIL, because releasing it costs more than the call.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string_view>

#include "binding_tools.h"
#include "dlpack.h"
#include "kv_cache.h"
#include "non_copyable.h"

namespace nb = nanobind;

namespace kvcached {

namespace {

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::device::cpu>;

// Creates an int64 array of numpy, which the first call imports. No guard of a static is held
// meanwhile: the import releases the GIL, and another thread would wait for the guard with the GIL.
nb::object new_array(int64_t count) {
  static PyObject* empty = nullptr;
  static PyObject* dtype = nullptr;
  if (dtype == nullptr) {
    const nb::module_ numpy = nb::module_::import_("numpy");
    nb::object function = numpy.attr("empty");
    nb::object type = numpy.attr("dtype")("int64");
    if (dtype == nullptr) {
      empty = function.release().ptr();
      dtype = type.release().ptr();
    }
  }
  return nb::handle(empty)(count, nb::handle(dtype));
}

// REQUIRES: an array of new_array, which stays alive
std::span<int64_t> elements(const nb::object& array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_WRITABLE) != 0) nb::raise_python_error();
  const std::span<int64_t> found(static_cast<int64_t*>(view.buf),
                                 static_cast<size_t>(view.len) / sizeof(int64_t));
  PyBuffer_Release(&view);
  return found;
}

nb::object alloc_ids(KvCache& cache, int64_t count) {
  if (count < 0) check(failure(Code::invalid_argument, "num_blocks is negative"));
  if (count > cache.total_blocks()) return nb::none();
  nb::object array = new_array(count);
  const std::span<int64_t> ids = elements(array);
  if (cache.try_alloc(ids)) return array;
  Status status = without_gil([&] { return cache.alloc(ids); });
  if (status.code == Code::no_room) return nb::none();
  check(std::move(status));
  return array;
}

void free_dense(KvCache& cache, std::span<const int64_t> ids) {
  switch (cache.try_free(ids)) {
    case TryFree::nothing:
      return checked([&] { return cache.free(ids); });
    case TryFree::freed_with_surplus:
      return without_gil([&] { cache.settle(); });
    case TryFree::freed:
      return;
  }
}

std::vector<int64_t> dense_copy(const Ids& ids) {
  std::vector<int64_t> dense(ids.size());
  for (size_t i = 0; i < dense.size(); ++i)
    dense[i] = ids.data()[static_cast<int64_t>(i) * ids.stride(0)];
  return dense;
}

// A dense int64 array through Python's buffer protocol, at half the cost of nanobind's ndarray.
class DenseIds : private NonCopyable {
 public:
  explicit DenseIds(nb::handle array) {
    held_ = PyObject_GetBuffer(array.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) == 0;
    if (!held_) PyErr_Clear();
  }
  ~DenseIds() {
    if (held_) PyBuffer_Release(&view_);
  }

  // False for other arrays, which may still hold ids.
  bool is_one() const {
    if (!held_ || view_.ndim != 1 || view_.itemsize != sizeof(int64_t)) return false;
    const std::string_view format = view_.format;
    return format == "l" || format == "q";
  }
  std::span<const int64_t> ids() const {
    return {static_cast<const int64_t*>(view_.buf), static_cast<size_t>(view_.shape[0])};
  }

 private:
  Py_buffer view_;
  bool held_;
};

void free_ids(KvCache& cache, nb::handle array) {
  const DenseIds dense(array);
  if (dense.is_one()) return free_dense(cache, dense.ids());
  Ids ids;
  if (!nb::try_cast(array, ids, false)) throw nb::next_overload();
  free_dense(cache, dense_copy(ids));
}

// None if the virtual space is used up.
std::optional<size_t> missing_pages(const KvCache& cache, int64_t blocks) {
  if (blocks < 0) check(failure(Code::invalid_argument, "num_blocks is negative"));
  Result<size_t> pages = without_gil([&] { return cache.missing_pages(blocks); });
  if (!pages.ok() && pages.status().code == Code::no_room) return std::nullopt;
  return take(std::move(pages));
}

bool found_room(Status status) {
  if (status.code == Code::no_room) return false;
  check(std::move(status));
  return true;
}

// (ids, freed bytes)
nb::tuple choose_ids(const KvCache& cache, const Ids& ids, const Ids& last_used, uint64_t bytes) {
  const std::vector<int64_t> blocks = dense_copy(ids);
  const std::vector<int64_t> times = dense_copy(last_used);
  const Eviction chosen = checked([&] { return cache.choose_evictions(blocks, times, bytes); });
  nb::object array = new_array(static_cast<int64_t>(chosen.ids.size()));
  std::copy(chosen.ids.begin(), chosen.ids.end(), elements(array).begin());
  return nb::make_tuple(array, chosen.freed_bytes);
}

// Spare memory: its watermarks, refill and trim.
void bind_spares(nb::class_<KvCache>& cache) {
  cache.def("set_mapped_spares", unlocked(&KvCache::set_mapped_spares))
      .def("settle", unlocked(&KvCache::settle))
      .def("refill", unlocked(&KvCache::refill))
      .def("set_spare_pages", unlocked(&KvCache::set_spare_pages))
      .def("trim", unlocked(&KvCache::trim))
      .def("choose_evictions", choose_ids, nb::arg("ids").noconvert(),
           nb::arg("last_used").noconvert(), nb::arg("bytes"));
}

}  // namespace

void bind_kv(nb::module_& module) {
  nb::class_<KvCache> cache(module, "KvCache");
  bind_spares(cache);
  cache
      .def_static("create",
                  [](std::shared_ptr<Client> client, std::vector<uint64_t> slab_pages, Slab slabs,
                     uint32_t blocks_per_slab, int64_t reserved_blocks) {
                    KvGeometry geometry{std::move(slab_pages), slabs, blocks_per_slab,
                                        reserved_blocks};
                    return checked([&] { return KvCache::create(client, std::move(geometry)); });
                  })
      .def("alloc", alloc_ids)
      .def("free", free_ids, nb::arg("ids").noconvert())
      .def("missing_pages", missing_pages)
      .def(
          "check_free",
          [](KvCache& self, const Ids& ids) {
            const std::vector<int64_t> dense = dense_copy(ids);
            checked([&] { return self.check_free(dense); });
          },
          nb::arg("ids").noconvert())
      .def("find_room",
           [](KvCache& self, size_t pages) {
             return found_room(without_gil([&] { return self.find_room(pages); }));
           })
      .def("available_blocks", unlocked(&KvCache::available_blocks))
      .def("can_alloc", unlocked(&KvCache::can_alloc))
      .def_prop_ro("total_blocks", &KvCache::total_blocks)
      .def_prop_ro("live_blocks", &KvCache::live_blocks)
      .def_prop_ro("free_mapped_blocks", &KvCache::free_mapped_blocks)
      .def_prop_ro("mapped_bytes", &KvCache::mapped_bytes)
      .def_prop_ro("quarantined_bytes", &KvCache::quarantined_bytes)
      .def_prop_ro("floor_bytes", &KvCache::floor_bytes)
      .def_prop_ro("needed_bytes", &KvCache::needed_bytes)
      .def("check", unlocked(&KvCache::check))
      .def("counters",
           [](KvCache& self) {
             const MapCounters counters = without_gil([&] { return self.counters(); });
             return std::tuple(counters.maps, counters.unmaps, counters.pages_mapped,
                               counters.pages_unmapped, self.failed_looks());
           })
      .def(
          "buffer_view",
          [](const KvCache& self, size_t buffer, uint64_t offset, std::vector<int64_t> shape,
             std::vector<int64_t> strides, std::string dtype) {
            check(self.check_viewable());
            return take(TensorView::make(self.region(), self.buffer_offset(buffer) + offset,
                                         {std::move(shape), std::move(strides)}, std::move(dtype)));
          })
      .def("close", unlocked(&KvCache::close));
}

}  // namespace kvcached
