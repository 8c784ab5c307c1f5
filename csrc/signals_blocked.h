// Blocks signals for threads of this library, so that the program's own threads handle them.
#pragma once

#include <pthread.h>

#include <csignal>

#include "non_copyable.h"

namespace kvcached {

// A thread that is started during the lifetime of this object has all signals blocked.
class SignalsBlocked : private NonCopyable {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace kvcached
