// What every call of the runtime starts and ends with: the process that may use CUDA, and errors of calls and devices.
#pragma once

#include <cuda_runtime_api.h>

#include "../settings.h"

#define CUDA_API extern "C" EMULATED_EXPORT

// Returns from the calling entry point if CUDA cannot be used here any more.
#define ENTER()                                              \
  do {                                                       \
    if (cudaError_t refused = emulated::entry()) return refused; \
  } while (0)

namespace emulated {

// Success, or why no call can succeed: the process was forked after CUDA was used in its parent, or the current
// device is in an error that lasts.
cudaError_t entry();

// Remembers an error of this thread's call for cudaGetLastError and returns it.
cudaError_t fail(cudaError_t error);

bool forked();

EMULATED_EXPORT int current_device();
int device_count();

// The error that a device is in until the process ends ("sticky"), or cudaSuccess.
EMULATED_EXPORT cudaError_t device_error(int device);

// Puts a device into such an error. What runs on it ends, what is queued on it never runs.
EMULATED_EXPORT void break_device(int device, cudaError_t error);

// Sleeps for a time on behalf of a device; false if the device broke meanwhile.
bool device_sleep(int device, double seconds);

}  // namespace emulated
