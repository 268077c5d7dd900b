// Events: a place in a stream, which hosts and other streams can wait for.
#include <chrono>

#include "graphs.h"

using namespace emulated;

void Mark::set() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    set_ = true;
    at_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}
void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return set_; });
}
bool Mark::is_set() {
  std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}
std::chrono::steady_clock::time_point Mark::at() {
  std::lock_guard<std::mutex> lock(mutex_);
  return at_;
}

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;              // its latest recording; none: never recorded, which counts as complete
  std::shared_ptr<CapturedEvent> captured;  // its latest recording if that was in a capture
  int device = 0;
};

namespace {

std::shared_ptr<Mark> mark_of(cudaEvent_t event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->mark;
}
bool was_captured(cudaEvent_t event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->captured != nullptr;
}
std::shared_ptr<Mark> begin_recording(cudaEvent_t event) {
  auto mark = std::make_shared<Mark>();
  std::lock_guard<std::mutex> lock(event->mutex);
  event->mark = mark;
  event->captured = nullptr;
  return mark;
}
cudaError_t after_waiting(int device) {
  cudaError_t error = device_error(device);
  return error ? fail(error) : cudaSuccess;
}

}  // namespace

CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ENTER();
  *event = new CUevent_st;
  (*event)->device = current_device();
  return cudaSuccess;
}
CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

// A recording that is under way goes on without the event (CUDA Runtime API, cudaEventDestroy).
CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  ENTER();
  CUstream_st* stream = stream_of(handle);
  if (!(flags & cudaEventRecordExternal)) {
    if (auto captured = record_in_capture(stream)) {  // an edge of the graph, nothing that runs
      std::lock_guard<std::mutex> lock(event->mutex);
      event->captured = captured;
      return cudaSuccess;
    }
  }
  // The recording begins at each launch: at once, or when the graph that holds it is launched.
  return enqueue_launch(handle, {Kind::order, [event]() -> Run {
                                   auto mark = begin_recording(event);
                                   return [mark] { mark->set(); };
                                 }});
}
CUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

CUDA_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER();
  if (was_captured(event)) return fail(cudaErrorCapturedEvent);
  if (cudaError_t refused = unsafe_call()) return fail(refused);
  auto mark = mark_of(event);
  if (mark && !mark->is_set()) return fail(cudaErrorNotReady);
  return after_waiting(event->device);
}
CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER();
  if (was_captured(event)) return fail(cudaErrorCapturedEvent);
  if (cudaError_t refused = unsafe_call()) return fail(refused);
  if (auto mark = mark_of(event)) mark->wait();
  return after_waiting(event->device);
}
CUDA_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  ENTER();
  auto first = mark_of(start), last = mark_of(end);
  if (!first || !last) return fail(cudaErrorInvalidResourceHandle);
  if (!first->is_set() || !last->is_set()) return fail(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(last->at() - first->at()).count();
  return cudaSuccess;
}

// The stream waits for the recording that is the latest at this moment; later ones do not matter (CUDA Runtime API,
// cudaStreamWaitEvent). An event that was recorded in a capture draws the stream into it.
CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  ENTER();
  CUstream_st* stream = stream_of(handle);
  std::shared_ptr<CapturedEvent> captured;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    captured = event->captured;
  }
  if (captured) {
    cudaError_t error = wait_in_capture(stream, captured);
    return error ? fail(error) : cudaSuccess;
  }
  if (!(flags & cudaEventWaitExternal) && is_capturing(stream)) {
    if (!mark_of(event)) return cudaSuccess;
    // A dependency on work outside the graph "crosses the capture sequence boundary" (cudaErrorStreamCaptureIsolation).
    invalidate_capture(stream);
    return fail(cudaErrorStreamCaptureIsolation);
  }
  return enqueue_launch(handle, {Kind::order, [event]() -> Run {
                                   auto mark = mark_of(event);
                                   return [mark] {
                                     if (mark) mark->wait();
                                   };
                                 }});
}
