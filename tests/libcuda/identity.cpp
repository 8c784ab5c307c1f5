#include "identity.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace test_libcuda {

namespace {

// -1: none, or several.
int by_uuid(int gpus, const std::string& beginning) {
  int found = -1;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    if (uuid_text(gpu).compare(0, beginning.size(), beginning) != 0) continue;
    if (found >= 0) return -1;
    found = gpu;
  }
  return found;
}

int by_name(int gpus, std::string name) {
  name.erase(0, name.find_first_not_of(' '));
  if (name.compare(0, 4, "GPU-") == 0) return by_uuid(gpus, name);
  char* end = nullptr;
  const long number = std::strtol(name.c_str(), &end, 10);
  const bool is_number = end != name.c_str() && number >= 0 && number < gpus;
  return is_number ? static_cast<int>(number) : -1;
}

}  // namespace

Uuid uuid_of(int gpu) {
  return {0x7e, 0x57, 0xc0, 0xda, 0, 0, 0x40, 0,
          0x80, 0,    0,    0,    0, 0, 0,    static_cast<unsigned char>(gpu + 1)};
}

std::string uuid_text(int gpu) {
  std::string text = "GPU";
  const Uuid uuid = uuid_of(gpu);
  for (size_t i = 0; i < uuid.size(); ++i) {
    char byte[4];
    const bool begins_group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    std::snprintf(byte, sizeof(byte), begins_group ? "-%02x" : "%02x", uuid[i]);
    text += byte;
  }
  return text;
}

std::vector<int> visible_gpus(int gpus, const char* variable) {
  std::vector<int> visible;
  if (variable == nullptr) {
    for (int gpu = 0; gpu < gpus; ++gpu) visible.push_back(gpu);
    return visible;
  }
  std::istringstream names(variable);
  for (std::string name; std::getline(names, name, ',');) {
    const int gpu = by_name(gpus, name);
    if (gpu < 0) break;
    if (std::find(visible.begin(), visible.end(), gpu) != visible.end()) return {};
    visible.push_back(gpu);
  }
  return visible;
}

}  // namespace test_libcuda
