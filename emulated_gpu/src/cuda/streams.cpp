// Streams: their queues and threads, and the calls of the runtime on them.
#include "streams.h"

#include <pthread.h>

#include <chrono>
#include <set>
#include <thread>

#include "graphs.h"

namespace emulated {
namespace {

using Clock = std::chrono::steady_clock;

struct Registry {
  std::mutex mutex;
  std::set<std::shared_ptr<CUstream_st>> streams;
  CUstream_st* default_stream[max_devices] = {};
};
Registry& registry() {
  static Registry* only = new Registry;  // never destroyed: threads of streams outlive main
  return *only;
}

CUstream_st* create(int device, unsigned flags, int priority) {  // with the registry's mutex held
  auto stream = std::make_shared<CUstream_st>(device, flags, priority);
  registry().streams.insert(stream);
  return stream.get();
}

std::atomic<unsigned long long> next_id{1};

}  // namespace

CUstream_st* stream_of(cudaStream_t handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return handle;
  int device = current_device();
  std::lock_guard<std::mutex> lock(registry().mutex);
  CUstream_st*& stream = registry().default_stream[device];
  if (!stream) stream = create(device, 0, 0);
  return stream;
}

bool is_busy(cudaStream_t stream) { return stream_of(stream)->busy(); }

int device_of(cudaStream_t stream) { return stream_of(stream)->device; }

void synchronize_device(int device) {
  std::vector<std::shared_ptr<CUstream_st>> all;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (auto& stream : registry().streams)
      if (stream->device == device) all.push_back(stream);
  }
  for (auto& stream : all) stream->synchronize();
}

cudaError_t enqueue(cudaStream_t stream, Kind kind, Run run) {
  return enqueue_launch(stream, {kind, [run = std::move(run)] { return run; }});
}

cudaError_t enqueue_launch(cudaStream_t handle, Piece piece) {
  CUstream_st* stream = stream_of(handle);
  cudaError_t error = cudaSuccess;
  if (!add_to_capture(stream, piece, &error)) stream->push({{piece.kind, piece.launch()}});
  return error;
}

cudaError_t enqueue_graph(cudaStream_t handle, const Graph& graph) {
  CUstream_st* stream = stream_of(handle);
  if (is_capturing(handle)) {
    for (auto& piece : graph.pieces)
      if (cudaError_t error = enqueue_launch(handle, piece)) return error;
    return cudaSuccess;
  }
  std::vector<Queued> launch;
  for (auto& piece : graph.pieces) launch.push_back({piece.kind, piece.launch()});
  stream->push(std::move(launch));
  return cudaSuccess;
}

}  // namespace emulated

using namespace emulated;

CUstream_st::CUstream_st(int device, unsigned flags, int priority)
    : device(device), flags(flags), priority(priority), id(next_id++) {}

void CUstream_st::push(std::vector<Queued> launch) {
  std::unique_lock<std::mutex> lock(mutex_);
  // The hardware's queue of launches is bounded (about a thousand); a launch into a full one blocks its thread.
  progress_.wait(lock, [&] { return queue_.size() < settings().cuda_queue; });
  pushed_ += launch.size();
  for (auto& piece : launch) queue_.push_back(std::move(piece));
  if (!started_) {
    started_ = true;
    std::thread([self = shared_from_this()] { self->serve(); }).detach();
  }
  work_.notify_one();
}

void CUstream_st::serve() {
  pthread_setname_np(pthread_self(), "emulated-stream");
  cudaSetDevice(device);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) break;
    Queued next = std::move(queue_.front());
    queue_.pop_front();
    progress_.notify_all();
    lock.unlock();
    execute(next);
    next.run = nullptr;  // what it holds is freed before the work counts as done
    lock.lock();
    done_++;
    progress_.notify_all();
  }
  lock.unlock();
  std::lock_guard<std::mutex> all(registry().mutex);
  registry().streams.erase(shared_from_this());
}

void CUstream_st::execute(Queued& next) {
  if (next.kind != Kind::order && !device_error(device)) {
    if (falls_due(settings().cuda_error_at)) break_device(device, static_cast<cudaError_t>(settings().cuda_error.load()));
    if (falls_due(settings().cuda_endless_kernel_at))
      while (device_sleep(device, 3600)) continue;
  }
  // Work that a broken device has not begun is dropped; what orders streams still happens, so that nobody waits forever,
  // and collectives look for themselves.
  if (next.kind == Kind::kernel && device_error(device)) return;
  auto start = Clock::now();
  next.run();
  double speed = settings().cuda_speed[device];
  if (next.kind == Kind::kernel && speed < 1)
    device_sleep(device, std::chrono::duration<double>(Clock::now() - start).count() * (1 / speed - 1));
}

bool CUstream_st::busy() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ != pushed_;
}

void CUstream_st::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  auto until = pushed_;
  progress_.wait(lock, [&] { return done_ >= until; });
}

void CUstream_st::close() {
  std::unique_lock<std::mutex> lock(mutex_);
  closing_ = true;
  if (started_) {
    work_.notify_one();
    return;
  }
  lock.unlock();
  std::lock_guard<std::mutex> all(registry().mutex);
  registry().streams.erase(shared_from_this());
}

CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  ENTER();
  std::lock_guard<std::mutex> lock(registry().mutex);
  *stream = create(current_device(), flags, priority);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

// Returns at once; the stream goes when its work is done (CUDA Runtime API, cudaStreamDestroy).
CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  ENTER();
  if (reinterpret_cast<uintptr_t>(stream) <= 2) return fail(cudaErrorInvalidResourceHandle);
  stream->close();
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER();
  CUstream_st* stream = stream_of(handle);
  if (cudaError_t refused = unsafe_call(stream)) return fail(refused);
  return stream->busy() ? fail(cudaErrorNotReady) : cudaSuccess;
}
CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ENTER();
  CUstream_st* stream = stream_of(handle);
  if (cudaError_t refused = unsafe_call(stream)) return fail(refused);
  stream->synchronize();
  return entry();
}
CUDA_API cudaError_t cudaDeviceSynchronize() {
  ENTER();
  if (cudaError_t refused = unsafe_call()) return fail(refused);
  synchronize_device(current_device());
  return entry();
}
CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER();
  return enqueue(stream, Kind::order, [=] { function(data); });
}
CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  ENTER();
  int device = device_of(stream);
  return enqueue(stream, Kind::order, [=] { function(stream, device_error(device), data); });
}
