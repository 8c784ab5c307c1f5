#include "fork_guard.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace kvcached {

namespace {

struct Registry {
  std::mutex mutex;
  std::vector<ForkGuarded*> objects;
};

Registry& registry() {
  static Registry* instance = new Registry;  // never destroyed: a fork may come during exit
  return *instance;
}

void before_fork() {
  registry().mutex.lock();
  auto& objects = registry().objects;
  for (auto object = objects.rbegin(); object != objects.rend(); ++object) {
    (*object)->lock_for_fork();
  }
}

void after_fork_in_parent() {
  for (ForkGuarded* object : registry().objects) object->unlock_after_fork();
  registry().mutex.unlock();
}

void after_fork_in_child() {
  for (ForkGuarded* object : registry().objects) object->abandon_in_child();
  after_fork_in_parent();
}

}  // namespace

void guard_against_fork(ForkGuarded* object) {
  static std::once_flag installed;
  std::call_once(installed,
                 [] { pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child); });
  const std::lock_guard lock(registry().mutex);
  registry().objects.push_back(object);
}

void unguard_against_fork(ForkGuarded* object) {
  const std::lock_guard lock(registry().mutex);
  std::erase(registry().objects, object);
}

}  // namespace kvcached
