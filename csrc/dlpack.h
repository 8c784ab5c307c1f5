// Tensors for other frameworks through DLPack (https://dmlc.github.io/dlpack). The structures are
// the standard's; only what is exported here is declared.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "region.h"

namespace kvcached {

struct ElementType {
  uint8_t code;
  uint8_t bits;
};

// Code::invalid_argument for a name that is not supported, with the ones that are.
Result<ElementType> element_type(const std::string& name);

// Where elements lie: `strides` in elements, as the standard has them.
struct Extents {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

// Row-major without gaps.
Extents dense(std::vector<int64_t> shape);

// A view of part of a region. It keeps the address range reserved, not the pages: reading a hole of
// it is a fault, on the host device a SIGSEGV, on a GPU the end of the context.
struct TensorView {
  std::shared_ptr<Region> region;
  uint64_t offset_bytes;
  Extents extents;
  std::string dtype;

  // Code::invalid_argument unless every element lies in the region.
  static Result<TensorView> make(std::shared_ptr<Region> region, uint64_t offset_bytes,
                                 Extents extents, std::string dtype);
  uint64_t address() const { return region->address() + offset_bytes; }
};

// The standard's device: kDLCPU = 1 or kDLCUDA = 2, and the ordinal.
struct DlDevice {
  int32_t type;
  int32_t id;
};

DlDevice dlpack_device(const TensorView& view);

// New managed tensors, as the content of a capsule named "dltensor_versioned" or "dltensor".
void* export_versioned(const TensorView& view);
void* export_unversioned(const TensorView& view);
// Frees one that nobody consumed.
void free_versioned(void* managed);
void free_unversioned(void* managed);

}  // namespace kvcached
