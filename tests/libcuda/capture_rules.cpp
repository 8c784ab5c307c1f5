// Calls that captures forbid, and launches of graphs.
#include "served.h"
#include "simulator.h"

namespace test_libcuda {

Error Simulator::enqueue(uint64_t stream, int device, Work work) {
  if (stream == 0 && captures_.blocks_default(device)) {
    captures_.invalidate_blocking(device);
    return refuse(kCaptureImplicit, "the default stream would wait for a capturing stream");
  }
  switch (captures_.status(stream)) {
    case CaptureStatus::invalidated:
      return refuse(kCaptureInvalidated, "the stream's capture is invalid; end it");
    case CaptureStatus::active:
      captures_.record(stream, std::move(work));
      return kSuccess;
    case CaptureStatus::none:
      streams_.launch(stream, device, std::move(work));
  }
  return kSuccess;
}

Error Simulator::check_safe(const char* call) {
  if (!captures_.forbids_unsafe(capture_mode())) return kSuccess;
  return refuse(kCaptureUnsupported, std::string(call) + ": unsafe while a stream captures");
}

Error Simulator::check_synchronous(const char* call) {
  const int device = current_device();
  if (captures_.blocks_default(device)) {
    captures_.invalidate_blocking(device);
    return refuse(kCaptureImplicit,
                  std::string(call) + ": the default stream would wait for a capturing stream");
  }
  return check_safe(call);
}

Error Simulator::launch_graph(uint64_t graph, uint64_t stream, int device) {
  const auto found = graphs_.find(graph);
  if (found == graphs_.end() || found->second.device < 0) return kInvalidHandle;
  if (!streams_.exists(stream, device)) return kInvalidHandle;
  if (found->second.device != device) return refuse(kInvalidContext, "cuGraphLaunch: its device");
  for (const Work& work : found->second.graph) {
    if (work.bytes == 0 || work.may_meet_holes) continue;
    const auto* host = reinterpret_cast<const void*>(work.address);
    if (copies_.is_pinned(host, work.bytes)) continue;
    if (check_accessible(work.address, work.bytes) != kSuccess) {
      return refuse(kIllegalAddress, "cuGraphLaunch: the graph touches memory that is gone");
    }
  }
  for (const Work& work : found->second.graph) {
    if (const Error error = enqueue(stream, device, work); error != 0) return error;
  }
  return kSuccess;
}

}  // namespace test_libcuda
