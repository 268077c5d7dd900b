// The answers of RAS as text and as JSON, line by line as NCCL 2.30.7 writes them (src/ras/client_support.cc:
// rasClientRunInit, rasClientRunComms, rasDumpCommsToJSON), for one node.
#include "ras_report.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <ctime>
#include <vector>

#include "communicator.h"

namespace emulated {
namespace {

constexpr const char* host = "127.0.0.1";

struct Writer {
  std::string text;
  __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    text += line;
  }
};

const char* yes_no(bool value) { return value ? "true" : "false"; }
const char* plural(size_t count, const char* many, const char* one = "") { return count > 1 ? many : one; }

std::vector<int> missing_ranks(const RasCommunicator& communicator) {
  std::vector<int> missing;
  for (int rank = 0; rank < communicator.size; rank++)
    if (!communicator.ranks.count(rank)) missing.push_back(rank);
  return missing;
}

// --- JSON ---

void write_rank(Writer& out, const RasRank& rank) {
  out.add("        {\n          \"rank\": %d,\n          \"host\": \"%s\",\n          \"pid\": %d,\n", rank.rank, host,
          rank.pid);
  out.add("          \"cuda_dev\": %d,\n          \"nvml_dev\": %d,\n", rank.device, rank.device);
  out.add("          \"status\": {\n            \"init_state\": %d,\n            \"async_error\": %d,\n",
          rank.init_state, rank.async_error);
  out.add(
      "            \"finalize_called\": %s,\n            \"destroy_flag\": %s,\n            \"abort_flag\": %s\n       "
      "   },\n",
      yes_no(rank.finalize_called), yes_no(rank.destroy_flag), yes_no(rank.abort_flag));
  out.add("          \"collective_counts\": {\n");
  for (int function = 0; function < ras_functions; function++)
    out.add("            \"%s\": %lu%s\n", name_of(static_cast<Function>(function)), rank.counts[function],
            function + 1 < ras_functions ? "," : "");
  out.add("          }\n        }");
}

void write_missing(Writer& out, int rank, const Peer& peer, bool unresponsive, bool dead) {
  out.add("        {\n          \"rank\": %d,\n          \"host\": \"%s\",\n          \"pid\": %d,\n", rank, host,
          peer.pid);
  // 2.28.9 leaves out the comma, so that its answer is no JSON (recorded on an H200).
  constexpr const char* comma = EMULATED_NCCL_VERSION <= 22809 ? "" : ",";
  out.add("          \"cuda_dev\": %d,\n          \"nvml_dev\": %d%s\n", peer.device, peer.device, comma);
  out.add(
      "          \"status\": {\n            \"unresponsive\": %s,\n            \"considered_dead\": %s\n          }\n  "
      "      }",
      yes_no(unresponsive), yes_no(dead));
}

void write_communicator(Writer& out, const RasReport& report, const RasCommunicator& communicator) {
  std::vector<int> missing = missing_ranks(communicator);
  out.add("    {\n      \"hash\": \"0x%lx\",\n", communicator.hash);
  out.add("      \"secondary_hash\": \"0x%lx:0x%lx\",\n", communicator.hash >> 32, communicator.hash & 0xffffffff);
  out.add("      \"size\": %d,\n      \"ranks_count\": %zu,\n      \"missing_ranks_count\": %zu,\n      \"ranks\": [\n",
          communicator.size, communicator.ranks.size(), missing.size());
  const char* between = "";
  for (auto& [number, rank] : communicator.ranks) {
    out.add("%s", between);
    write_rank(out, rank);
    between = ",\n";
  }
  out.add("\n      ],\n      \"missing_ranks\": [\n");
  between = "";
  for (int rank : missing) {
    const Peer& peer = communicator.members[rank];
    out.add("%s", between);
    write_missing(out, rank, peer, !report.responding.count(peer.port), report.dead.count(peer.port));
    between = ",\n";
  }
  out.add("\n      ]\n    }");
}

// --- text ---

// Bits, as in src/ras/client_support.cc: the highest one is what a group of communicators is listed under.
enum { no_communicator = 1, initializing = 2, running = 4, finalizing = 8, aborting = 16 };
enum { mismatch = 1, in_error = 2, incomplete = 4 };
constexpr const char* status_names[] = {"NOCOMM", "INIT", "RUNNING", "FINALIZE", "ABORT"};
constexpr const char* error_names[] = {"OK",
                                       "MISMATCH",
                                       "ERROR",
                                       "ERROR,MISMATCH",
                                       "INCOMPLETE",
                                       "INCOMPLETE,MISMATCH",
                                       "INCOMPLETE,ERROR",
                                       "INCOMPLETE,ERROR,MISMATCH"};

int status_of(const RasRank& rank) {
  if (rank.abort_flag) return aborting;
  if (rank.finalize_called || rank.destroy_flag) return finalizing;
  return rank.init_state == ncclSuccess ? running : initializing;
}
int highest(unsigned bits) { return bits ? 31 - __builtin_clz(bits) : 0; }
bool is_error(int result) { return result != ncclSuccess && result != ncclInProgress; }

const char* error_name(int result) {
  constexpr const char* names[] = {"",
                                   "Unhandled CUDA error",
                                   "System error",
                                   "Internal error",
                                   "Invalid argument",
                                   "Invalid usage",
                                   "Remote process error"};
  return result > 0 && result < 7 ? names[result] : "Unexpected error";
}

// rasCountIsOutlier: which groups of ranks are listed one by one.
bool is_outlier(int count, bool verbose, int total = -1) {
  if (count == 1) return true;
  if (verbose) return total == -1 || count < total * 0.5;
  return count <= 10 && (total == -1 || count <= total * 0.25);
}

struct Judged {
  const RasCommunicator* communicator;
  unsigned status = 0, errors = 0;
  std::vector<int> unreachable,
      elsewhere;  // missing ranks: without an answer, or whose process has not the communicator
};

Judged judge(const RasReport& report, const RasCommunicator& communicator) {
  Judged judged{&communicator, 0, 0, {}, {}};
  for (int rank : missing_ranks(communicator)) {
    if (report.responding.count(communicator.members[rank].port)) {
      judged.elsewhere.push_back(rank);
      judged.errors |= mismatch;
      judged.status |= no_communicator;
    } else {
      judged.unreachable.push_back(rank);
      judged.errors |= incomplete;
    }
  }
  const RasRank& first = communicator.ranks.begin()->second;
  for (auto& [number, rank] : communicator.ranks) {
    judged.status |= status_of(rank);
    if (!std::equal(rank.counts, rank.counts + ras_functions, first.counts)) judged.errors |= mismatch;
    if (is_error(rank.init_state) || is_error(rank.async_error)) judged.errors |= in_error;
  }
  if (__builtin_popcount(judged.status) > 1) judged.errors |= mismatch;
  return judged;
}

// The largest first, then by status, errors and missing ranks (rasAuxCommsCompareRev).
bool comes_before(const Judged& a, const Judged& b) {
  auto key = [](const Judged& judged) {
    return std::tuple(-judged.communicator->size, -highest(judged.status), -static_cast<int>(judged.errors),
                      static_cast<int>(judged.communicator->ranks.size()));
  };
  return key(a) < key(b);
}
bool same_group(const Judged& a, const Judged& b) {
  return a.communicator->size == b.communicator->size && highest(a.status) == highest(b.status) && a.errors == b.errors;
}

std::string where(const Peer& peer) {
  return "GPU " + std::to_string(peer.device) + " managed by process " + std::to_string(peer.pid) + " on node " + host;
}

void write_summary(Writer& out, const RasReport& report) {
  std::map<int, std::set<int>> devices;  // of each process
  for (auto& [port, peer] : report.processes) devices[peer.pid].insert(peer.device);
  for (auto& [hash, communicator] : report.communicators)
    for (auto& member : communicator.members) devices[member.pid].insert(member.device);
  size_t total = 0;
  std::map<size_t, int> by_number;
  for (auto& [pid, own] : devices) {
    total += own.size();
    by_number[own.size()]++;
  }
  int processes = static_cast<int>(devices.size());
  out.add("Job summary\n===========\n\n");
  if (by_number.size() == 1) {
    out.add(
        "  Nodes  Processes         GPUs  Processes     GPUs\n(total)   per node  per process    (total)  (total)\n");
    out.add("%7d  %9d  %11zu  %9d  %7zu\n", 1, processes, by_number.begin()->first, processes, total);
    return;
  }
  out.add("  Nodes  Processes\n          per node\n%7d  %9d\n", 1, processes);
  out.add("\n         Processes         GPUs\n                    per process\n");
  std::vector<std::pair<int, size_t>> most_first;
  for (auto& [number, count] : by_number) most_first.push_back({count, number});
  std::sort(most_first.rbegin(), most_first.rend());
  for (auto& [count, number] : most_first) out.add("         %9d  %11zu\n", count, number);
  out.add("\n  Nodes  Processes         GPUs\n(total)    (total)      (total)\n%7d  %9d  %11zu\n", 1, processes, total);
}

// Ranks by what they have in common, the largest group first (rasValCountsCompareRev).
template <class Value>
std::vector<std::pair<Value, std::vector<int>>> grouped(const std::map<int, Value>& values) {
  std::map<Value, std::vector<int>> groups;
  for (auto& [rank, value] : values) groups[value].push_back(rank);
  std::vector<std::pair<Value, std::vector<int>>> sorted(groups.begin(), groups.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](auto& a, auto& b) {
    return a.second.size() != b.second.size() ? a.second.size() > b.second.size() : a.first > b.first;
  });
  return sorted;
}

