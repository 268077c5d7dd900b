// Communicators: how they are made, split, shrunk and ended, and what can be asked of them.
#include "communicator.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "../cuda/entry.h"
#include "group.h"
#include "log.h"

// Handles are never freed, so that the use of one after its end can be told. A real one is freed memory then: the call
// may answer "corrupted comm object detected" or end the process.
struct ncclComm {
  emulated::CommunicatorPointer communicator;
  std::atomic<bool> freed{false};
};

namespace emulated {
namespace {

// "A human-readable message of the last error that occurred"; of the process, not of a communicator (src/init.cc).
struct LastError {
  std::mutex mutex;
  std::string text;
};
LastError& last_error() {
  static LastError* only = new LastError;  // never destroyed: threads may fail while the process ends
  return *only;
}

constexpr const char* function_names[functions] = {"Broadcast", "Reduce",   "AllGather", "ReduceScatter",
                                                   "AllReduce", "AlltoAll", "Send",      "Recv"};

// --- the bootstrap: ranks find each other through the process that made the unique id ---

struct UniqueId {
  uint64_t magic;
  uint16_t port;
};
static_assert(sizeof(UniqueId) <= sizeof(ncclUniqueId));

// Where a rank is found.
struct Address {
  uint16_t port = 0;  // on which it listens for the other ranks
  Peer peer;
  uint64_t host = 0;
};

// By what NCCL tells hosts apart (src/misc/utils.cc, getHostHash): here all are one, but for NCCL_HOSTID.
uint64_t host_hash() {
  const char* id = std::getenv("NCCL_HOSTID");
  return std::hash<std::string>()(id ? id : "");
}

// What a rank says when it connects: to the root of the bootstrap, then to each rank below it.
struct Greeting {
  uint64_t magic;
  int32_t rank, size;
  Address address;  // for the root
  uint16_t way;     // which of the links this is; for a rank
};

// Collects where all ranks listen, then tells all of them. Ends with that.
void serve_bootstrap(int listening, uint64_t magic) {
  Interrupt never;
  std::vector<int> sockets;
  std::vector<Address> addresses;
  size_t present = 0;
  while (sockets.empty() || present < sockets.size()) {
    int accepted = accept_connection(never, listening);
    Greeting greeting;
    if (receive_all(never, accepted, &greeting, sizeof greeting) != End::done || greeting.magic != magic) {
      close(accepted);
      continue;
    }
    if (sockets.empty()) {
      sockets.assign(greeting.size, -1);
      addresses.resize(greeting.size);
    }
    if (sockets[greeting.rank] >= 0)
      close(sockets[greeting.rank]);
    else
      present++;
    sockets[greeting.rank] = accepted;
    addresses[greeting.rank] = greeting.address;
  }
  for (int socket : sockets) {
    send_all(never, socket, addresses.data(), sizeof(Address) * addresses.size());
    close(socket);
  }
  close(listening);
}

// Connects a rank to all others: to those below it, and then those above it to this one. A peer that cannot be reached
// is an ncclRemoteError, an abort meanwhile an ncclInternalError (NCCL 2.30.7, src/misc/socket.cc).
ncclResult_t connect_ranks(Communicator& own, int listening, uint64_t magic, const std::vector<Address>& addresses) {
  own.links.open(own.rank, own.size);
  {
    std::lock_guard<std::mutex> lock(own.mutex);
    own.peers.clear();
    for (auto& address : addresses) own.peers.push_back(address.peer);
  }
  if (falls_due(settings().nccl_connect_fails_at))
    return failed(&own, ncclRemoteError, "a connection to a peer failed");
  for (int peer = 0; peer < own.size; peer++) {  // src/init.cc, initTransportsRank
    const Address &mine = addresses[own.rank], &other = addresses[peer];
    if (peer != own.rank && other.host == mine.host && other.peer.device == mine.peer.device)
      return failed(&own, ncclInvalidUsage,
                    "Duplicate GPU detected : rank " + std::to_string(own.rank) + " and rank " + std::to_string(peer) +
                        " both on CUDA device " + std::to_string(mine.peer.device));
  }
  Interrupt& interrupt = own.setup;
  for (int peer = 0; peer < own.rank; peer++)
    for (int way = 0; way < Links::ways; way++) {
      int connected = connect_to_loopback(addresses[peer].port);
      Greeting greeting{magic, own.rank, own.size, {}, static_cast<uint16_t>(way)};
      if (connected < 0 || send_all(interrupt, connected, &greeting, sizeof greeting) != End::done)
        return failed(&own, ncclRemoteError, "rank " + std::to_string(peer) + " went away while it was connected");
      own.links.sockets[way][peer] = connected;
    }
  for (int left = Links::ways * (own.size - 1 - own.rank); left;) {
    int accepted = accept_connection(interrupt, listening);
    if (accepted < 0) return failed(&own, ncclInternalError, "aborted while ranks were connected");
    Greeting greeting;
    if (receive_all(interrupt, accepted, &greeting, sizeof greeting) != End::done || greeting.magic != magic) {
      close(accepted);
      continue;
    }
    own.links.sockets[greeting.way][greeting.rank] = accepted;
    left--;
  }
  return ncclSuccess;
}

ncclResult_t initialize(const CommunicatorPointer& made, const UniqueId& id) {
  Communicator& own = *made;
  own.hash = id.magic;
  uint16_t port = 0;
  int listening = listen_on_loopback(&port), root = connect_to_loopback(id.port);
  if (root < 0) {
    close(listening);
    return failed(&own, ncclRemoteError, "the process that made the unique id is gone");
  }
  Interrupt& interrupt = own.setup;
  Greeting greeting{id.magic, own.rank, own.size, {port, start_ras(own.device), host_hash()}, 0};
  std::vector<Address> addresses(own.size);
  End end = send_all(interrupt, root, &greeting, sizeof greeting);
  if (end == End::done) end = receive_all(interrupt, root, addresses.data(), sizeof(Address) * addresses.size());
  close(root);
  ncclResult_t result = end == End::aborted ? failed(&own, ncclInternalError, "aborted while waiting for all ranks")
                        : end != End::done  ? failed(&own, ncclRemoteError, "the process that made the unique id ended")
                                            : connect_ranks(own, listening, id.magic, addresses);
  close(listening);
  own.ready = result == ncclSuccess;
  if (own.ready) add_to_ras(made);
  log(Level::info, own.device,
      "ncclCommInitRank rank " + std::to_string(own.rank) + " nranks " + std::to_string(own.size) + " result " +
          std::to_string(result));
  return result;
}

// --- communicators made from others ---

// What the ranks of a parent tell each other.
struct Card {
  int32_t color, key;
  uint64_t magic, children;
  Address address;
};

CommunicatorPointer make(int rank, int size, const ncclConfig_t* config, const Communicator* parent) {
  int device;
  cudaGetDevice(&device);
  auto made = std::make_shared<Communicator>(rank, size, parent ? parent->device : device);
  made->blocking = config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking != 0
                   : parent && !config                                 ? parent->blocking
                                                                       : true;
  bool has_name = config && config->size > offsetof(ncclConfig_t, commName) && config->commName;
  made->name = has_name ? config->commName : "";
  return made;
}

uint64_t random_number() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

// Makes the communicator of those among `with` (ranks of the parent) that have the same color; null for no color.
ncclResult_t derive(const CommunicatorPointer& parent, const CommunicatorPointer& child, int color, int key,
                    const std::vector<int>& with, ncclComm_t* handle) {
  std::lock_guard<std::mutex> lock(parent->control_mutex);
  // Aborting the parent ends this too (childAbortFlag in NCCL).
  Interrupt& interrupt = parent->setup;
  uint16_t port = 0;
  int listening = listen_on_loopback(&port);
  std::vector<Card> cards(parent->size);
  cards[parent->rank] = {color, key, random_number(), parent->children++, {port, start_ras(parent->device), host_hash()}};
  auto gone = [&](int peer) {
    close(listening);
    return failed(parent.get(), parent->aborted ? ncclInternalError : ncclRemoteError,
                  "rank " + std::to_string(peer) + " did not come to the split of its communicator");
  };
  auto& sockets = parent->links.sockets[Links::control];
  for (int peer : with)
    if (peer != parent->rank && send_all(interrupt, sockets[peer], &cards[parent->rank], sizeof(Card)) != End::done)
      return gone(peer);
  for (int peer : with)
    if (peer != parent->rank && receive_all(interrupt, sockets[peer], &cards[peer], sizeof(Card)) != End::done)
      return gone(peer);
  if (color == NCCL_SPLIT_NOCOLOR) {
    close(listening);
    return ncclSuccess;
  }
  std::vector<int> members;
  for (int peer : with)
    if (cards[peer].color == color) members.push_back(peer);
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return cards[a].key < cards[b].key; });
  std::vector<Address> addresses;
  for (int member : members) addresses.push_back(cards[member].address);
  child->size = static_cast<int>(members.size());
  child->rank = static_cast<int>(std::find(members.begin(), members.end(), parent->rank) - members.begin());
  child->hash = cards[members[0]].magic;
  ncclResult_t result = connect_ranks(*child, listening, child->hash, addresses);
  close(listening);
  if (result != ncclSuccess) return result;
  child->ready = true;
  add_to_ras(child);
  // "*newcomm should be NCCL_COMM_NULL until comm split fully complete" (src/init.cc, ncclCommInitChildComm).
  *handle = new ncclComm{child};
  return ncclSuccess;
}

