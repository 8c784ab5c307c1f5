// kills DEVICE: kills a process at every step of every scenario, one after the other, and checks
// after each that the other processes continue and that the capacity is whole again. No scenario
// may make a system call under the ledger's mutex. Prints the steps passed.
#include <set>

#include "scenarios.h"
#include "subject.h"

namespace kvcached::testing {

namespace {

std::vector<std::string> run_once(const Scenario& scenario, World& world, int die_at,
                                  bool* killed) {
  scenario.prepare(world);
  const Outcome outcome = run_subject([&] { scenario.act(world); }, die_at);
  *killed = outcome.killed;
  scenario.verify(world);
  world.check_whole();
  return outcome.steps;
}

// A process that is stopped inside stops all others, so it asks nothing of the system there.
void run_traced(const Scenario& scenario, World& world) {
  scenario.prepare(world);
  for (const uint64_t call : calls_under_lock([&] { scenario.act(world); })) {
    std::fprintf(stderr, "%s: system call %d under the lock\n", scenario.name,
                 static_cast<int>(call));
    std::exit(1);
  }
  scenario.verify(world);
  world.check_whole();
}

void run(const Scenario& scenario, World& world, std::set<std::string>* passed) {
  int deaths = 0;
  bool killed = true;
  for (int die_at = 1; killed; ++die_at) {
    const std::vector<std::string> steps = run_once(scenario, world, die_at, &killed);
    passed->insert(steps.begin(), steps.end());
    deaths += killed ? 1 : 0;
    CHECK(!killed || static_cast<int>(steps.size()) >= die_at);
  }
  CHECK(deaths > 0);
  run_traced(scenario, world);
  std::printf("%s: killed at %d points\n", scenario.name, deaths);
}

}  // namespace

}  // namespace kvcached::testing

int main(int count, char** arguments) {
  using namespace kvcached::testing;
  CHECK(count == 2);
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  prepare_subjects();
  World world(arguments[1]);
  std::set<std::string> passed;
  for (const Scenario& scenario : scenarios()) run(scenario, world, &passed);
  for (const std::string& name : passed) std::printf("step %s\n", name.c_str());
  return 0;
}
