// What the devices say of themselves: an H100 with "emulated" in its name.
#include <cstdio>
#include <cstring>

#include "entry.h"

using namespace emulated;

CUDA_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = EMULATED_CUDA_VERSION;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = EMULATED_CUDA_VERSION;
  return cudaSuccess;
}

CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  ENTER();
  if (device < 0 || device >= device_count()) return fail(cudaErrorInvalidDevice);
  cudaDeviceProp& p = *properties;
  memset(&p, 0, sizeof p);
  // No name of a product: nobody may take a log with it for that of a GPU.
  snprintf(p.name, sizeof p.name, "emulated GPU");
  snprintf(p.uuid.bytes, sizeof p.uuid.bytes, "emulated%07d", device);
  p.totalGlobalMem = static_cast<size_t>(settings().cuda_memory_mb) << 20;
  p.major = 9;
  p.warpSize = 32;
  p.multiProcessorCount = 132;
  p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxThreadsPerMultiProcessor = 2048;
  p.maxBlocksPerMultiProcessor = 32;
  p.maxGridSize[0] = p.memPitch = 2147483647;
  p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.regsPerBlock = p.regsPerMultiprocessor = p.totalConstMem = 65536;
  p.sharedMemPerBlock = 49152;
  p.sharedMemPerBlockOptin = 232448;
  p.sharedMemPerMultiprocessor = 233472;
  p.reservedSharedMemPerBlock = 1024;
  p.l2CacheSize = 50 << 20;
  p.memoryBusWidth = 5120;
  p.textureAlignment = 512;
  p.pciBusID = device + 1;
  p.asyncEngineCount = 3;
  p.canMapHostMemory = p.concurrentKernels = p.ECCEnabled = p.unifiedAddressing = 1;
  p.streamPrioritiesSupported = p.managedMemory = p.concurrentManagedAccess = p.cooperativeLaunch = 1;
  p.memoryPoolsSupported = 1;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* properties, int device) {  // its name in CUDA 12
  return cudaGetDeviceProperties(properties, device);
}

CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp p;
  if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
  *value = 0;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
  }
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02X:00.0", device + 1);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