ncclResult_t make_child(const CommunicatorPointer& parent, int color, int key, std::vector<int> with,
                        ncclComm_t* handle, const ncclConfig_t* config) {
  *handle = nullptr;
  if (ncclResult_t result = ensure_ready(parent)) return refuse(result);
  CommunicatorPointer child = make(parent->rank, parent->size, config, parent.get());
  if (parent->name.size() && child->name.empty() && !config) child->name = parent->name;
  return submit(parent, [=] { return derive(parent, child, color, key, with, handle); });
}

std::vector<int> ranks_of(const Communicator& communicator) {
  std::vector<int> ranks;
  for (int rank = 0; rank < communicator.size; rank++) ranks.push_back(rank);
  return ranks;
}

// --- ending ---

// NCCL 2.30.7, src/init.cc, commDestroySync: waits for the communicator's stream, which is behind each of its kernels
// on whichever stream, and for the graphs that hold one ("keep polling until all graphs referencing us die").
ncclResult_t wait_for_the_end(Communicator& own) {
  std::unique_lock<std::mutex> lock(own.mutex);
  own.changed.wait(lock, [&] { return !own.launched && !own.graph_references; });
  return ncclSuccess;
}

ncclResult_t release(ncclComm_t handle) {
  Communicator& own = *handle->communicator;
  if (!own.finalized) wait_for_the_end(own);
  std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(settings().nccl_free_ms));
  remove_from_ras(&own);
  {
    std::lock_guard<std::mutex> lock(own.mutex);
    own.links.close();
  }
  handle->freed = true;
  return ncclSuccess;
}

}  // namespace

