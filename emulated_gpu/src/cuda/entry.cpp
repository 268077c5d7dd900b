// Errors: the last one of each thread, those of a device that last, and CUDA in a forked process.
#include "entry.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>

namespace emulated {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;

std::atomic<pid_t> used_by{0};
std::atomic<int> broken[max_devices];

struct Waiting {
  std::mutex mutex;
  std::condition_variable changed;
};
Waiting& waiting() {
  static Waiting* only = new Waiting;
  return *only;
}

const char* name_of(cudaError_t error) {
  switch (error) {
#define NAME(error) \
  case error:       \
    return #error
    NAME(cudaSuccess);
    NAME(cudaErrorInvalidValue);
    NAME(cudaErrorMemoryAllocation);
    NAME(cudaErrorInitializationError);
    NAME(cudaErrorNoDevice);
    NAME(cudaErrorInvalidDevice);
    NAME(cudaErrorECCUncorrectable);
    NAME(cudaErrorNvlinkUncorrectable);
    NAME(cudaErrorContained);
    NAME(cudaErrorInvalidResourceHandle);
    NAME(cudaErrorIllegalState);
    NAME(cudaErrorSymbolNotFound);
    NAME(cudaErrorNotReady);
    NAME(cudaErrorIllegalAddress);
    NAME(cudaErrorPeerAccessAlreadyEnabled);
    NAME(cudaErrorContextIsDestroyed);
    NAME(cudaErrorAssert);
    NAME(cudaErrorHardwareStackError);
    NAME(cudaErrorLaunchFailure);
    NAME(cudaErrorNotSupported);
    NAME(cudaErrorStreamCaptureUnsupported);
    NAME(cudaErrorStreamCaptureInvalidated);
    NAME(cudaErrorStreamCaptureMerge);
    NAME(cudaErrorStreamCaptureUnmatched);
    NAME(cudaErrorStreamCaptureUnjoined);
    NAME(cudaErrorStreamCaptureIsolation);
    NAME(cudaErrorCapturedEvent);
    NAME(cudaErrorStreamCaptureWrongThread);
    NAME(cudaErrorUnknown);
#undef NAME
  }
  return "unrecognized error code";
}

// The wording is the CUDA runtime's: programs and people look for it in logs.
const char* text_of(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInitializationError: return "initialization error";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNvlinkUncorrectable: return "uncorrectable NVLink error detected during the execution";
    case cudaErrorContained: return "Invalid access of peer GPU memory over nvlink or a hardware error";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorSymbolNotFound: return "named symbol not found";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorPeerAccessAlreadyEnabled: return "peer access is already enabled";
    case cudaErrorContextIsDestroyed: return "context is destroyed";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorHardwareStackError: return "hardware stack error";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched: return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorStreamCaptureWrongThread: return "attempt to terminate a thread-local capture sequence from another thread";
    case cudaErrorUnknown: return "unknown error";
  }
  return "unrecognized error code";
}

}  // namespace

// CUDA contexts do not survive fork: calls in the child fail with "initialization error" ("CUDA C++ Programming Guide",
// section "Multi-process"; torch raises "Cannot re-initialize CUDA in forked subprocess" for the same reason).
bool forked() {
  pid_t me = getpid(), first = 0;
  return !used_by.compare_exchange_strong(first, me) && first != me;
}

int current_device() { return device_of_thread; }

int device_count() { return static_cast<int>(settings().gpus); }

cudaError_t device_error(int device) {
  // A device that has left the bus (Xid 79) answers every call with an error, without any work having been launched.
  if (settings().cuda_lost > 0 && broken[device] == cudaSuccess) break_device(device, cudaErrorUnknown);
  return static_cast<cudaError_t>(broken[device].load());
}

void break_device(int device, cudaError_t error) {
  int none = cudaSuccess;
  if (!broken[device].compare_exchange_strong(none, error)) return;
  fprintf(stderr, "emulated GPU %d: %s (error %d); every call on it fails from now on\n", device, text_of(error), error);
  { std::lock_guard<std::mutex> lock(waiting().mutex); }
  waiting().changed.notify_all();
}

bool device_sleep(int device, double seconds) {
  using Clock = std::chrono::steady_clock;
  auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  while (Clock::now() < until) {
    if (device_error(device)) return false;
    // In steps, because a device can also be lost by a setting, which wakes nobody.
    auto step = Clock::now() + std::chrono::milliseconds(50);
    std::unique_lock<std::mutex> lock(waiting().mutex);
    waiting().changed.wait_until(lock, std::min(until, step));
  }
  return !device_error(device);
}

cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}

cudaError_t entry() {
  if (forked()) return fail(cudaErrorInitializationError);
  // "This leaves the process in an inconsistent state and any further CUDA work will return the same error" (CUDA
  // Runtime API, cudaErrorIllegalAddress and the others of its kind).
  if (cudaError_t error = device_error(device_of_thread)) return fail(error);
  return cudaSuccess;
}

}  // namespace emulated

using namespace emulated;

CUDA_API cudaError_t cudaGetDevice(int* device) {
  *device = device_of_thread;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaSetDevice(int device) {
  if (forked()) return fail(cudaErrorInitializationError);
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  device_of_thread = device;
  return device_error(device) ? fail(device_error(device)) : cudaSuccess;
}
CUDA_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (forked()) return fail(cudaErrorInitializationError);
  *count = device_count();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

// An error of a device stays: cudaGetLastError resets only those of calls.
CUDA_API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  if (cudaError_t lasting = forked() ? cudaSuccess : device_error(device_of_thread)) return lasting;
  return error;
}
CUDA_API cudaError_t cudaPeekAtLastError() {
  if (cudaError_t lasting = forked() ? cudaSuccess : device_error(device_of_thread)) return lasting;
  return last_error;
}
CUDA_API const char* cudaGetErrorString(cudaError_t error) { return text_of(error); }
CUDA_API const char* cudaGetErrorName(cudaError_t error) { return name_of(error); }
