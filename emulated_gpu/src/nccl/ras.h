// RAS ("reliability, availability, serviceability"): NCCL's server that answers what all communicators of a job do.
//
// Each process has a thread that listens for clients (NCCL_RAS_ADDR, localhost:28028; processes of one node share the
// port) and one that other processes ask. Rules: NCCL 2.30.7, src/ras/client_support.cc and ras_internal.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace emulated {

struct Communicator;

// A process of the job and the port on which its RAS answers others; how a rank is known to its peers.
struct Peer {
  int32_t pid = 0, device = 0;
  uint16_t port = 0;
};

// Starts the threads, once in each process, and returns this process as a peer on that device; port 0 if RAS is
// switched off (NCCL_RAS_ENABLE=0).
Peer start_ras(int device);

// Makes the processes of a new communicator known: they are asked from now on, and missed when they end.
void add_to_ras(const std::shared_ptr<Communicator>& communicator);

// A communicator that was freed is not reported any more.
void remove_from_ras(const Communicator* communicator);

}  // namespace emulated