const char* name_of(Function function) { return function_names[function]; }

void Communicator::stop_operations() {
  links.interrupt.pull();
  {
    std::lock_guard<std::mutex> lock(mutex);
  }
  changed.notify_all();
}

void Communicator::wait_for_jobs() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return !jobs; });
}

void Communicator::wait_for_jobs_and_kernels() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return !jobs && !launched; });
}

ncclResult_t failed(const Communicator* communicator, ncclResult_t result, const std::string& why) {
  {
    std::lock_guard<std::mutex> lock(last_error().mutex);
    last_error().text = why;
  }
  log(Level::warn, communicator ? communicator->device : current_device(), why);
  return result;
}

// NCCL 2.30.7, src/misc/argcheck.cc, CommCheck.
ncclResult_t check(ncclComm_t handle, const char* call, CommunicatorPointer* found) {
  if (!handle) return failed(nullptr, ncclInvalidArgument, std::string(call) + ": comm argument is NULL");
  if (handle->freed) {
    static std::atomic<bool> told{false};
    if (!told.exchange(true))
      fprintf(stderr, "emulated NCCL: %s uses a communicator that was aborted or destroyed, which is freed memory\n",
              call);
    if (settings().nccl_crash_on_use_after_free > 0) __builtin_trap();
    return failed(nullptr, ncclInvalidArgument, std::string(call) + ": corrupted comm object detected");
  }
  *found = handle->communicator;
  return ncclSuccess;
}

