// The links between the ranks of a communicator: TCP connections on the loopback, and what can go wrong on them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulated {

enum class End {
  done,
  aborted,     // the communicator was aborted meanwhile
  lost,        // a connection ended: the peer's process is gone, or the link was dropped
  mismatched,  // a peer runs another operation
  broken,      // this rank's device is in an error
};

// What precedes the data of each operation, so that ranks that disagree hang instead of mixing up data.
struct Header {
  uint64_t count;
  uint32_t sequence, function, type, op, root;
  uint32_t magic = 0x4c43434e;
};

// One direction of one pair of ranks: `bytes` bytes to or from `at`.
struct Transfer {
  int peer;
  char* at;
  size_t bytes;
  const Header* expected = nullptr;  // for a received header: what it must be
};

// Ends whatever waits on links: a communicator has one, which its abort pulls.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;

  void pull();
  bool pulled() const { return pulled_; }
  int descriptor() const { return descriptor_; }  // readable from then on

 private:
  std::atomic<bool> pulled_{false};
  int descriptor_;
};

// The connections of one rank to all others. Collectives, send and receive, and the making of connections go separate
// ways, as NCCL's channels, its point-to-point channels and its bootstrap network do.
struct Links {
  enum Way { collective, point_to_point, control, ways };

  Links(int device) : device(device) {}
  ~Links() { close(); }
  Links(const Links&) = delete;

  void open(int rank, int size);
  void close();
  void drop();  // cuts all data connections: both sides see it

  const int device;
  int rank = 0;
  std::vector<int> sockets[ways];  // by rank
  Interrupt interrupt;
  std::atomic<bool> stalled{false};  // data does not move any more, and nobody is told
};

// A listening socket on the loopback; -1 on failure.
int listen_on_loopback(uint16_t* port);
int connect_to_loopback(uint16_t port);

// Accepts one connection, unless interrupted (-1).
int accept_connection(Interrupt& interrupt, int listening);

End send_all(Interrupt& interrupt, int socket, const void* data, size_t bytes);
End receive_all(Interrupt& interrupt, int socket, void* data, size_t bytes);

// What an exchange found when it did not end well.
struct Trouble {
  int peer = -1;
  Header theirs{};
};

// Does all transfers at the same time. Transfers between this rank and itself are copies.
End exchange(Links& links, Links::Way way, const std::vector<Transfer>& out, const std::vector<Transfer>& in,
             Trouble* trouble);

}  // namespace emulated
