// Stream capture, its rules, and the replay of graphs.
#include "graphs.h"

#include <algorithm>
#include <thread>

namespace emulated {

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  CUstream_st* origin;
  std::thread::id thread;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::map<CUstream_st*, Coverage> streams;  // what each stream of the capture depends on
  bool invalid = false;
};

namespace {

// One lock for all captures: they are rare, and the rules look at all of them.
struct Captures {
  std::mutex mutex;
  std::vector<std::shared_ptr<Capture>> active;
  std::atomic<int> count{0};
  unsigned long long next_id = 1;
};
Captures& captures() {
  static Captures* only = new Captures;
  return *only;
}
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

void leave(const std::shared_ptr<Capture>& capture) {  // with the lock held
  for (auto& [stream, covered] : capture->streams) stream->capture = nullptr;
  auto& active = captures().active;
  active.erase(std::find(active.begin(), active.end(), capture));
  captures().count--;
}

bool is_joined(const Capture& capture) {  // every stream's pieces lead to the origin
  const Coverage& covered = capture.streams.at(capture.origin);
  for (auto& [stream, own] : capture.streams) {
    auto pieces = own.find(stream);
    if (pieces == own.end()) continue;
    auto joined = covered.find(stream);
    if (joined == covered.end() || joined->second < pieces->second) return false;
  }
  return true;
}

}  // namespace

bool add_to_capture(CUstream_st* stream, const Piece& piece, cudaError_t* error) {
  if (!captures().count) return false;
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (!stream->capture) return false;
  if (stream->capture->invalid) {
    *error = fail(cudaErrorStreamCaptureInvalidated);
    return true;
  }
  stream->capture->graph->pieces.push_back(piece);
  stream->capture->streams[stream][stream]++;
  return true;
}

bool is_capturing(cudaStream_t handle) {
  if (!captures().count) return false;
  CUstream_st* stream = stream_of(handle);
  std::lock_guard<std::mutex> lock(captures().mutex);
  return stream->capture != nullptr;
}

std::shared_ptr<CapturedEvent> record_in_capture(CUstream_st* stream) {
  if (!captures().count) return nullptr;
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (!stream->capture) return nullptr;
  return std::make_shared<CapturedEvent>(CapturedEvent{stream->capture, stream->capture->streams[stream]});
}

cudaError_t wait_in_capture(CUstream_st* stream, const std::shared_ptr<CapturedEvent>& event) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto& active = captures().active;
  if (std::find(active.begin(), active.end(), event->capture) == active.end()) return cudaErrorCapturedEvent;
  if (stream->capture && stream->capture != event->capture) {
    stream->capture->invalid = event->capture->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  stream->capture = event->capture;
  Coverage& covered = event->capture->streams[stream];
  for (auto& [other, pieces] : event->covered) covered[other] = std::max(covered[other], pieces);
  return cudaSuccess;
}

void invalidate_capture(CUstream_st* stream) {
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (stream->capture) stream->capture->invalid = true;
}

// CUDA Runtime API, cudaThreadExchangeStreamCaptureMode: a thread in mode "global" may make no potentially unsafe call
// while it captures itself (other than relaxed), or while any other thread has a capture that began in mode "global";
// in mode "thread local" only its own captures count; in mode "relaxed" none. CUDA C++ Programming Guide, section
// "Prohibited and Unhandled Operations": such a call invalidates the capture, and so does asking for the state of a
// stream that is captured, in every mode.
cudaError_t unsafe_call(CUstream_st* stream) {
  if (!captures().count) return cudaSuccess;
  std::lock_guard<std::mutex> lock(captures().mutex);
  cudaError_t error = cudaSuccess;
  if (stream && stream->capture) {
    stream->capture->invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return error;
  for (auto& capture : captures().active) {
    bool own = capture->thread == std::this_thread::get_id();
    bool forbids = own ? capture->mode != cudaStreamCaptureModeRelaxed
                       : mode_of_thread == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (!forbids) continue;
    capture->invalid = true;
    error = cudaErrorStreamCaptureUnsupported;
  }
  return error;
}

}  // namespace emulated

using namespace emulated;

struct CUgraph_st {
  std::shared_ptr<Graph> graph;
};
struct CUgraphExec_st {
  std::shared_ptr<Graph> graph;
};

CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  ENTER();
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return fail(cudaErrorStreamCaptureUnsupported);
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (handle->capture) return fail(cudaErrorIllegalState);
  auto capture = std::make_shared<Capture>();
  capture->id = captures().next_id++;
  capture->mode = mode;
  capture->origin = handle;
  capture->thread = std::this_thread::get_id();
  capture->streams[handle];
  handle->capture = capture;
  captures().active.push_back(capture);
  captures().count++;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  ENTER();
  *graph = nullptr;
  CUstream_st* stream = stream_of(handle);
  std::lock_guard<std::mutex> lock(captures().mutex);
  auto capture = stream->capture;
  if (!capture) return fail(cudaErrorIllegalState);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return fail(cudaErrorStreamCaptureWrongThread);
  if (capture->origin != stream) {
    capture->invalid = true;
    return fail(cudaErrorStreamCaptureUnmatched);
  }
  leave(capture);
  if (capture->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  if (!is_joined(*capture)) return fail(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{capture->graph};
  return cudaSuccess;
}

CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  ENTER();
  *status = cudaStreamCaptureStatusNone;
  if (!captures().count) return cudaSuccess;
  CUstream_st* stream = stream_of(handle);
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (stream->capture)
    *status = stream->capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

// The graph's nodes are not given out: a program that adds nodes to a graph under capture is not emulated.
CUDA_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes,
                                              const cudaGraphEdgeData** edges, size_t* count) {
  if (cudaError_t error = cudaStreamIsCapturing(handle, status)) return error;
  CUstream_st* stream = stream_of(handle);
  std::lock_guard<std::mutex> lock(captures().mutex);
  if (id) *id = stream->capture ? stream->capture->id : 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                                 unsigned long long* id, cudaGraph_t* graph,
                                                 const cudaGraphNode_t** nodes, size_t* count) {
  return cudaStreamGetCaptureInfo(handle, status, id, graph, nodes, nullptr, count);
}

CUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  ENTER();
  *executable = new CUgraphExec_st{graph->graph};
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

CUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  ENTER();
  return enqueue_graph(stream, *executable->graph);
}
CUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph->graph->pieces.size();
  return cudaSuccess;
}