ncclResult_t async_error(const Communicator& communicator) {
  int state = communicator.state;
  return static_cast<ncclResult_t>(state != ncclSuccess ? state : communicator.link_error.load());
}

ncclResult_t ensure_ready(const CommunicatorPointer& communicator) {
  if (communicator->aborted) return ncclSuccess;
  ncclResult_t state = async_error(*communicator);
  if (state != ncclInProgress) return state;
  return failed(communicator.get(), ncclInvalidArgument,
                "Attempt to use communicator before the previous operation returned ncclSuccess");
}

}  // namespace emulated

using namespace emulated;

#define FIND(handle, communicator)  \
  CommunicatorPointer communicator; \
  if (ncclResult_t wrong = check(handle, __func__, &communicator)) return refuse(wrong)

NCCL_FUNCTION ncclResult_t ncclGetUniqueId(ncclUniqueId* unique_id) {
  memset(unique_id, 0, sizeof *unique_id);
  UniqueId id{random_number(), 0};
  int listening = listen_on_loopback(&id.port);
  if (listening < 0) return failed(nullptr, ncclSystemError, "cannot listen on the loopback");
  memcpy(unique_id, &id, sizeof id);
  std::thread(serve_bootstrap, listening, id.magic).detach();
  return ncclSuccess;
}

NCCL_FUNCTION ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId unique_id, int rank,
                                                  ncclConfig_t* config) {
  *handle = nullptr;
  if (size < 1 || rank < 0 || rank >= size)
    return refuse(failed(nullptr, ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(size)));
  if (cudaFree(nullptr)) return refuse(failed(nullptr, ncclUnhandledCudaError, "the device is in an error"));
  CommunicatorPointer made = make(rank, size, config, nullptr);
  *handle = new ncclComm{made};
  UniqueId id;
  memcpy(&id, &unique_id, sizeof id);
  return submit(made, [=] { return initialize(made, id); });
}
NCCL_FUNCTION ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(handle, size, id, rank, nullptr);
}
NCCL_FUNCTION ncclResult_t ncclCommInitRankScalable(ncclComm_t* handle, int size, int rank, int, ncclUniqueId* ids,
                                                    ncclConfig_t* config) {
  return ncclCommInitRankConfig(handle, size, ids[0], rank, config);
}

NCCL_FUNCTION ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* child,
                                         ncclConfig_t* config) {
  FIND(handle, parent);
  return make_child(parent, color, key, ranks_of(*parent), child, config);
}

// NCCL_SHRINK_ABORT ends what the parent still runs first; the parent is of no more use then but to be ended.
NCCL_FUNCTION ncclResult_t ncclCommShrink(ncclComm_t handle, int* excluded, int number, ncclComm_t* child,
                                          ncclConfig_t* config, int flags) {
  FIND(handle, parent);
  if (number < 1 || std::count(excluded, excluded + number, parent->rank))
    return refuse(
        failed(parent.get(), ncclInvalidArgument, "ncclCommShrink without ranks to exclude, or by one of them"));
  if (flags & NCCL_SHRINK_ABORT) {
    parent->stop_operations();
    parent->wait_for_jobs_and_kernels();
  }
  std::vector<int> with;
  for (int rank : ranks_of(*parent))
    if (!std::count(excluded, excluded + number, rank)) with.push_back(rank);
  return make_child(parent, 0, parent->rank, with, child, config);
}

// As NCCL_SHRINK_ABORT, without a child; later operations are refused.
NCCL_FUNCTION ncclResult_t ncclCommRevoke(ncclComm_t handle, int flags) {
  FIND(handle, own);
  if (flags || own->finalized || own->revoked.exchange(true)) return refuse(ncclInvalidArgument);
  own->stop_operations();
  own->wait_for_jobs_and_kernels();
  own->finalized = true;
  own->state = ncclSuccess;
  return ncclSuccess;
}

