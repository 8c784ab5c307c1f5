// A process that is killed at a chosen step (csrc/steps.h) of what it does.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace kvcached::testing {

struct Outcome {
  bool killed;
  std::vector<std::string> steps;  // in the order they were passed
};

// Before anything that steps.
void prepare_subjects();

// Runs `act` in a child, which kills itself at its step number `die_at` (from 1; 0: at none). A
// child that fails in another way ends the program.
Outcome run_subject(const std::function<void()>& act, int die_at);
// The same, at the first step of this name.
Outcome run_subject(const std::function<void()>& act, const std::string& die_at);

// The same, at no step, and which calls to the system it makes while it holds a ledger's mutex:
// their numbers, without those of memory.
std::vector<uint64_t> calls_under_lock(const std::function<void()>& act);

}  // namespace kvcached::testing
