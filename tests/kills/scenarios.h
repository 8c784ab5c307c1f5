// What a subject does until it is killed. A step in csrc that no scenario passes fails the test.
#pragma once

#include <span>

#include "world.h"

namespace kvcached::testing {

struct Scenario {
  const char* name;
  void (*prepare)(World& world);  // before each subject, in the program's own process
  void (*act)(const World& world);
  void (*verify)(World& world);  // after each, with World::check_whole
};

std::span<const Scenario> scenarios();

}  // namespace kvcached::testing
