#include "subject.h"

#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
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
  std::atomic<bool> inside;  // between lock and unlock
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
  if (strncmp(name, "lock: ", 6) == 0) control->inside = strcmp(name, "lock: taken") == 0;
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

bool is_of_memory(uint64_t call) {
  // getpid is the steps' own.
  const uint64_t calls[] = {SYS_brk, SYS_mmap, SYS_munmap, SYS_getpid};
  return std::find(std::begin(calls), std::end(calls), call) != std::end(calls);
}

// Runs to the next entry or exit of a call, or to the end: false then.
bool go_on(pid_t child, int* status) {
  const int signal = WSTOPSIG(*status) == (SIGTRAP | 0x80) ? 0 : WSTOPSIG(*status);
  CHECK(ptrace(PTRACE_SYSCALL, child, nullptr, signal == SIGSTOP ? 0 : signal) == 0);
  CHECK(waitpid(child, status, 0) == child);
  return WIFSTOPPED(*status);
}

}  // namespace

std::vector<uint64_t> calls_under_lock(const std::function<void()>& act) {
  control->die_at = 0;
  control->die_at_name[0] = '\0';
  control->steps = 0;
  control->inside = false;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0);
    raise(SIGSTOP);
    control->subject = getpid();
    act();
    control->subject = 0;
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFSTOPPED(status));
  const long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL;
  CHECK(ptrace(PTRACE_SETOPTIONS, child, nullptr, options) == 0);
  std::vector<uint64_t> calls;
  while (go_on(child, &status)) {
    __ptrace_syscall_info call = {};
    CHECK(ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof(call), &call) > 0);
    if (call.op != PTRACE_SYSCALL_INFO_ENTRY || !control->inside) continue;
    if (!is_of_memory(call.entry.nr)) calls.push_back(call.entry.nr);
  }
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  control->subject = 0;
  return calls;
}

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
