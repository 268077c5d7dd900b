// Group calls: what is asked for between ncclGroupStart and ncclGroupEnd happens together at the end.
#pragma once

#include "communicator.h"

namespace emulated {

struct Operation {
  Function function;
  const void* in;
  void* out;
  size_t count;
  ncclDataType_t type;
  Reduction reduction;
  int root;  // or the peer of a send or receive
};

// The operations of one communicator in one group: one kernel.
struct Plan {
  CommunicatorPointer communicator;
  std::vector<cudaStream_t> streams;  // runs on the first, ordered with the others
  std::vector<Operation> operations;
};

using Job = std::function<ncclResult_t()>;

// A call that makes or ends a communicator. Outside a group it is a group of its own.
// `ends`: destroying and aborting block even for a non-blocking communicator.
ncclResult_t submit(const CommunicatorPointer& communicator, Job job, bool ends = false);

// An operation of a communicator, likewise.
ncclResult_t submit(const CommunicatorPointer& communicator, const Operation& operation, cudaStream_t stream);

// A call in a group that was refused: the group fails with it.
ncclResult_t refuse(ncclResult_t result);

ncclResult_t launch(const Plan& plan);  // collectives.cpp

}  // namespace emulated
