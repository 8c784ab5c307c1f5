// Streams that do nothing until a test says so. Work is a range of addresses that a kernel may
// touch, from its launch until it is completed. Taking the memory away meanwhile breaks a rule
// that a real driver does not check.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>

namespace test_libcuda {

// Work of a stream: the range that it may touch, its final action, and the work of another stream
// that must be done before.
struct Work {
  uint64_t address = 0;
  uint64_t bytes = 0;
  std::function<void()> run = {};
  uint64_t after_event = 0;
  bool may_meet_holes = false;  // a kernel over a range of which it touches what is mapped
};

class Streams {
 public:
  // Stream 0 of each device always exists and is never made.
  uint64_t make(int device, bool is_blocking = true);
  // Returns whether the default stream waits for it.
  bool is_blocking(uint64_t stream) const;
  bool remove(uint64_t stream);
  // In the calls below, `device` is that of the current context, for stream 0.
  bool exists(uint64_t stream, int device) const;

  // REQUIRES: exists
  void launch(uint64_t stream, int device, Work work);
  // Completes the oldest `count`, or all if fewer, after the work that they wait for.
  void complete(uint64_t stream, int device, uint64_t count);
  // Completes all work of the device.
  void complete_device(int device);
  // Returns whether pending work of any stream, or of any other stream, may touch the range.
  bool is_touched(uint64_t address, uint64_t bytes) const;
  bool is_touched_elsewhere(uint64_t address, uint64_t bytes, uint64_t stream, int device) const;
  bool has_work(uint64_t stream, int device) const;

  uint64_t make_event(int device);
  bool remove_event(uint64_t event);
  // Returns false for a missing event or stream, or for two devices.
  bool record(uint64_t event, uint64_t stream, int device);
  bool has_event(uint64_t event) const { return events_.count(event) != 0; }
  bool was_recorded(uint64_t event) const { return events_.at(event).stream != 0; }
  // An event that was never recorded has passed. REQUIRES: has_event
  bool has_passed(uint64_t event) const;
  // Does work before the event, all or the oldest `count`. REQUIRES: has_event
  void complete_until(uint64_t event, uint64_t count = UINT64_MAX);
  // Makes the stream's further work wait for the event as recorded. REQUIRES: both exist
  void wait_for(uint64_t stream, int device, uint64_t event);

  // Returns the largest number of devices that had work at once.
  size_t busy_devices_max() const { return busy_devices_max_; }

  size_t streams() const { return streams_.size(); }
  size_t events() const { return events_.size(); }

 private:
  struct Queue {
    int device;
    uint64_t completed = 0;
    std::deque<Work> pending = {};
    bool is_blocking = true;
  };
  struct Event {
    int device;
    uint64_t stream = 0;
    uint64_t work = 0;
  };

  static uint64_t name(uint64_t stream, int device);
  void complete(Queue& queue, uint64_t count);
  void count_busy_devices();
  const Queue* find(uint64_t name) const;
  Queue* find(uint64_t name);

  std::map<uint64_t, Queue> streams_;
  std::map<uint64_t, Queue> defaults_;  // stream 0 of a device
  std::map<uint64_t, Event> events_;
  std::map<uint64_t, Event> awaited_;  // events as they were when a stream began to wait
  size_t busy_devices_max_ = 0;
  uint64_t next_ = 0x10000;
};

}  // namespace test_libcuda
