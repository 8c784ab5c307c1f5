#include "subject.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>

#include "check.h"
#include "steps.h"

namespace {

constexpr int kMaxSteps = 4096;

// In memory shared with the subject. A name is at the same address in every forked process.
struct Control {
  std::atomic<int> subject;
  std::atomic<int> die_at;
  std::atomic<int> steps;
  char die_at_name[64];
  const char* names[kMaxSteps];
};

Control* control = nullptr;

}  // namespace

void kvcached::step(const char* name) {
  if (control == nullptr || control->subject != getpid()) return;
  const int number = ++control->steps;
  CHECK(number < kMaxSteps);
  control->names[number - 1] = name;
  if (number == control->die_at || strcmp(name, control->die_at_name) == 0) {
    kill(getpid(), SIGKILL);
  }
}

namespace kvcached::testing {

namespace {

Outcome run(const std::function<void()>& act) {
  control->steps = 0;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    control->subject = getpid();
    act();
    control->subject = 0;
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  CHECK(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
  control->subject = 0;
  return {killed, {control->names, control->names + control->steps}};
}

}  // namespace

void prepare_subjects() {
  void* memory =
      mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(memory != MAP_FAILED);
  control = new (memory) Control{};
}

Outcome run_subject(const std::function<void()>& act, int die_at) {
  control->die_at = die_at;
  control->die_at_name[0] = '\0';
  return run(act);
}

Outcome run_subject(const std::function<void()>& act, const std::string& die_at) {
  control->die_at = 0;
  strncpy(control->die_at_name, die_at.c_str(), sizeof(control->die_at_name) - 1);
  return run(act);
}

}  // namespace kvcached::testing
