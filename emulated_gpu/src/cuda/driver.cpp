// The functions of the CUDA driver that torch asks for directly (libcuda.so.1), most of them by name at run time.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "entry.h"
#include "memory.h"

// CUDA Driver API, enum CUresult and enum CUpointer_attribute.
enum { driver_success = 0, driver_invalid_value = 1, driver_not_supported = 801 };
enum { attribute_memory_type = 2, attribute_buffer_id = 7 };
enum { memory_type_device = 2 };

namespace {
void* context_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(0x1000 + device)); }
}  // namespace

CUDA_API int cuInit(unsigned) { return driver_success; }
CUDA_API int cuDriverGetVersion(int* version) {
  *version = EMULATED_CUDA_VERSION;
  return driver_success;
}
CUDA_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return driver_success;
}
CUDA_API int cuDeviceGetCount(int* count) { return cudaGetDeviceCount(count); }
CUDA_API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  return cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
}
CUDA_API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return driver_success;
}
CUDA_API int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context_of(device);
  return driver_success;
}
CUDA_API int cuCtxGetCurrent(void** context) {
  int device = 0;
  cudaGetDevice(&device);
  *context = context_of(device);
  return driver_success;
}
CUDA_API int cuCtxSetCurrent(void*) { return driver_success; }
CUDA_API int cuCtxPushCurrent(void*) { return driver_success; }
CUDA_API int cuCtxPopCurrent(void**) { return driver_success; }
CUDA_API int cuGetErrorString(int error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));  // the runtime's and the driver's numbers agree
  return driver_success;
}
CUDA_API int cuMemGetAddressRange(void** begin, size_t* bytes, const void* pointer) {
  return emulated::address_range(pointer, begin, bytes) ? driver_success : driver_invalid_value;
}
CUDA_API int cuPointerGetAttribute(void* value, int attribute, const void* pointer) {
  void* begin;
  if (!emulated::address_range(pointer, &begin, nullptr)) return driver_invalid_value;
  if (attribute == attribute_memory_type) {
    *static_cast<unsigned*>(value) = memory_type_device;
  } else if (attribute == attribute_buffer_id) {
    *static_cast<uint64_t*>(value) = reinterpret_cast<uint64_t>(begin);
  } else {
    return driver_not_supported;
  }
  return driver_success;
}

// Messages of the driver, of which the emulated one has none (CUDA 12.9).
CUDA_API int cuLogsRegisterCallback(void*, void*, void** registration) {
  if (registration) *registration = nullptr;
  return driver_success;
}
CUDA_API int cuLogsUnregisterCallback(void*) { return driver_success; }

// What torch gets for a function of the driver that is not here.
CUDA_API int emulated_driver_unsupported() {
  static std::atomic<bool> told{false};
  if (!told.exchange(true))
    fprintf(stderr, "emulated GPU: a function of the CUDA driver is not emulated; EMULATED_CUDA_VERBOSE=1 names those asked for\n");
  return driver_not_supported;
}
