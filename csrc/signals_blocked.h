// Threads of this library handle no signal of the process: those are the business of the threads
// that the program knows of.
#pragma once

#include <pthread.h>

#include <csignal>

#include "non_copyable.h"

namespace kvcached {

// A thread that is started while this lives has all signals blocked.
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