void write_processes(Writer& out, const RasReport& report, const std::vector<uint16_t>& ports) {
  for (uint16_t port : ports) {
    const Peer& peer = report.processes.at(port);
    out.add("  Process %d on node %s managing GPU %d\n", peer.pid, host, peer.device);
  }
}

void write_errors_of(Writer& out, const RasCommunicator& communicator, bool verbose, const char* kind,
                     int RasRank::* error) {
  std::map<int, int> errors;
  for (auto& [number, rank] : communicator.ranks)
    if (is_error(rank.*error)) errors[number] = rank.*error;
  if (errors.empty()) return;
  out.add("  %s error%s on %zu rank%s\n", kind, plural(errors.size(), "s"), errors.size(), plural(errors.size(), "s"));
  for (auto& [value, ranks] : grouped(errors)) {
    bool several = ranks.size() > 1;
    if (several) out.add("  %zu ranks reported %s\n", ranks.size(), error_name(value));
    if (!is_outlier(static_cast<int>(ranks.size()), verbose)) continue;
    for (int rank : ranks) {
      std::string at = where(communicator.members[rank]);
      if (several)
        out.add("  Rank %d -- %s\n", rank, at.c_str());
      else
        out.add("  Rank %d reported %s -- %s\n", rank, error_name(value), at.c_str());
    }
  }
}

