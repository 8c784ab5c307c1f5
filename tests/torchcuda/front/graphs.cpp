#include "graphs.h"

#include <map>
#include <mutex>

#include "driver.h"

namespace torchcuda {

namespace {

struct Captures {
  std::mutex mutex;
  std::map<std::pair<int, uint64_t>, Graph*> streams;
  std::map<const void*, Graph*> events;
};

Captures& captures() {
  static auto* instance = new Captures;
  return *instance;
}

void forget(Graph* graph) {
  const std::lock_guard lock(captures().mutex);
  std::erase_if(captures().streams, [=](const auto& entry) { return entry.second == graph; });
  std::erase_if(captures().events, [=](const auto& entry) { return entry.second == graph; });
}

}  // namespace

Graph* capturing(int device) { return capturing(device, current_stream(device)); }

Graph* capturing(int device, uint64_t stream) {
  const std::lock_guard lock(captures().mutex);
  const auto found = captures().streams.find({device, stream});
  return found == captures().streams.end() ? nullptr : found->second;
}

void note_recorded(const void* event, int device, uint64_t stream) {
  Graph* graph = capturing(device, stream);
  const std::lock_guard lock(captures().mutex);
  captures().events.erase(event);
  if (graph != nullptr) captures().events[event] = graph;
}

void join_capture(const void* event, int device, uint64_t stream) {
  const std::lock_guard lock(captures().mutex);
  const auto found = captures().events.find(event);
  if (found != captures().events.end()) captures().streams[{device, stream}] = found->second;
}

}  // namespace torchcuda

using torchcuda::driver;
using torchcuda::Graph;
using torchcuda::OnDevice;

// For the Python part (torchcuda_front.py). They return CUDA's error.
extern "C" {

int torchcuda_capture_begin(int mode, Graph** made) {
  const int device = torchcuda::current_device();
  const uint64_t stream = torchcuda::current_stream(device);
  const OnDevice context(device);
  const int result = driver().cuStreamBeginCapture_v2(reinterpret_cast<void*>(stream), mode);
  if (result != 0) return result;
  *made = new Graph;
  (*made)->device = device;
  const std::lock_guard lock(torchcuda::captures().mutex);
  torchcuda::captures().streams[{device, stream}] = *made;
  return 0;
}

int torchcuda_capture_end(Graph* graph) {
  torchcuda::forget(graph);
  const uint64_t stream = torchcuda::current_stream(graph->device);
  const OnDevice context(graph->device);
  void* captured = nullptr;
  int result = driver().cuStreamEndCapture(reinterpret_cast<void*>(stream), &captured);
  if (result != 0) return result;
  result = driver().cuGraphInstantiateWithFlags(&graph->executable, captured, 0);
  (void)driver().cuGraphDestroy(captured);
  return result;
}

void torchcuda_graph_free(Graph* graph) {
  if (graph->executable != nullptr && !torchcuda::is_in_bad_fork()) {
    const OnDevice context(graph->device);
    (void)driver().cuGraphExecDestroy(graph->executable);
  }
  delete graph;
}

int torchcuda_is_capturing() {
  return torchcuda::capturing(torchcuda::current_device()) != nullptr ? 1 : 0;
}

const char* torchcuda_error(int error) {
  const char* text = nullptr;
  (void)driver().cuGetErrorString(error, &text);
  return text != nullptr ? text : "unrecognized error code";
}
}
