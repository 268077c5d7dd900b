// The network of RAS: which processes there are, what each says of its communicators, and the clients' commands.
#include "ras.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>

#include "communicator.h"
#include "log.h"
#include "ras_report.h"

namespace emulated {
namespace {

using Clock = std::chrono::steady_clock;

// RAS_PEER_DEAD_TIMEOUT: after that long without a connection a process counts as dead.
constexpr double dead_after_seconds = 60;

struct Known {
  Peer peer;
  int connection = -1;  // held open for as long as the process lives
  Clock::time_point gone_at;
};

struct State {
  std::mutex mutex;
  Peer own;
  pid_t started_by = 0;
  std::map<uint16_t, Known> peers;  // by port, without this process
  std::vector<std::weak_ptr<Communicator>> communicators;
};
State& state() {
  static State* only = new State;
  return *only;
}

double timeout_factor() {
  const char* factor = getenv("NCCL_RAS_TIMEOUT_FACTOR");
  return factor && atoi(factor) > 0 ? atoi(factor) : 1;
}

// --- what one process says of its communicators, as lines of numbers for another one ---

RasRank describe(const Communicator& own) {
  RasRank rank;
  rank.rank = own.rank;
  rank.pid = getpid();
  rank.device = own.device;
  rank.init_state = own.ready ? ncclSuccess : ncclInProgress;
  rank.async_error = async_error(own);
  rank.finalize_called = own.finalized;
  rank.destroy_flag = own.aborted || own.destroyed;
  rank.abort_flag = own.aborted;
  std::copy(own.counts, own.counts + ras_functions, rank.counts);
  return rank;
}

std::string describe_process() {
  std::ostringstream out;
  std::vector<CommunicatorPointer> communicators;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    for (auto& [port, known] : state().peers)
      out << "peer " << known.peer.pid << ' ' << known.peer.device << ' ' << port << '\n';
    for (auto& weak : state().communicators)
      if (auto communicator = weak.lock()) communicators.push_back(communicator);
  }
  for (auto& communicator : communicators) {
    std::lock_guard<std::mutex> lock(communicator->mutex);
    RasRank rank = describe(*communicator);
    out << "communicator " << communicator->hash << ' ' << communicator->size << '\n';
    for (auto& member : communicator->peers)
      out << "member " << member.pid << ' ' << member.device << ' ' << member.port << '\n';
    out << "rank " << rank.rank << ' ' << rank.pid << ' ' << rank.device << ' ' << rank.init_state << ' '
        << rank.async_error << ' ' << rank.finalize_called << ' ' << rank.destroy_flag << ' ' << rank.abort_flag;
    for (uint64_t count : rank.counts) out << ' ' << count;
    out << '\n';
  }
  out << "end\n";
  return out.str();
}

// Adds what a process said to the report; false if it did not say all.
bool read_answer(const std::string& answer, RasReport& report, std::map<uint16_t, Peer>& peers) {
  std::istringstream in(answer);
  std::string word;
  RasCommunicator* communicator = nullptr;
  while (in >> word) {
    if (word == "end") return true;
    if (word == "peer" || word == "member") {
      Peer peer;
      in >> peer.pid >> peer.device >> peer.port;
      if (word == "peer") {
        peers.emplace(peer.port, peer);
      } else if (static_cast<int>(communicator->members.size()) < communicator->size) {
        communicator->members.push_back(peer);
      }
    } else if (word == "communicator") {
      uint64_t hash;
      int size;
      in >> hash >> size;
      communicator = &report.communicators[hash];
      communicator->hash = hash;
      communicator->size = size;
    } else if (word == "rank") {
      RasRank rank;
      in >> rank.rank >> rank.pid >> rank.device >> rank.init_state >> rank.async_error >> rank.finalize_called >>
          rank.destroy_flag >> rank.abort_flag;
      for (uint64_t& count : rank.counts) in >> count;
      communicator->ranks[rank.rank] = rank;
    }
  }
  return false;
}

// --- the thread that other processes ask, and that notices their end ---

void serve_peers(int listening) {
  pthread_setname_np(pthread_self(), "emulated-ras");
  std::vector<int> asking;
  for (;;) {
    std::vector<pollfd> descriptors = {{listening, POLLIN, 0}};
    for (int socket : asking) descriptors.push_back({socket, POLLIN, 0});
    size_t first_held = descriptors.size();
    std::vector<uint16_t> ports;
    {
      std::lock_guard<std::mutex> lock(state().mutex);
      for (auto& [port, known] : state().peers)
        if (known.connection >= 0) {
          descriptors.push_back({known.connection, POLLIN, 0});
          ports.push_back(port);
        }
    }
    poll(descriptors.data(), descriptors.size(), 200);  // new peers are looked for each time
    for (size_t k = first_held; k < descriptors.size(); k++) {
      if (!descriptors[k].revents) continue;
      std::lock_guard<std::mutex> lock(state().mutex);  // nothing is ever sent on it: it has ended
      Known& known = state().peers[ports[k - first_held]];
      close(known.connection);
      known.connection = -1;
      known.gone_at = Clock::now();
    }
    for (size_t k = 1; k < first_held; k++) {
      if (!descriptors[k].revents) continue;
      int socket = descriptors[k].fd;
      char question;
      if (recv(socket, &question, 1, MSG_DONTWAIT) == 1) {
        std::string answer = describe_process();
        (void)!send(socket, answer.data(), answer.size(), MSG_NOSIGNAL);
      }
      close(socket);
      asking.erase(std::find(asking.begin(), asking.end(), socket));
    }
    if (descriptors[0].revents) {
      int accepted = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
      if (accepted >= 0) asking.push_back(accepted);
    }
  }
}

// --- gathering, on behalf of a client ---

// Asks all of them at the same time; what does not answer until the deadline is unresponsive.
void ask(const std::vector<Peer>& peers, Clock::time_point deadline, RasReport& report,
         std::map<uint16_t, Peer>& found) {
  std::vector<int> sockets;
  for (auto& peer : peers) {
    int socket = connect_to_loopback(peer.port);
    if (socket >= 0) (void)!send(socket, "?", 1, MSG_NOSIGNAL);
    sockets.push_back(socket);
  }
  for (size_t k = 0; k < peers.size(); k++) {
    std::string answer;
    bool in_time = true;
    while (sockets[k] >= 0 && in_time) {
      auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
      pollfd descriptor{sockets[k], POLLIN, 0};
      in_time = poll(&descriptor, 1, static_cast<int>(std::max<long>(0, left))) > 0;
      char part[65536];
      ssize_t bytes = in_time ? recv(sockets[k], part, sizeof part, 0) : 0;
      if (bytes <= 0) break;
      answer.append(part, bytes);
    }
    if (!in_time) report.timeouts++;
    if (sockets[k] >= 0) close(sockets[k]);
    if (read_answer(answer, report, found)) report.responding.insert(peers[k].port);
  }
}

RasReport gather(double timeout) {
  RasReport report;
  auto start = Clock::now();
  auto deadline = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
  std::map<uint16_t, Peer> found;
  Peer own;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    own = state().own;
  }
  found[own.port] = own;
  read_answer(describe_process(), report, found);
  report.responding.insert(own.port);
  for (;;) {  // those that are asked may know others
    std::vector<Peer> fresh;
    for (auto& [port, peer] : found)
      if (!report.processes.count(port)) {
        report.processes[port] = peer;
        if (port != own.port) fresh.push_back(peer);
      }
    if (fresh.empty()) break;
    ask(fresh, deadline, report, found);
  }
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    for (auto& [port, known] : state().peers) {
      bool gone = known.connection < 0 && !report.responding.count(port);
      if (gone && Clock::now() - known.gone_at > std::chrono::duration<double>(dead_after_seconds * timeout_factor()))
        report.dead.insert(port);
    }
  }
  report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return report;
}

