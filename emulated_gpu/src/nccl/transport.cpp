#include "transport.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <thread>

#include "../cuda/entry.h"

namespace emulated {
namespace {

// How long a wait may last before it looks again at what wakes nobody, such as an error of the device.
constexpr int look_again_ms = 100;

void set_no_delay(int socket) {
  int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

bool passing(ssize_t moved) { return moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR); }

// Waits until the socket is ready; false if interrupted.
bool wait_for(Interrupt& interrupt, int socket, short events) {
  while (!interrupt.pulled()) {
    pollfd descriptors[] = {{socket, events, 0}, {interrupt.descriptor(), POLLIN, 0}};
    poll(descriptors, 2, -1);
    if (descriptors[0].revents) return !interrupt.pulled();
  }
  return false;
}

End move_all(Interrupt& interrupt, int socket, char* data, size_t bytes, bool outwards) {
  while (bytes) {
    if (!wait_for(interrupt, socket, outwards ? POLLOUT : POLLIN)) return End::aborted;
    ssize_t moved = outwards ? send(socket, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                             : recv(socket, data, bytes, MSG_DONTWAIT);
    if (passing(moved)) continue;
    if (moved <= 0) return End::lost;
    data += moved;
    bytes -= moved;
  }
  return End::done;
}

// What is still to move in one direction with one peer.
using Pending = std::deque<Transfer>;

// Moves what can be moved now.
End advance(Links& links, Pending& pending, int socket, bool outwards, Trouble* trouble) {
  constexpr size_t chunk = 1 << 18;
  while (!pending.empty()) {
    Transfer& next = pending.front();
    if (next.bytes) {
      size_t bytes = std::min(next.bytes, chunk);
      ssize_t moved = outwards ? send(socket, next.at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                               : recv(socket, next.at, bytes, MSG_DONTWAIT);
      if (passing(moved)) return End::done;
      if (moved <= 0) {
        trouble->peer = next.peer;
        return End::lost;
      }
      next.at += moved;
      next.bytes -= moved;
      if (used_up(settings().nccl_link_stalls_after_bytes, moved)) links.stalled = true;
      if (used_up(settings().nccl_link_drops_after_bytes, moved)) links.drop();
      if (double rate = settings().nccl_link_mbps * 1e6; rate > 0 && outwards)
        std::this_thread::sleep_for(std::chrono::duration<double>(moved / rate));
      if (links.stalled) return End::done;
      if (next.bytes) continue;
    }
    if (next.expected) {
      auto received = reinterpret_cast<const Header*>(next.at) - 1;
      if (memcmp(received, next.expected, sizeof(Header))) {
        trouble->peer = next.peer;
        trouble->theirs = *received;
        return End::mismatched;
      }
    }
    pending.pop_front();
  }
  return End::done;
}

void copy_to_itself(Pending& out, Pending& in) {
  while (!out.empty() && !in.empty()) {
    memmove(in.front().at, out.front().at, std::min(in.front().bytes, out.front().bytes));
    out.pop_front();
    in.pop_front();
  }
}

}  // namespace

Interrupt::Interrupt() : descriptor_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
Interrupt::~Interrupt() { ::close(descriptor_); }
void Interrupt::pull() {
  pulled_ = true;
  uint64_t one = 1;
  (void)!write(descriptor_, &one, sizeof one);  // never read: it stays readable
}

void Links::open(int own_rank, int size) {
  rank = own_rank;
  for (auto& way : sockets) way.assign(size, -1);
}
void Links::close() {
  for (auto& way : sockets)
    for (int& socket : way) {
      if (socket >= 0) ::close(socket);
      socket = -1;
    }
}
void Links::drop() {
  for (Way way : {collective, point_to_point})
    for (int socket : sockets[way])
      if (socket >= 0) shutdown(socket, SHUT_RDWR);
}

int listen_on_loopback(uint16_t* port) {
  int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(0);
  socklen_t length = sizeof address;
  auto generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listening, generic, length) || listen(listening, 1024) || getsockname(listening, generic, &length)) {
    close(listening);
    return -1;
  }
  *port = ntohs(address.sin_port);
  return listening;
}

int connect_to_loopback(uint16_t port) {
  int connected = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(port);
  if (connect(connected, reinterpret_cast<sockaddr*>(&address), sizeof address)) {
    close(connected);
    return -1;
  }
  set_no_delay(connected);
  return connected;
}

int accept_connection(Interrupt& interrupt, int listening) {
  for (;;) {
    if (!wait_for(interrupt, listening, POLLIN)) return -1;
    int accepted = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    if (accepted < 0) continue;
    set_no_delay(accepted);
    return accepted;
  }
}

End send_all(Interrupt& interrupt, int socket, const void* data, size_t bytes) {
  return move_all(interrupt, socket, static_cast<char*>(const_cast<void*>(data)), bytes, true);
}
End receive_all(Interrupt& interrupt, int socket, void* data, size_t bytes) {
  return move_all(interrupt, socket, static_cast<char*>(data), bytes, false);
}

End exchange(Links& links, Links::Way way, const std::vector<Transfer>& out, const std::vector<Transfer>& in,
             Trouble* trouble) {
  const std::vector<int>& sockets = links.sockets[way];
  std::vector<Pending> outgoing(sockets.size()), incoming(sockets.size());
  for (auto& transfer : out) outgoing[transfer.peer].push_back(transfer);
  for (auto& transfer : in) incoming[transfer.peer].push_back(transfer);
  copy_to_itself(outgoing[links.rank], incoming[links.rank]);
  for (;;) {
    if (links.interrupt.pulled()) return End::aborted;
    if (device_error(links.device)) return End::broken;
    std::vector<pollfd> descriptors = {{links.interrupt.descriptor(), POLLIN, 0}};
    std::vector<int> peers = {-1};
    bool left = false;
    for (int peer = 0; peer < static_cast<int>(sockets.size()); peer++) {
      if (peer == links.rank) continue;
      short events = (outgoing[peer].empty() ? 0 : POLLOUT) | (incoming[peer].empty() ? 0 : POLLIN);
      if (!events) continue;
      left = true;
      if (links.stalled) continue;
      descriptors.push_back({sockets[peer], events, 0});
      peers.push_back(peer);
    }
    if (!left) return End::done;
    poll(descriptors.data(), descriptors.size(), look_again_ms);
    for (size_t k = 1; k < descriptors.size(); k++) {
      short events = descriptors[k].revents, failed = events & (POLLERR | POLLHUP | POLLNVAL);
      int peer = peers[k];
      if (failed && outgoing[peer].empty()) events |= POLLIN;
      if (failed && incoming[peer].empty()) events |= POLLOUT;
      if (events & POLLIN)  // first what has come: a peer that is gone may have sent all that is needed
        if (End end = advance(links, incoming[peer], sockets[peer], false, trouble); end != End::done) return end;
      if (events & POLLOUT)
        if (End end = advance(links, outgoing[peer], sockets[peer], true, trouble); end != End::done) return end;
    }
  }
}

}  // namespace emulated
