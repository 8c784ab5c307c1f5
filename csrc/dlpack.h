// Tensors for other frameworks through DLPack (https://dmlc.github.io/dlpack). Declares the
// structures of the standard that are exported here.
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

// Code::invalid_argument for an unsupported name, with the supported ones.
Result<ElementType> element_type(const std::string& name);

// Layout of the elements. `strides` are in elements, as in the standard.
struct Extents {
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

// Row-major without gaps.
Extents dense(std::vector<int64_t> shape);

// A view of part of a region. Keeps the address range reserved, but not the pages: reading a hole
// is a SIGSEGV on a host device, and ends the context on a GPU.
struct TensorView {
  std::shared_ptr<Region> region;
  uint64_t offset_bytes;
  Extents extents;
  std::string dtype;

  // Code::invalid_argument unless every element is within the region.
  static Result<TensorView> make(std::shared_ptr<Region> region, uint64_t offset_bytes,
                                 Extents extents, std::string dtype);
  uint64_t address() const { return region->address() + offset_bytes; }
};

// Device as in the standard: kDLCPU = 1 or kDLCUDA = 2, and the ordinal.
struct DlDevice {
  int32_t type;
  int32_t id;
};

DlDevice dlpack_device(const TensorView& view);

// Return a new managed tensor, the content of a capsule named "dltensor_versioned" or "dltensor".
void* export_versioned(const TensorView& view);
void* export_unversioned(const TensorView& view);
// Frees a managed tensor that was never consumed.
void free_versioned(void* managed);
void free_unversioned(void* managed);

}  // namespace kvcached
