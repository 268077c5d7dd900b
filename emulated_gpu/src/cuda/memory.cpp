// Memory: that of a device is memory of the host, told apart by a table; copies happen in the order of a stream.
#include <sys/mman.h>

#include <cstring>

#include "graphs.h"
#include "memory.h"

namespace emulated {
namespace {

struct Block {
  size_t bytes;
  cudaMemoryType type;
  int device;
};
struct Table {
  std::mutex mutex;
  std::map<uintptr_t, Block> blocks;
  size_t used[max_devices] = {};
};
Table& table() {
  static Table* only = new Table;
  return *only;
}
size_t capacity() { return static_cast<size_t>(settings().cuda_memory_mb) << 20; }

cudaError_t allocate(void** pointer, size_t bytes, cudaMemoryType type) {
  *pointer = nullptr;
  if (!bytes) return cudaSuccess;
  int device = current_device();
  size_t size = (bytes + 511) & ~size_t(511);
  std::lock_guard<std::mutex> lock(table().mutex);
  if (type == cudaMemoryTypeDevice &&
      (used_up(settings().cuda_out_of_memory_at, 1) || table().used[device] + size > capacity()))
    return fail(cudaErrorMemoryAllocation);
  // Pages are taken when they are first written, so that a large cache of an allocator costs nothing.
  void* block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  table().blocks[reinterpret_cast<uintptr_t>(block)] = {size, type, device};
  if (type == cudaMemoryTypeDevice) table().used[device] += size;
  *pointer = block;
  return cudaSuccess;
}

cudaError_t release(void* pointer, cudaMemoryType type) {
  Block block;
  {
    std::lock_guard<std::mutex> lock(table().mutex);
    auto found = table().blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == table().blocks.end() || found->second.type != type) return fail(cudaErrorInvalidValue);
    block = found->second;
    table().blocks.erase(found);
    if (type == cudaMemoryTypeDevice) table().used[block.device] -= block.bytes;
  }
  munmap(pointer, block.bytes);
  return cudaSuccess;
}

const Block* find(const void* pointer, uintptr_t* begin) {  // with the table's mutex held
  auto at = reinterpret_cast<uintptr_t>(pointer);
  auto next = table().blocks.upper_bound(at);
  if (next == table().blocks.begin()) return nullptr;
  --next;
  if (at >= next->first + next->second.bytes) return nullptr;
  if (begin) *begin = next->first;
  return &next->second;
}
bool is_pageable(const void* pointer) {
  std::lock_guard<std::mutex> lock(table().mutex);
  return !find(pointer, nullptr);
}

// Waits for the device before memory of it is freed ("cudaFree ... implicitly synchronizes": CUDA C++ Programming Guide,
// section "Stream Ordered Memory Allocator").
cudaError_t free_synchronously(void* pointer, cudaMemoryType type) {
  ENTER();
  if (cudaError_t refused = unsafe_call()) return fail(refused);
  if (!pointer) return cudaSuccess;
  synchronize_device(current_device());
  ENTER();
  return release(pointer, type);
}

cudaError_t allocate_unsafely(void** pointer, size_t bytes, cudaMemoryType type) {
  ENTER();
  if (cudaError_t refused = unsafe_call()) return fail(refused);
  return allocate(pointer, bytes, type);
}

}  // namespace

bool address_range(const void* pointer, void** begin, size_t* bytes) {
  std::lock_guard<std::mutex> lock(table().mutex);
  uintptr_t at = 0;
  const Block* block = find(pointer, &at);
  if (!block) return false;
  if (begin) *begin = reinterpret_cast<void*>(at);
  if (bytes) *bytes = block->bytes;
  return true;
}

}  // namespace emulated

using namespace emulated;

CUDA_API cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  return allocate_unsafely(pointer, bytes, cudaMemoryTypeDevice);
}
CUDA_API cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  return allocate_unsafely(pointer, bytes, cudaMemoryTypeHost);
}
CUDA_API cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
CUDA_API cudaError_t cudaFree(void* pointer) { return free_synchronously(pointer, cudaMemoryTypeDevice); }
CUDA_API cudaError_t cudaFreeHost(void* pointer) { return free_synchronously(pointer, cudaMemoryTypeHost); }

// Stream-ordered: freed when the stream comes to it, while others run on.
CUDA_API cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  ENTER();
  return allocate(pointer, bytes, cudaMemoryTypeDevice);
}
CUDA_API cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  ENTER();
  return enqueue(stream, Kind::order, [pointer] { release(pointer, cudaMemoryTypeDevice); });
}

CUDA_API cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  ENTER();
  std::lock_guard<std::mutex> lock(table().mutex);
  table().blocks[reinterpret_cast<uintptr_t>(pointer)] = {bytes, cudaMemoryTypeHost, current_device()};
  return cudaSuccess;
}
CUDA_API cudaError_t cudaHostUnregister(void* pointer) {
  ENTER();
  std::lock_guard<std::mutex> lock(table().mutex);
  return table().blocks.erase(reinterpret_cast<uintptr_t>(pointer)) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
CUDA_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER();
  std::lock_guard<std::mutex> lock(table().mutex);
  *total = capacity();
  *free = *total - std::min(*total, table().used[current_device()]);
  return cudaSuccess;
}
CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  ENTER();
  memset(attributes, 0, sizeof *attributes);
  std::lock_guard<std::mutex> lock(table().mutex);
  const Block* block = find(pointer, nullptr);
  attributes->type = block ? block->type : cudaMemoryTypeUnregistered;
  attributes->device = block ? block->device : -2;  // cudaInvalidDeviceId
  attributes->devicePointer = block ? const_cast<void*>(pointer) : nullptr;
  attributes->hostPointer = block && block->type == cudaMemoryTypeDevice ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}

// CUDA Runtime API, section "API synchronization behavior": from pageable memory of the host, the bytes are staged before
// the call returns and the device's memory is written in stream order; to pageable memory, the call returns when all
// is copied; between device and pinned memory it is asynchronous.
CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  ENTER();
  bool capturing = is_capturing(handle);
  if (!capturing && is_pageable(from)) {
    auto first = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(first, first + bytes);
    return enqueue(handle, Kind::kernel, [=] { memcpy(to, staged->data(), bytes); });
  }
  if (cudaError_t error = enqueue(handle, Kind::kernel, [=] { memmove(to, from, bytes); })) return error;
  if (!capturing && is_pageable(to)) stream_of(handle)->synchronize();
  return entry();
}
CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  ENTER();
  if (cudaError_t refused = unsafe_call()) return fail(refused);
  if (cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr)) return error;
  stream_of(nullptr)->synchronize();
  return entry();
}
CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
CUDA_API cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                       size_t height, cudaMemcpyKind, cudaStream_t handle) {
  ENTER();
  cudaError_t error = enqueue(handle, Kind::kernel, [=] {
    for (size_t row = 0; row < height; row++)
      memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  });
  if (error) return error;
  if (!is_capturing(handle) && (is_pageable(from) || is_pageable(to))) stream_of(handle)->synchronize();
  return entry();
}
CUDA_API cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  ENTER();
  return enqueue(stream, Kind::kernel, [=] { memset(pointer, value, bytes); });
}
CUDA_API cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  ENTER();
  if (cudaError_t refused = unsafe_call()) return fail(refused);
  return cudaMemsetAsync(pointer, value, bytes, nullptr);
}
