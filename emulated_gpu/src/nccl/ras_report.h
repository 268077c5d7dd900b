// What RAS gathered, and the two forms in which it tells it.
#pragma once

#include <map>
#include <set>
#include <string>

#include "ras.h"

namespace emulated {

constexpr int ras_functions = 5;  // NCCL_NUM_FUNCTIONS: the first of enum Function

struct RasRank {
  int rank = 0, pid = 0, device = 0, init_state = 0, async_error = 0;
  bool finalize_called = false, destroy_flag = false, abort_flag = false;
  uint64_t counts[ras_functions] = {};
};

struct RasCommunicator {
  uint64_t hash = 0;
  int size = 0;
  std::vector<Peer> members;     // by rank
  std::map<int, RasRank> ranks;  // those of which a process told
};

struct RasReport {
  std::map<uint16_t, Peer> processes;  // all that are known, by port
  std::set<uint16_t> responding, dead;
  std::map<uint64_t, RasCommunicator> communicators;  // by hash
  int timeouts = 0;
  double seconds = 0;
};

std::string ras_json(const RasReport& report);
std::string ras_text(const RasReport& report, bool verbose);

}  // namespace emulated