void write_status_mismatch(Writer& out, const Judged& judged, bool verbose) {
  if (__builtin_popcount(judged.status) < 2) return;
  const RasCommunicator& communicator = *judged.communicator;
  out.add("  Communicator ranks have different status\n");
  std::map<int, int> statuses;
  for (auto& [number, rank] : communicator.ranks) statuses[number] = highest(status_of(rank));
  for (int rank : judged.elsewhere) statuses[rank] = highest(no_communicator);
  for (auto& [status, ranks] : grouped(statuses)) {
    bool several = ranks.size() > 1;
    if (several) out.add("  %zu ranks have status %s\n", ranks.size(), status_names[status]);
    if (!is_outlier(static_cast<int>(ranks.size()), verbose, communicator.size)) continue;
    for (int rank : ranks) {
      std::string at = where(communicator.members[rank]);
      if (several)
        out.add("  Rank %d -- %s\n", rank, at.c_str());
      else
        out.add("  Rank %d has status %s -- %s\n", rank, status_names[status], at.c_str());
    }
  }
}

void write_count_mismatch(Writer& out, const Judged& judged, bool verbose) {
  const RasCommunicator& communicator = *judged.communicator;
  for (int function = 0; function < ras_functions; function++) {
    std::map<int, uint64_t> counts;
    for (auto& [number, rank] : communicator.ranks) counts[number] = rank.counts[function];
    auto groups = grouped(counts);
    if (groups.size() < 2) continue;
    out.add("  Communicator ranks have different %s operation counts\n", name_of(static_cast<Function>(function)));
    for (auto& [count, ranks] : groups) {
      bool several = ranks.size() > 1;
      if (several && count) out.add("  %zu ranks have launched up to operation %lu\n", ranks.size(), count);
      if (several && !count) out.add("  %zu ranks have not launched any operations\n", ranks.size());
      if (!is_outlier(static_cast<int>(ranks.size()), verbose, communicator.size)) continue;
      for (int rank : ranks) {
        std::string at = where(communicator.members[rank]);
        if (several)
          out.add("  Rank %d -- %s\n", rank, at.c_str());
        else if (count)
          out.add("  Rank %d has launched up to operation %lu -- %s\n", rank, count, at.c_str());
        else
          out.add("  Rank %d has not launched any operations -- %s\n", rank, at.c_str());
      }
    }
    out.add("\n");
  }
}

}  // namespace

std::string ras_json(const RasReport& report) {
  Writer out;
  char now[64];
  time_t seconds = time(nullptr);
  tm local;
  strftime(now, sizeof now, "%F %T", localtime_r(&seconds, &local));
  constexpr int version = EMULATED_NCCL_VERSION;
  out.add("{\n  \"nccl_version\": \"%d.%d.%d\",\n", version / 10000, version / 100 % 100, version % 100);
  out.add("  \"cuda_runtime_version\": %d,\n  \"cuda_driver_version\": %d,\n", EMULATED_CUDA_VERSION,
          EMULATED_CUDA_VERSION);
  out.add("  \"timestamp\": \"%s\",\n  \"communicators_count\": %zu,\n  \"communicators\": [\n", now,
          report.communicators.size());
  const char* between = "";
  for (auto& [hash, communicator] : report.communicators) {
    out.add("%s", between);
    write_communicator(out, report, communicator);
    between = ",\n";
  }
  out.add("\n  ],\n  \"ras\": {\n    \"collection_time_sec\": %.3f,\n    \"timeouts_count\": %d\n  }\n}\n",
          report.seconds, report.timeouts);
  return out.text;
}

