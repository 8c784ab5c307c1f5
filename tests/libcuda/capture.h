// Stream capture: the streams that record, the calls that a capture forbids to each thread, and
// the resulting graphs. The rules are those of cuStreamBeginCapture and
// cuThreadExchangeStreamCaptureMode. Called with the library's lock held.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "abi.h"
#include "streams.h"

namespace test_libcuda {

enum class CaptureMode { global = 0, thread_local_ = 1, relaxed = 2 };
enum class CaptureStatus { none = 0, active = 1, invalidated = 2 };

// Recorded work in an order that keeps the order of each stream and event.
using Graph = std::vector<Work>;

class Captures {
 public:
  Error begin(uint64_t stream, int device, bool is_blocking, CaptureMode mode);
  // `graph` is null unless the capture was whole.
  Error end(uint64_t stream, std::unique_ptr<Graph>& graph);

  CaptureStatus status(uint64_t stream) const;
  // Returns the id of the stream's sequence; 0 if it does not capture.
  uint64_t id(uint64_t stream) const;
  // Returns whether the default stream is unusable, since it would wait for a capturing stream.
  bool blocks_default(int device) const;
  void invalidate_blocking(int device);
  void invalidate(uint64_t stream);

  // Returns whether this thread's mode forbids a potentially unsafe call. The captures that forbid
  // it become invalid.
  bool forbids_unsafe(CaptureMode mode);

  // REQUIRES: status(stream) == active
  void record(uint64_t stream, Work work);
  void record_event(uint64_t stream, uint64_t event);
  void forget_event(uint64_t event) { events_.erase(event); }
  bool has_event(uint64_t event) const { return events_.count(event) != 0; }
  void invalidate_of_event(uint64_t event);
  // The stream joins the capture that the event was recorded in, or waits within its own.
  Error wait(uint64_t stream, uint64_t event);

 private:
  using Clock = std::map<uint64_t, uint64_t>;  // of each stream: how much was
                                               // recorded before

  struct Sequence {
    uint64_t id;
    uint64_t origin;
    int device;
    bool is_blocking;
    CaptureMode mode;
    std::thread::id thread;
    bool is_valid = true;
    std::map<uint64_t, Clock> streams = {};
    Graph graph = {};
  };
  struct Event {
    uint64_t sequence;
    Clock clock;
  };

  Sequence* of_stream(uint64_t stream);
  const Sequence* of_stream(uint64_t stream) const;
  static bool is_joined(const Sequence& sequence);

  std::map<uint64_t, Sequence> sequences_;  // by id
  std::map<uint64_t, uint64_t> members_;    // stream -> sequence
  std::map<uint64_t, Event> events_;
  uint64_t next_id_ = 1;
};

}  // namespace test_libcuda