// An abort breaks captures in mode "global", whatever the mode of the thread that asks for it: measured with NCCL 2.28.9
// on an H200. Which of its calls does is not known.
static void break_captures() {
  std::thread([] { cudaFree(nullptr); }).join();
}

// Sets the flag that ends what runs, at once and also within a group; then waits until all has ended, which within a
// group happens at its end, for all communicators together (src/init.cc, ncclCommAbort).
NCCL_FUNCTION ncclResult_t ncclCommAbort(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  FIND(handle, own);
  log(Level::info, own->device, "ncclCommAbort rank " + std::to_string(own->rank));
  own->aborted = true;
  own->setup.pull();
  own->stop_operations();
  break_captures();
  own->wait_for_jobs();
  return submit(
      own,
      [handle] {
        // As versions 2.18.1 and 2.25.1 do in some situations.
        std::this_thread::sleep_for(std::chrono::duration<double>(settings().nccl_abort_hangs_s));
        return release(handle);
      },
      true);
}

// Flushes what was launched, without ending it: waits for peers that do not come.
NCCL_FUNCTION ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  FIND(handle, own);
  if (ncclResult_t result = ensure_ready(own)) return refuse(result);
  if (own->finalized.exchange(true))
    return refuse(failed(own.get(), ncclInvalidArgument, "ncclCommFinalize was called before"));
  return submit(own, [own] { return wait_for_the_end(*own); });
}
NCCL_FUNCTION ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  if (!handle) return ncclSuccess;
  FIND(handle, own);
  if (ncclResult_t result = ensure_ready(own)) return refuse(result);
  own->destroyed = true;
  return submit(own, [handle] { return release(handle); }, true);
}

// --- questions ---

NCCL_FUNCTION ncclResult_t ncclGetVersion(int* version) {
  *version = EMULATED_NCCL_VERSION;
  return ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  CommunicatorPointer own;
  if (ncclResult_t wrong = check(handle, "ncclCommGetAsyncError", &own)) return wrong;  // *error stays as it was
  *error = async_error(*own);
  return ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  FIND(handle, own);
  if (ncclResult_t result = ensure_ready(own)) return result;
  *count = own->size;
  return ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  FIND(handle, own);
  if (ncclResult_t result = ensure_ready(own)) return result;
  *rank = own->rank;
  return ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  FIND(handle, own);
  if (ncclResult_t result = ensure_ready(own)) return result;
  *device = own->device;
  return ncclSuccess;
}

NCCL_FUNCTION const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {  // src/init.cc, ncclGetErrorString
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclTimeout:
      return "timeout";
  }
  return "unknown result code";
}
NCCL_FUNCTION const char* ncclGetLastError(ncclComm_t) {
  static thread_local std::string text;
  std::lock_guard<std::mutex> lock(last_error().mutex);
  text = last_error().text;
  return text.c_str();
}

// --- memory: nothing has to be registered with links of this kind ---

NCCL_FUNCTION ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return cudaMalloc(pointer, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) ? ncclUnhandledCudaError : ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclCommRegister(const ncclComm_t handle, void* memory, size_t, void** registration) {
  FIND(handle, own);
  *registration = memory;
  return ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclCommDeregister(const ncclComm_t handle, void*) {
  FIND(handle, own);
  return ncclSuccess;
}

NCCL_FUNCTION ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                                    ncclScalarResidence_t residence, ncclComm_t handle) {
  FIND(handle, own);
  if (ncclResult_t result = ensure_ready(own)) return result;
  Reduction reduction;
  if (residence == ncclScalarDevice) {
    reduction.factor_on_device = scalar;
    reduction.factor_type = type;
  } else {
    reduction.factor = scalar_value(scalar, type);
  }
  std::lock_guard<std::mutex> lock(own->mutex);
  own->reductions.push_back(reduction);
  *op = static_cast<ncclRedOp_t>(ncclNumOps + own->reductions.size() - 1);
  return ncclSuccess;
}
NCCL_FUNCTION ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t handle) {
  FIND(handle, own);
  return ncclSuccess;
}
