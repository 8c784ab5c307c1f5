// Fake streams for host devices: their maker says what they were given and what they have done. An
// engine on a host device works in its own calls and needs none; tests have them, so that memory
// which is unmapped too early shows without a GPU.
// Thread rule: any thread.
#pragma once

#include "non_copyable.h"
#include "vmm.h"

namespace kvcached {

class HostStream : private NonCopyable {
 public:
  HostStream();
  // Its work counts as done.
  ~HostStream();

  Stream handle() const { return handle_; }
  void submit();
  // The oldest work is done; nothing without any.
  void complete();
  void complete_all();
  uint64_t pending() const;

  // An event of the stream with this handle; those of stream 0 have passed.
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