std::string ras_text(const RasReport& report, bool verbose) {
  Writer out;
  constexpr int version = EMULATED_NCCL_VERSION, cuda = EMULATED_CUDA_VERSION;
  out.add("NCCL version %d.%d.%d compiled with CUDA %d.%d\n", version / 10000, version / 100 % 100, version % 100,
          cuda / 1000, cuda % 1000 / 10);
  out.add("CUDA runtime version %d, driver version %d\n\n", cuda, cuda);
  write_summary(out, report);
  out.add("\nCommunicators... (%.3fs)\n=============\n\n", report.seconds);

  std::vector<Judged> all;
  for (auto& [hash, communicator] : report.communicators) all.push_back(judge(report, communicator));
  std::stable_sort(all.begin(), all.end(), comes_before);
  std::vector<std::pair<int, int>> numbers;  // "#group-communicator"
  if (all.empty())
    out.add("No communicator data collected!\n");
  else
    out.add(
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors\n"
        "    #  in group  per comm  per node  per comm  in group\n");
  for (size_t k = 0; k < all.size();) {
    size_t end = k;
    std::set<std::pair<int, int>> gpus;
    size_t fewest = all[k].communicator->ranks.size(), most = fewest;
    for (; end < all.size() && same_group(all[k], all[end]); end++) {
      numbers.push_back({numbers.empty() ? 0 : numbers.back().first + (end == k), static_cast<int>(end - k)});
      size_t ranks = all[end].communicator->ranks.size();
      fewest = std::min(fewest, ranks);
      most = std::max(most, ranks);
      for (auto& [number, rank] : all[end].communicator->ranks) gpus.insert({rank.pid, rank.device});
    }
    std::string per_node = std::to_string(fewest) + (fewest == most ? "" : "-" + std::to_string(most));
    out.add("%5d  %8zu  %8d  %8s  %8d  %8zu  %8s  %6s\n", numbers.back().first, end - k, 1, per_node.c_str(),
            all[k].communicator->size, gpus.size(), status_names[highest(all[k].status)], error_names[all[k].errors]);
    k = end;
  }

  out.add("\nErrors\n======\n\n");
  std::vector<uint16_t> missing, dead(report.dead.begin(), report.dead.end());
  for (auto& [port, peer] : report.processes)
    if (!report.responding.count(port) && !report.dead.count(port)) missing.push_back(port);
  if (!missing.empty()) {
    out.add("INCOMPLETE\n  Missing communicator data from %zu job process%s\n", missing.size(),
            plural(missing.size(), "es"));
    if (is_outlier(static_cast<int>(missing.size()), verbose)) write_processes(out, report, missing);
    out.add("\n");
  }
  if (!dead.empty()) {
    out.add("DEAD\n  %zu job process%s considered dead (unreachable via the RAS network)\n", dead.size(),
            plural(dead.size(), "es are", " is"));
    if (is_outlier(static_cast<int>(dead.size()), verbose)) write_processes(out, report, dead);
    out.add("\n");
  }
  for (size_t k = 0; k < all.size(); k++) {
    const RasCommunicator& communicator = *all[k].communicator;
    auto title = [&](const char* what) {
      out.add("#%d-%d (%016lx) %s\n", numbers[k].first, numbers[k].second, communicator.hash, what);
    };
    if (all[k].errors & incomplete) {
      title("INCOMPLETE");
      size_t count = all[k].unreachable.size();
      out.add("  Missing communicator data from %zu rank%s\n", count, plural(count, "s"));
      if (is_outlier(static_cast<int>(count), verbose))
        for (int rank : all[k].unreachable)
          out.add("  Rank %d -- %s\n", rank, where(communicator.members[rank]).c_str());
      out.add("\n");
    }
    if (all[k].errors & in_error) {
      title("ERROR");
      write_errors_of(out, communicator, verbose, "Initialization", &RasRank::init_state);
      write_errors_of(out, communicator, verbose, "Asynchronous", &RasRank::async_error);
      out.add("\n");
    }
  }

  out.add("Warnings\n========\n\n");
  if (report.timeouts)
    out.add("TIMEOUT\n  Encountered %d communication timeout%s while gathering communicator data\n\n", report.timeouts,
            plural(report.timeouts, "s"));
  for (size_t k = 0; k < all.size(); k++) {
    if (!(all[k].errors & mismatch)) continue;
    out.add("#%d-%d (%016lx) MISMATCH\n", numbers[k].first, numbers[k].second, all[k].communicator->hash);
    write_status_mismatch(out, all[k], verbose);
    write_count_mismatch(out, all[k], verbose);
  }
  return out.text;
}

}  // namespace emulated
