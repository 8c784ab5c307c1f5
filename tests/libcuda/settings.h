// Settings of tests in environment variables, read once at cuInit and nvmlInit. Each name below
// begins with KVCACHED_TEST_CUDA_.
#pragma once

#include <cstdint>
#include <string>

namespace test_libcuda {

struct Settings {
  int devices = 2;                      // DEVICES, before CUDA_VISIBLE_DEVICES
  uint64_t device_bytes = 1ULL << 30;   // BYTES, of each
  uint64_t granularity_bytes = 4096;    // GRANULARITY; GPUs have 2 MiB
  uint64_t address_bytes = 1ULL << 41;  // ADDRESSES: virtual addresses of all devices
  bool read_only = true;                // READ_ONLY=0: read access alone is refused
  bool peers = true;                    // PEERS=0: no device reads another
  bool exports = true;                  // EXPORTS=0: no memory is shared between processes
  bool garbage = true;                  // GARBAGE=0: fresh memory is zero and costs nothing
  bool virtual_memory = true;           // VMM=0: a GPU without virtual memory management
  bool capture_maps = true;             // CAPTURE_MAPS=0: mapping is unsafe during a capture
  bool mig = false;                     // MIG=1: NVML says that MIG is on
  int init_error = 0;                   // INIT_ERROR: result of cuInit, such as 803
  int driver_version = 13000;           // VERSION, of CUDA: 10010 is older than its VMM (10.2)
  std::string driver = "580.65.06";     // DRIVER, for NVML
  std::string name = "NVIDIA H200";     // NAME
  int capability_major = 9;             // CAPABILITY, such as 9.0
  int capability_minor = 0;
  int multiprocessors = 132;   // SMS
  uint64_t context_bytes = 0;  // CONTEXT_BYTES, per process and device; GPUs: 500 MB
  uint64_t graph_bytes = 0;    // GRAPH_BYTES: of the driver's, per instantiated graph
  uint64_t table_bytes = 0;    // TABLE_BYTES: of the driver's, for each 16 MiB with a mapping
  bool progress = false;       // PROGRESS=1: work proceeds while a call waits for its end
  uint64_t teardown_ms = 0;    // TEARDOWN_MS: a dead process's memory is kept so long
  std::string book;            // BOOK: the file of all processes' memory (book.h)
};

Settings read_settings();

}  // namespace test_libcuda
