// libcuda's stream capture and graphs.
#include "served.h"

using test_libcuda::CaptureMode;
using test_libcuda::CaptureStatus;
using test_libcuda::Error;
using test_libcuda::Graph;
using test_libcuda::handle;
using test_libcuda::number;
using test_libcuda::served_in_context;
using test_libcuda::Simulator;

namespace {

thread_local CaptureMode thread_mode = CaptureMode::global;

bool is_mode(int mode) { return mode >= 0 && mode <= static_cast<int>(CaptureMode::relaxed); }

Error check_stream(Simulator& cuda, const void* stream) {
  const int device = test_libcuda::current_device();
  if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
  // A query leaves the capture valid.
  const bool is_implicit = stream == nullptr && cuda.captures().blocks_default(device);
  return is_implicit ? test_libcuda::kCaptureImplicit : test_libcuda::kSuccess;
}

}  // namespace

CaptureMode test_libcuda::capture_mode() { return thread_mode; }

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  return test_libcuda::served([=](Simulator&) {
    if (!is_mode(*mode)) return test_libcuda::kInvalidValue;
    const auto before = static_cast<int>(thread_mode);
    thread_mode = static_cast<CaptureMode>(*mode);
    *mode = before;
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuStreamBeginCapture_v2(void* stream, int mode) {
  return served_in_context([=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!is_mode(mode)) return test_libcuda::kInvalidValue;
    if (!cuda.streams().exists(number(stream), device)) return test_libcuda::kInvalidHandle;
    const bool is_blocking = cuda.streams().is_blocking(number(stream));
    return cuda.captures().begin(number(stream), device, is_blocking,
                                 static_cast<CaptureMode>(mode));
  });
}

EXPORT int cuStreamEndCapture(void* stream, void** graph) {
  return served_in_context([=](Simulator& cuda) {
    std::unique_ptr<Graph> made;
    *graph = nullptr;
    const Error error = cuda.captures().end(number(stream), made);
    if (made == nullptr) return error;
    const uint64_t name = cuda.next_handle();
    cuda.graphs().emplace(name, test_libcuda::GraphMemory{std::move(*made)});
    *graph = handle(name);
    return error;
  });
}

EXPORT int cuStreamIsCapturing(void* stream, int* status) {
  return served_in_context([=](Simulator& cuda) {
    const Error error = check_stream(cuda, stream);
    if (error == 0) *status = static_cast<int>(cuda.captures().status(number(stream)));
    return error;
  });
}

// Does not return the graph and the dependencies, which no test needs.
EXPORT int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph,
                                     const void** dependencies, size_t* count) {
  return served_in_context([=](Simulator& cuda) {
    if (graph != nullptr || dependencies != nullptr || count != nullptr) {
      return test_libcuda::kNotSupported;
    }
    const Error error = check_stream(cuda, stream);
    if (error != 0) return error;
    *status = static_cast<int>(cuda.captures().status(number(stream)));
    if (id != nullptr) *id = cuda.captures().id(number(stream));
    return error;
  });
}

EXPORT int cuGraphInstantiateWithFlags(void** instance, void* graph, unsigned long long) {
  return test_libcuda::counted("cuGraphInstantiate", [=](Simulator& cuda) {
    const auto found = cuda.graphs().find(number(graph));
    if (found == cuda.graphs().end() || found->second.device >= 0) {
      return test_libcuda::kInvalidHandle;
    }
    const int device = test_libcuda::current_device();
    const uint64_t bytes = cuda.settings().graph_bytes;
    if (!cuda.take_driver_memory(device, bytes)) return test_libcuda::kOutOfMemory;
    const uint64_t name = cuda.next_handle();
    cuda.graphs().emplace(name, test_libcuda::GraphMemory{found->second.graph, device, bytes});
    *instance = handle(name);
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuGraphLaunch(void* instance, void* stream) {
  return test_libcuda::counted("cuGraphLaunch", [=](Simulator& cuda) {
    return cuda.launch_graph(number(instance), number(stream), test_libcuda::current_device());
  });
}

EXPORT int cuGraphExecDestroy(void* instance) {
  return served_in_context([=](Simulator& cuda) {
    const auto found = cuda.graphs().find(number(instance));
    if (found == cuda.graphs().end() || found->second.device < 0) {
      return test_libcuda::kInvalidHandle;
    }
    cuda.give_driver_memory(found->second.device, found->second.bytes);
    cuda.graphs().erase(found);
    return test_libcuda::kSuccess;
  });
}

EXPORT int cuGraphDestroy(void* graph) {
  return served_in_context([=](Simulator& cuda) {
    const auto found = cuda.graphs().find(number(graph));
    if (found == cuda.graphs().end() || found->second.device >= 0) {
      return test_libcuda::kInvalidHandle;
    }
    cuda.graphs().erase(found);
    return test_libcuda::kSuccess;
  });
}
