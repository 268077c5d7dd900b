// Collectives and point-to-point operations: launched on a stream, which they hold until all whom they need have come.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "../cuda/streams.h"
#include "group.h"
#include "log.h"

namespace emulated {

EMULATED_EXPORT bool is_capturing(cudaStream_t stream);

namespace {

bool is_point_to_point(const Operation& operation) {
  return operation.function == send_to || operation.function == receive_from;
}

// --- what the kernel does ---

// One rank's part in one collective: who sends what to whom. Each message begins with a header that the receiver
// compares with its own, so that ranks that disagree hang, as they do on GPUs, and say why, as those do not.
class Collective {
 public:
  Collective(Communicator& own, const Operation& operation, uint32_t sequence)
      : own_(own), op_(operation), bytes_(operation.count * bytes_of(operation.type)) {
    header_.count = operation.count;
    header_.sequence = sequence;
    header_.function = operation.function;
    header_.type = operation.type;
    header_.op = operation.reduction.op;
    header_.root = operation.root;
    received_.resize(own.size);
  }

  End run(Trouble* trouble) {
    switch (op_.function) {
      case broadcast:
        if (own_.rank == op_.root) {
          to_others([&](int) { return in(0); });
        } else {
          receive(op_.root, out(0));
        }
        break;
      case reduction:
        if (own_.rank == op_.root) {
          collect_parts(0);
        } else {
          send(op_.root, in(0));
        }
        break;
      case all_reduce:
        to_others([&](int) { return in(0); });
        collect_parts(0);
        break;
      case reduce_scatter:
        to_others([&](int peer) { return in(peer); });
        collect_parts(own_.rank);
        break;
      case all_gather:
        to_others([&](int) { return in(0); });
        from_others([&](int peer) { return out(peer); });
        break;
      case all_to_all:
        to_others([&](int peer) { return in(peer); });
        from_others([&](int peer) { return out(peer); });
        break;
      default:
        break;
    }
    End end = exchange(own_.links, Links::collective, sends_, receives_, trouble);
    if (end == End::done) finish();
    return end;
  }

  const Header& header() const { return header_; }

 private:
  char* in(int block) { return static_cast<char*>(const_cast<void*>(op_.in)) + block * bytes_; }
  char* out(int block) { return static_cast<char*>(op_.out) + block * bytes_; }

  void send(int peer, char* from) {
    sends_.push_back({peer, reinterpret_cast<char*>(&header_), sizeof header_});
    sends_.push_back({peer, from, bytes_});
  }
  void receive(int peer, char* to) {
    receives_.push_back({peer, reinterpret_cast<char*>(&received_[peer]), sizeof(Header), &header_});
    receives_.push_back({peer, to, bytes_});
  }
  template <class From>
  void to_others(From from) {
    for (int peer = 0; peer < own_.size; peer++)
      if (peer != own_.rank) send(peer, from(peer));
  }
  template <class To>
  void from_others(To to) {
    for (int peer = 0; peer < own_.size; peer++)
      if (peer != own_.rank) receive(peer, to(peer));
  }
  void collect_parts(int own_block) {
    gathered_.resize(bytes_ * own_.size);
    for (int peer = 0; peer < own_.size; peer++) parts_.push_back(gathered_.data() + peer * bytes_);
    if (bytes_) memcpy(parts_[own_.rank], in(own_block), bytes_);
    from_others([&](int peer) { return parts_[peer]; });
  }

  void finish() {
    if (!bytes_) return;
    if (!parts_.empty()) {
      reduce(parts_, op_.count, op_.type, op_.reduction);
      memcpy(out(0), parts_[0], bytes_);
    }
    if (op_.function == broadcast && own_.rank == op_.root && op_.out) memmove(out(0), in(0), bytes_);
    if (op_.function == all_gather) memmove(out(own_.rank), in(0), bytes_);
    if (op_.function == all_to_all) memmove(out(own_.rank), in(own_.rank), bytes_);
  }