// --- clients ---

struct Client {
  int socket;
  double timeout = 5;  // RAS_COLLECTIVE_LEG_TIMEOUT
  bool json = false, verbose = false;

  void say(const std::string& text) {
    for (size_t sent = 0; sent < text.size();) {
      ssize_t bytes = send(socket, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (bytes <= 0) return;
      sent += bytes;
    }
  }
};

bool begins_with(const std::string& line, const char* word) { return !strncasecmp(line.c_str(), word, strlen(word)); }

// One command; false when the conversation is over: a status is answered once (rasClientEventLoop).
bool obey(Client& client, const std::string& line) {
  if (begins_with(line, "client protocol ")) {
    client.say("SERVER PROTOCOL 2\n");
  } else if (begins_with(line, "timeout ")) {
    std::string value = line.substr(strlen("timeout "));
    char* end = nullptr;
    long seconds = strtol(value.c_str(), &end, 10);
    if (seconds < 0 || *end) {
      client.say("ERROR: Invalid timeout value " + value + "\n");
    } else {
      client.timeout = seconds;
      client.say("OK\n");
    }
  } else if (begins_with(line, "set format ")) {
    std::string format = line.substr(strlen("set format "));
    bool known = !strcasecmp(format.c_str(), "json") || !strcasecmp(format.c_str(), "text");
    if (known) client.json = !strcasecmp(format.c_str(), "json");
    client.say(known ? "OK\n" : "ERROR: Invalid format " + format + "\n");
  } else if (!strcasecmp(line.c_str(), "status") || !strcasecmp(line.c_str(), "verbose status")) {
    client.verbose = begins_with(line, "verbose");
    RasReport report = gather(client.timeout > 0 ? client.timeout : 1e6);
    client.say(client.json ? ras_json(report) : ras_text(report, client.verbose));
    return false;
  } else {
    client.say("ERROR: Unknown command " + line + "\n");
  }
  return true;
}

void serve_client(int socket) {
  Client client{socket};
  std::string received;
  char part[1024];
  for (bool more = true; more;) {
    ssize_t bytes = recv(socket, part, sizeof part, 0);
    if (bytes <= 0) break;
    received.append(part, bytes);
    for (size_t end; more && (end = received.find('\n')) != std::string::npos;) {
      std::string line = received.substr(0, end);
      received.erase(0, end + 1);
      if (!line.empty() && line.back() == '\r') line.pop_back();
      more = obey(client, line);
    }
    if (received.size() >= sizeof part) break;  // no command is as long
  }
  close(socket);
}

void serve_clients(int listening) {
  pthread_setname_np(pthread_self(), "emulated-ras");
  for (;;) {
    int accepted = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    if (accepted >= 0) std::thread(serve_client, accepted).detach();
  }
}

// All processes of a node listen on the same address, and the kernel picks one of them for each client.
int listen_for_clients() {
  const char* address = getenv("NCCL_RAS_ADDR");
  std::string text = address ? address : "localhost:28028";
  size_t colon = text.rfind(':');
  if (colon == std::string::npos) return -1;
  addrinfo hints{}, *resolved = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_family = AF_INET;
  if (getaddrinfo(text.substr(0, colon).c_str(), text.c_str() + colon + 1, &hints, &resolved)) return -1;
  int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  setsockopt(listening, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
  if (bind(listening, resolved->ai_addr, resolved->ai_addrlen) || listen(listening, 1024)) {
    close(listening);
    listening = -1;
  }
  freeaddrinfo(resolved);
  return listening;
}

}  // namespace

Peer start_ras(int device) {
  const char* enable = getenv("NCCL_RAS_ENABLE");
  Peer own{getpid(), device, 0};
  if (enable && atoi(enable) != 1) return own;
  std::lock_guard<std::mutex> lock(state().mutex);
  if (state().started_by != getpid()) {
    int listening = listen_on_loopback(&own.port);
    if (listening < 0) return own;
    state().started_by = getpid();
    state().own = own;
    std::thread(serve_peers, listening).detach();
    int clients = listen_for_clients();
    if (clients >= 0) std::thread(serve_clients, clients).detach();
    log(Level::info, device,
        clients < 0 ? "RAS failed to establish a client listening socket" : "RAS listens for clients");
  }
  own.port = state().own.port;
  return own;
}

void add_to_ras(const CommunicatorPointer& communicator) {
  std::vector<Peer> fresh;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (state().started_by != getpid()) return;
    auto& all = state().communicators;
    all.erase(std::remove_if(all.begin(), all.end(), [](auto& weak) { return weak.expired(); }), all.end());
    all.push_back(communicator);
    for (auto& peer : communicator->peers)
      if (peer.port && peer.port != state().own.port && !state().peers.count(peer.port)) fresh.push_back(peer);
  }
  for (auto& peer : fresh) {
    int connection = connect_to_loopback(peer.port);
    std::lock_guard<std::mutex> lock(state().mutex);
    state().peers[peer.port] = {peer, connection, Clock::now()};
  }
}

void remove_from_ras(const Communicator* communicator) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto& all = state().communicators;
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](auto& weak) { return weak.expired() || weak.lock().get() == communicator; }),
            all.end());
}

}  // namespace emulated
