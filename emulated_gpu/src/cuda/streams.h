// A stream is a queue of work and the thread that does it, one piece after the other.
//
// "A stream is a sequence of operations that execute in issue-order on the GPU" (CUDA C++ Programming Guide, section
// "Streams"). Work of different streams runs concurrently unless events order it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "entry.h"

namespace emulated {

enum class Kind {
  kernel,      // has a duration on the device: counts for the faults, and is slower on a slow device
  collective,  // counts for the faults; its speed is that of the links
  order,       // events, waits and functions of the host
};

using Run = std::function<void()>;
// Called on the host at each launch (for a captured piece: at each launch of its graph); returns what the stream runs.
using Launch = std::function<Run()>;

struct Piece {
  Kind kind;
  Launch launch;
};

struct Capture;  // graphs.h
struct Graph;

struct Queued {
  Kind kind;
  Run run;
};

// One recording of an event: set when the stream comes to it.
class EMULATED_EXPORT Mark {
 public:
  void set();
  void wait();
  bool is_set();
  std::chrono::steady_clock::time_point at();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::chrono::steady_clock::time_point at_;
};

// Puts a piece of work at the end of a stream, or into the graph that the stream is capturing.
// Blocks while the stream's queue is full, as a launch on a GPU does.
EMULATED_EXPORT cudaError_t enqueue(cudaStream_t stream, Kind kind, Run run);
EMULATED_EXPORT cudaError_t enqueue_launch(cudaStream_t stream, Piece piece);

// Puts all pieces of a graph on a stream as one launch.
cudaError_t enqueue_graph(cudaStream_t stream, const Graph& graph);

// Whether a stream has work that is not done.
EMULATED_EXPORT bool is_busy(cudaStream_t stream);

// The device of a stream; the null stream is that of the calling thread's current device.
EMULATED_EXPORT int device_of(cudaStream_t stream);

// Waits until everything that was queued before on any stream of the device is done, or the device broke.
void synchronize_device(int device);

// The stream behind a handle: 0, 1 (legacy) and 2 (per thread) are the default stream of the current device.
CUstream_st* stream_of(cudaStream_t handle);

}  // namespace emulated

struct CUstream_st : std::enable_shared_from_this<CUstream_st> {
  CUstream_st(int device, unsigned flags, int priority);

  void push(std::vector<emulated::Queued> launch);
  bool busy();
  void synchronize();
  void close();  // the thread ends when the queue is empty

  const int device;
  const unsigned flags;
  const int priority;
  const unsigned long long id;

  std::shared_ptr<emulated::Capture> capture;  // guarded by the lock of all captures

 private:
  void serve();
  void execute(emulated::Queued& next);

  std::mutex mutex_;
  std::condition_variable work_, progress_;
  std::deque<emulated::Queued> queue_;
  unsigned long long pushed_ = 0, done_ = 0;
  bool started_ = false, closing_ = false;
};