  Communicator& own_;
  const Operation& op_;
  const size_t bytes_;
  Header header_;
  std::vector<Header> received_;
  std::vector<Transfer> sends_, receives_;
  std::vector<char> gathered_;
  std::vector<char*> parts_;
};

void report_mismatch(const Communicator& own, const Header& mine, const Trouble& trouble) {
  const Header& theirs = trouble.theirs;
  auto name = [](uint32_t function) { return function < functions ? name_of(static_cast<Function>(function)) : "?"; };
  fprintf(stderr,
          "emulated NCCL: rank %d runs #%u %s of %zu elements of type %u, rank %d runs #%u %s of %zu of type %u. "
          "NCCL would hang or mix up data; this hangs.\n",
          own.rank, mine.sequence, name(mine.function), static_cast<size_t>(mine.count), mine.type, trouble.peer,
          theirs.sequence, name(theirs.function), static_cast<size_t>(theirs.count), theirs.type);
}

// All sends and receives of a group make progress together ("ncclGroupStart ... point-to-point communication": those of
// one group do not block each other).
End run_point_to_point(Communicator& own, const Plan& plan, Trouble* trouble) {
  std::deque<Header> headers;  // stay where they are
  std::vector<Transfer> sends, receives;
  for (auto& operation : plan.operations) {
    if (!is_point_to_point(operation)) continue;
    Header header{};
    header.count = operation.count;
    header.function = send_to;
    header.type = operation.type;
    headers.push_back(header);
    Header* expected = &headers.back();
    size_t bytes = operation.count * bytes_of(operation.type);
    if (operation.function == send_to) {
      sends.push_back({operation.root, reinterpret_cast<char*>(expected), sizeof(Header)});
      sends.push_back({operation.root, static_cast<char*>(const_cast<void*>(operation.in)), bytes});
    } else {
      headers.emplace_back();
      receives.push_back({operation.root, reinterpret_cast<char*>(&headers.back()), sizeof(Header), expected});
      receives.push_back({operation.root, static_cast<char*>(operation.out), bytes});
    }
  }
  if (sends.empty() && receives.empty()) return End::done;
  End end = exchange(own.links, Links::point_to_point, sends, receives, trouble);
  if (end == End::mismatched) report_mismatch(own, headers.front(), *trouble);
  return end;
}

End run_operations(Communicator& own, const Plan& plan, uint32_t sequence, Trouble* trouble) {
  for (auto& operation : plan.operations) {
    if (is_point_to_point(operation)) continue;
    if (falls_due(settings().nccl_link_stalls_at)) own.links.stalled = true;
    if (falls_due(settings().nccl_link_drops_at)) own.links.drop();
    Collective collective(own, operation, sequence++);
    End end = collective.run(trouble);
    if (end == End::mismatched) report_mismatch(own, collective.header(), *trouble);
    if (end != End::done) return end;
  }
  return run_point_to_point(own, plan, trouble);
}

// Waits on behalf of a kernel; returns early if the communicator is stopped or the device broken.
template <class Condition>
void wait_in_kernel(Communicator& own, Condition condition) {
  std::unique_lock<std::mutex> lock(own.mutex);
  while (!own.stopped() && !device_error(own.device) && !condition())
    own.changed.wait_for(lock, std::chrono::milliseconds(100));
}

void run_kernel(const Plan& plan, uint64_t ticket, uint32_t sequence) {
  Communicator& own = *plan.communicator;
  wait_in_kernel(own, [&] { return own.served == ticket; });
  if (!own.stopped() && !device_error(own.device)) {
    Trouble trouble;
    End end = run_operations(own, plan, sequence, &trouble);
    // The proxy thread sees the end of a connection and sets the error; the kernel does not, it spins until the abort
    // flag is set (src/proxy.cc, ncclProxyProgress; src/device/primitives.h, checkAbort). Over NVLink or shared memory
    // nobody sees it.
    if (end == End::lost && settings().nccl_death_unnoticed <= 0) {
      failed(&own, ncclRemoteError, "connection closed by rank " + std::to_string(trouble.peer));
      own.link_error = ncclRemoteError;
    }
    if (end == End::lost || end == End::mismatched) wait_in_kernel(own, [] { return false; });
  }
  {
    std::lock_guard<std::mutex> lock(own.mutex);
    own.launched--;
    own.served = std::max(own.served, ticket + 1);
  }
  own.changed.notify_all();
}

// --- what the launch does ---

// Channels are connected when they are first used, which blocks the calling thread (or that of a non-blocking
// communicator) until the peers come to it too (NCCL_RUNTIME_CONNECT; NCCL 2.30.7, src/group.cc, ncclCollPreconnect
// and ncclP2PPreconnectFunc; src/transport.cc, ncclTransportP2pSetup, which ends with a message to each). All-reduce
// has a tree, other collectives have the ring, send and receive one for each peer.
ncclResult_t connect_channels(Communicator& own, const Plan& plan) {
  if (settings().nccl_runtime_connect <= 0 || own.size == 1) return ncclSuccess;
  enum { ring = -1, tree = -2 };
  std::lock_guard<std::mutex> lock(own.control_mutex);
  std::set<int> wanted;
  for (auto& operation : plan.operations) {
    int way = operation.function == all_reduce ? tree : ring;
    if (is_point_to_point(operation)) way = operation.root;
    if (way != own.rank && !own.connected_ways.count(way)) wanted.insert(way);
  }
  Interrupt& interrupt = own.links.interrupt;
  auto& sockets = own.links.sockets[Links::control];
  struct Token {
    int32_t way;
    uint32_t magic = 0x4e4e4f43;
  };
  auto partners_of = [&](int way) {
    std::vector<int> partners;
    for (int peer = 0; peer < own.size; peer++)
      if (peer != own.rank && (way < 0 || way == peer)) partners.push_back(peer);
    return partners;
  };
  auto interrupted = [&](End end, int peer) {
    if (end == End::aborted) return failed(&own, ncclInternalError, "aborted while channels were connected");
    return failed(&own, ncclRemoteError, "rank " + std::to_string(peer) + " went away while channels were connected");
  };
  // First all that this rank says, then all that it hears: pairs may be in any order.
  for (int way : wanted)
    for (int peer : partners_of(way)) {
      Token token{way < 0 ? way : 0};
      if (End end = send_all(interrupt, sockets[peer], &token, sizeof token); end != End::done)
        return interrupted(end, peer);
    }
  for (int way : wanted)
    for (int peer : partners_of(way)) {
      Token token{};
      if (End end = receive_all(interrupt, sockets[peer], &token, sizeof token); end != End::done)
        return interrupted(end, peer);
      if (token.way != (way < 0 ? way : 0)) {
        fprintf(stderr, "emulated NCCL: ranks %d and %d first use different algorithms; as with NCCL, this hangs\n",
                own.rank, peer);
        while (!interrupt.pulled()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        return interrupted(End::aborted, peer);
      }
    }
  own.connected_ways.insert(wanted.begin(), wanted.end());
  return ncclSuccess;
}

// Counts a kernel that is part of a graph for as long as the graph exists.
struct GraphReference {
  explicit GraphReference(CommunicatorPointer communicator) : communicator(std::move(communicator)) { change(1); }
  ~GraphReference() { change(-1); }
  GraphReference(const GraphReference&) = delete;
  void change(int by) {
    {
      std::lock_guard<std::mutex> lock(communicator->mutex);
      communicator->graph_references += by;
    }
    communicator->changed.notify_all();
  }
  CommunicatorPointer communicator;
};

// Takes the kernel's place among those of its communicator; called at each launch of it or of its graph.
Run take_place(const std::shared_ptr<const Plan>& plan) {
  Communicator& own = *plan->communicator;
  std::lock_guard<std::mutex> lock(own.mutex);
  uint64_t ticket = own.next_ticket++;
  uint32_t sequence = own.next_sequence;
  for (auto& operation : plan->operations) {
    own.next_sequence += !is_point_to_point(operation);
    own.counts[operation.function]++;
  }
  own.launched++;
  return [plan, ticket, sequence] { run_kernel(*plan, ticket, sequence); };
}

}  // namespace

ncclResult_t launch(const Plan& plan) {
  Communicator& own = *plan.communicator;
  if (device_error(own.device)) return failed(&own, ncclUnhandledCudaError, "the device is in an error");
  cudaSetDevice(own.device);  // its default stream may be meant; NCCL 2.30.7, src/group.cc, doLaunches
  if (ncclResult_t result = connect_channels(own, plan)) return result;
  auto shared = std::make_shared<const Plan>(plan);
  cudaStream_t stream = plan.streams[0];
  auto reference = is_capturing(stream) ? std::make_shared<GraphReference>(plan.communicator) : nullptr;
  // A kernel with operations of several streams begins after all of them and ends before any goes on.
  std::vector<std::shared_ptr<Mark>> before;
  for (size_t k = 1; k < plan.streams.size(); k++) {
    before.push_back(std::make_shared<Mark>());
    enqueue(plan.streams[k], Kind::order, [mark = before.back()] { mark->set(); });
    enqueue(stream, Kind::order, [mark = before.back()] { mark->wait(); });
  }
  cudaError_t error = enqueue_launch(stream, {Kind::collective, [shared, reference] { return take_place(shared); }});
  if (plan.streams.size() > 1) {
    auto after = std::make_shared<Mark>();
    enqueue(stream, Kind::order, [after] { after->set(); });
    for (size_t k = 1; k < plan.streams.size(); k++) enqueue(plan.streams[k], Kind::order, [after] { after->wait(); });
  }
  return error ? failed(&own, ncclUnhandledCudaError, cudaGetErrorString(error)) : ncclSuccess;
}

namespace {

ncclResult_t ask(ncclComm_t handle, const char* call, Operation operation, cudaStream_t stream) {
  CommunicatorPointer own;
  if (ncclResult_t wrong = check(handle, call, &own)) return refuse(wrong);
  if (own->revoked)
    return refuse(failed(own.get(), ncclInvalidUsage, std::string(call) + ": communicator was revoked"));
  if (ncclResult_t result = ensure_ready(own)) return refuse(result);
  bool reduces =
      operation.function == all_reduce || operation.function == reduction || operation.function == reduce_scatter;
  if (operation.type >= ncclNumTypes || (reduces && !can_reduce(operation.type)))
    return refuse(failed(own.get(), ncclInvalidArgument, std::string(call) + ": this type is not emulated"));
  if (operation.root < 0 || operation.root >= own->size)
    return refuse(failed(own.get(), ncclInvalidArgument, std::string(call) + ": no such rank"));
  if (operation.reduction.op >= ncclNumOps) {
    std::lock_guard<std::mutex> lock(own->mutex);
    size_t index = operation.reduction.op - ncclNumOps;
    if (index >= own->reductions.size()) return refuse(ncclInvalidArgument);
    operation.reduction = own->reductions[index];
  }
  return submit(own, operation, stream);
}

}  // namespace
}  // namespace emulated

using namespace emulated;

#define ASK(...) return ask(communicator, __func__, {__VA_ARGS__}, stream)

NCCL_FUNCTION ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                         ncclComm_t communicator, cudaStream_t stream) {
  ASK(all_reduce, in, out, count, type, {op}, 0);
}
NCCL_FUNCTION ncclResult_t ncclReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                      int root, ncclComm_t communicator, cudaStream_t stream) {
  ASK(reduction, in, out, count, type, {op}, root);
}
NCCL_FUNCTION ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type,
                                             ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  ASK(reduce_scatter, in, out, count, type, {op}, 0);
}
NCCL_FUNCTION ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                                         ncclComm_t communicator, cudaStream_t stream) {
  ASK(broadcast, in, out, count, type, {}, root);
}
NCCL_FUNCTION ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                                     cudaStream_t stream) {
  ASK(broadcast, buffer, buffer, count, type, {}, root);
}
NCCL_FUNCTION ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                                         ncclComm_t communicator, cudaStream_t stream) {
  ASK(all_gather, in, out, count, type, {}, 0);
}
NCCL_FUNCTION ncclResult_t ncclAlltoAll(const void* in, void* out, size_t count, ncclDataType_t type,
                                        ncclComm_t communicator, cudaStream_t stream) {
  ASK(all_to_all, in, out, count, type, {}, 0);
}
NCCL_FUNCTION ncclResult_t ncclSend(const void* in, size_t count, ncclDataType_t type, int peer,
                                    ncclComm_t communicator, cudaStream_t stream) {
  ASK(send_to, in, nullptr, count, type, {}, peer);
}
NCCL_FUNCTION ncclResult_t ncclRecv(void* out, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                                    cudaStream_t stream) {
  ASK(receive_from, nullptr, out, count, type, {}, peer);
}
