#include "settings.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace test_libcuda {

namespace {

const char* text_of(const char* name) {
  const char* text = std::getenv((std::string("KVCACHED_TEST_CUDA_") + name).c_str());
  return text == nullptr || *text == '\0' ? nullptr : text;
}

template <class Number>
void read(const char* name, Number& value) {
  if (const char* text = text_of(name))
    value = static_cast<Number>(std::strtoull(text, nullptr, 0));
}

void read(const char* name, bool& value) {
  if (const char* text = text_of(name)) value = std::strtoull(text, nullptr, 0) != 0;
}

void read(const char* name, std::string& value) {
  if (const char* text = text_of(name)) value = text;
}

}  // namespace

Settings read_settings() {
  Settings settings;
  read("DEVICES", settings.devices);
  read("BYTES", settings.device_bytes);
  read("GRANULARITY", settings.granularity_bytes);
  read("ADDRESSES", settings.address_bytes);
  read("READ_ONLY", settings.read_only);
  read("PEERS", settings.peers);
  read("EXPORTS", settings.exports);
  read("GARBAGE", settings.garbage);
  read("VMM", settings.virtual_memory);
  read("CAPTURE_MAPS", settings.capture_maps);
  read("MIG", settings.mig);
  read("INIT_ERROR", settings.init_error);
  read("VERSION", settings.driver_version);
  read("DRIVER", settings.driver);
  read("NAME", settings.name);
  if (const char* text = text_of("CAPABILITY")) {
    (void)std::sscanf(text, "%d.%d", &settings.capability_major, &settings.capability_minor);
  }
  read("SMS", settings.multiprocessors);
  read("CONTEXT_BYTES", settings.context_bytes);
  read("GRAPH_BYTES", settings.graph_bytes);
  read("TABLE_BYTES", settings.table_bytes);
  read("PROGRESS", settings.progress);
  read("TEARDOWN_MS", settings.teardown_ms);
  settings.book = "/dev/shm/test-libcuda-1-" + std::to_string(getuid());
  read("BOOK", settings.book);
  constexpr int kFirstVirtualMemory = 10020;
  if (settings.driver_version < kFirstVirtualMemory) settings.virtual_memory = false;
  return settings;
}

}  // namespace test_libcuda
