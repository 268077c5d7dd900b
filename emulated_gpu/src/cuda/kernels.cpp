// Kernels that torch was compiled with: registered by name, and refused by name when one is launched.
//
// torch's operations do not come here (aten/operations.cpp has the CPU compute them); the one kernel that is emulated
// is that of torch.cuda._sleep.
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <unordered_map>

#include "streams.h"

namespace emulated {
namespace {

constexpr double clock_hertz = 1.98e9;  // as cudaDevAttrClockRate says

struct Kernels {
  std::mutex mutex;
  std::unordered_map<const void*, const char*> names;
  std::set<std::string> refused;
};
Kernels& kernels() {
  static Kernels* only = new Kernels;
  return *only;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace
}  // namespace emulated

using namespace emulated;

// What the compiler's code calls for each embedded binary and around each <<<...>>>.
CUDA_API void** __cudaRegisterFatBinary(void*) { return new void*[1](); }
CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
CUDA_API void __cudaUnregisterFatBinary(void** binary) { delete[] binary; }
CUDA_API char __cudaInitModule(void**) { return 0; }
CUDA_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
CUDA_API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
  std::lock_guard<std::mutex> lock(kernels().mutex);
  kernels().names.emplace(host, name);
}
CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}
CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

CUDA_API cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  ENTER();
  std::string name = "(unknown)";
  {
    std::lock_guard<std::mutex> lock(kernels().mutex);
    auto found = kernels().names.find(function);
    if (found != kernels().names.end()) name = found->second;
  }
  if (name.find("spin_kernel") != std::string::npos) {  // aten/src/ATen/cuda/Sleep.cu: waits for a number of cycles
    double seconds = *static_cast<int64_t*>(arguments[0]) / clock_hertz;
    int device = device_of(stream);
    return enqueue(stream, Kind::kernel, [=] { device_sleep(device, seconds); });
  }
  std::lock_guard<std::mutex> lock(kernels().mutex);
  if (kernels().refused.insert(name).second)
    fprintf(stderr,
            "emulated GPU: the kernel %s is not emulated; compute this on the CPU, or add it to "
            "emulated_gpu/src/cuda/kernels.cpp\n",
            name.c_str());
  return fail(cudaErrorNotSupported);
}
CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                                        cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
CUDA_API cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                                                 size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}
CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launch, const void* function, void** arguments) {
  return cudaLaunchKernel(function, launch->gridDim, launch->blockDim, arguments, launch->dynamicSmemBytes,
                          launch->stream);
}

CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                            unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
CUDA_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
CUDA_API cudaError_t cudaProfilerStop() { return cudaSuccess; }
