// A communicator: what one rank holds of it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <nccl.h>

#include "../settings.h"
#include "arithmetic.h"
#include "transport.h"

#define NCCL_FUNCTION extern "C" EMULATED_EXPORT

namespace emulated {

enum Function : uint32_t { broadcast, reduction, all_gather, reduce_scatter, all_reduce, all_to_all, send_to, receive_from, functions };
const char* name_of(Function function);

struct Communicator {
  Communicator(int rank, int size, int device) : rank(rank), size(size), device(device), links(device) {}

  int rank, size;
  const int device;
  bool blocking = true;
  uint64_t hash = 0;  // the same on all ranks
  std::string name;
  Links links;
  Interrupt setup;  // ends its making, and that of its children

  std::atomic<int> state{ncclSuccess};       // of the last call of a non-blocking communicator
  std::atomic<int> link_error{ncclSuccess};  // what the proxy thread of NCCL saw; stays
  std::atomic<bool> aborted{false}, revoked{false}, finalized{false};

  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  int jobs = 0;                // under way in threads of their own: making, launching, finalizing
  int launched = 0;            // kernels that were put on a stream and have not ended
  int graph_references = 0;    // kernels that are part of a graph
  uint64_t next_ticket = 0;    // kernels run one after the other, in the order of their launches,
  uint64_t served = 0;         // on whichever streams
  uint32_t next_sequence = 0;  // counts collectives
  uint64_t counts[functions] = {};
  std::vector<Reduction> reductions;  // made by ncclRedOpCreatePreMulSum

  std::mutex control_mutex;      // one user at a time of the control connections
  std::set<int> connected_ways;  // what was connected at its first use; guarded by control_mutex
  uint64_t children = 0;         // split or shrunk from this one; guarded by control_mutex

  // NCCL's abort flag for what runs on the device: it ends, and what comes later ends at once, having done nothing.
  void stop_operations();
  bool stopped() const { return links.interrupt.pulled(); }

  void wait_for_jobs();
  void wait_for_jobs_and_kernels();
};
using CommunicatorPointer = std::shared_ptr<Communicator>;

// Remembers why a call failed for ncclGetLastError, and returns the result.
ncclResult_t failed(const Communicator* communicator, ncclResult_t result, const std::string& why);

// Success and the communicator, or what NCCL answers to a null or freed handle.
ncclResult_t check(ncclComm_t handle, const char* call, CommunicatorPointer* found);

// What ncclCommGetAsyncError answers.
ncclResult_t async_error(const Communicator& communicator);

// Whether a new operation may begin (NCCL 2.30.7, src/init.cc, ncclCommEnsureReady).
ncclResult_t ensure_ready(const CommunicatorPointer& communicator);

}  // namespace emulated
