#include "dlpack.h"

#include <algorithm>
#include <optional>

namespace kvcached {

namespace {

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DlManaged {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManaged*);
};

struct DlManagedVersioned {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DlManagedVersioned*);
  uint64_t flags;
  DlTensor tensor;
};

constexpr int32_t kDlpackCpu = 1;
constexpr int32_t kDlpackCuda = 2;

// Owner of what the tensor points to.
template <class Managed>
struct Export {
  Managed managed;
  std::shared_ptr<Region> region;
  Extents extents;
};

template <class Managed>
Managed* export_view(const TensorView& view) {
  auto* made = new Export<Managed>{{}, view.region, view.extents};
  const ElementType type = element_type(view.dtype).value();
  made->managed.tensor = {reinterpret_cast<void*>(view.address()),
                          dlpack_device(view),
                          static_cast<int32_t>(view.extents.shape.size()),
                          type.code,
                          type.bits,
                          1,
                          made->extents.shape.data(),
                          made->extents.strides.data(),
                          0};
  made->managed.context = made;
  made->managed.deleter = [](Managed* self) {
    delete static_cast<Export<Managed>*>(self->context);
  };
  return &made->managed;
}

struct NamedType {
  const char* name;
  ElementType type;
};

// DLPack type codes: 0 signed, 1 unsigned, 2 float, 4 bfloat; since 1.1 10 float8_e4m3fn and
// 12 float8_e5m2.
constexpr NamedType kTypes[] = {
    {"float32", {2, 32}}, {"float16", {2, 16}},       {"bfloat16", {4, 16}},
    {"float64", {2, 64}}, {"int8", {0, 8}},           {"uint8", {1, 8}},
    {"int16", {0, 16}},   {"uint16", {1, 16}},        {"int32", {0, 32}},
    {"uint32", {1, 32}},  {"int64", {0, 64}},         {"uint64", {1, 64}},
    {"bool", {6, 8}},     {"float8_e4m3fn", {10, 8}}, {"float8_e5m2", {12, 8}},
};

// True if all extents have a stride and no two elements overlap, or the tensor is empty.
bool are_sound(const Extents& extents) {
  const auto& [shape, strides] = extents;
  const auto is_negative = [](int64_t value) { return value < 0; };
  return shape.size() == strides.size() && std::none_of(shape.begin(), shape.end(), is_negative) &&
         (std::count(shape.begin(), shape.end(), 0) > 0 ||
          std::none_of(strides.begin(), strides.end(), [](int64_t value) { return value <= 0; }));
}

// Bytes from the first element to the end of the last. Nothing if the layout is not valid.
std::optional<uint64_t> span_bytes(const Extents& extents, uint64_t element_bytes) {
  if (!are_sound(extents)) return std::nullopt;
  if (std::count(extents.shape.begin(), extents.shape.end(), 0) > 0) return uint64_t{0};
  uint64_t last = 0;
  for (size_t i = 0; i < extents.shape.size(); ++i) {
    uint64_t reach = 0;
    if (__builtin_mul_overflow(static_cast<uint64_t>(extents.shape[i] - 1),
                               static_cast<uint64_t>(extents.strides[i]), &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return std::nullopt;
    }
  }
  uint64_t bytes = 0;
  if (__builtin_add_overflow(last, uint64_t{1}, &last) ||
      __builtin_mul_overflow(last, element_bytes, &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

}  // namespace

Result<ElementType> element_type(const std::string& name) {
  std::string known;
  for (const NamedType& entry : kTypes) {
    if (name == entry.name) return entry.type;
    known += std::string(known.empty() ? "" : ", ") + entry.name;
  }
  return failure(Code::invalid_argument, "dtype '", name, "' is not supported; use ", known);
}

Extents dense(std::vector<int64_t> shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) {
    // An extent that makes this overflow does not fit either, and TensorView::make refuses it.
    if (__builtin_mul_overflow(strides[i], shape[i], &strides[i - 1])) strides[i - 1] = 0;
  }
  return {std::move(shape), std::move(strides)};
}

Result<TensorView> TensorView::make(std::shared_ptr<Region> region, uint64_t offset_bytes,
                                    Extents extents, std::string dtype) {
  KV_ASSIGN(ElementType type, element_type(dtype));
  const uint64_t element_bytes = type.bits / 8;
  const std::optional<uint64_t> bytes = span_bytes(extents, element_bytes);
  if (!bytes || offset_bytes % element_bytes != 0 || offset_bytes > region->bytes() ||
      *bytes > region->bytes() - offset_bytes) {
    return failure(
        Code::invalid_argument,
        "the view must not have negative extents, must start at a multiple of its element "
        "size and must be within the tensor of ",
        region->bytes(), " bytes");
  }
  return TensorView{std::move(region), offset_bytes, std::move(extents), std::move(dtype)};
}

DlDevice dlpack_device(const TensorView& view) {
  const Location location = view.region->vmm()->location();
  return {location.on_gpu ? kDlpackCuda : kDlpackCpu, location.ordinal};
}

void* export_versioned(const TensorView& view) {
  auto* managed = export_view<DlManagedVersioned>(view);
  managed->major = 1;
  managed->minor = 1;
  return managed;
}

void* export_unversioned(const TensorView& view) { return export_view<DlManaged>(view); }

void free_versioned(void* managed) {
  auto* tensor = static_cast<DlManagedVersioned*>(managed);
  tensor->deleter(tensor);
}

void free_unversioned(void* managed) {
  auto* tensor = static_cast<DlManaged*>(managed);
  tensor->deleter(tensor);
}

}  // namespace kvcached
