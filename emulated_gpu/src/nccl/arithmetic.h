// Reductions, as NCCL defines them for each type.
#pragma once

#include <vector>

#include <nccl.h>

namespace emulated {

// A reduction: one of NCCL's, or "multiply by a factor, then sum".
struct Reduction {
  ncclRedOp_t op = ncclSum;
  double factor = 1;
  const void* factor_on_device = nullptr;  // read when the collective runs
  ncclDataType_t factor_type = ncclFloat32;
};

size_t bytes_of(ncclDataType_t type);
bool can_reduce(ncclDataType_t type);
double scalar_value(const void* scalar, ncclDataType_t type);

// parts[r] is what rank r brings; the result comes into parts[0]. Overwrites the others.
void reduce(const std::vector<char*>& parts, size_t count, ncclDataType_t type, const Reduction& reduction);

}  // namespace emulated
