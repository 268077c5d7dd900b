// Functions of the driver by name, as the runtime hands them out.
#include <dlfcn.h>

#include <cstdio>

#include "entry.h"

using namespace emulated;

CUDA_API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, name) : nullptr;
  bool known = *function != nullptr;
  if (driver && !known) *function = dlsym(driver, "emulated_driver_unsupported");
  if (settings().cuda_verbose > 0)
    fprintf(stderr, "emulated GPU: %s of the driver is %s\n", name, known ? "emulated" : "not emulated");
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : fail(cudaErrorSymbolNotFound);
}
CUDA_API cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, EMULATED_CUDA_VERSION, flags, result);
}
