// Fake streams for host devices: the creator submits and completes work by calls. An engine on a
// host device works synchronously and needs none. Tests use them to detect memory that is unmapped
// too early without a GPU. Thread rule: any thread.
#pragma once

#include "non_copyable.h"
#include "vmm.h"

namespace kvcached {

class HostStream : private NonCopyable {
 public:
  HostStream();
  // The destructor completes all work.
  ~HostStream();

  Stream handle() const { return handle_; }
  void submit();
  // Completes the oldest work, if there is any.
  void complete();
  void complete_all();
  uint64_t pending() const;

  // Records an event of the stream with this handle. Events of stream 0 have passed.
  static Result<std::unique_ptr<StreamEvent>> record(Stream handle);

 private:
  struct Progress;
  class Event;
  struct Registry;

  static Registry& registry();

  const std::shared_ptr<Progress> progress_;
  const Stream handle_;
};

}  // namespace kvcached
