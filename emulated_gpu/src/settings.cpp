// Reads the knobs from the environment and lets a running process change them.
#include "settings.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

extern char** environ;

namespace emulated {
namespace {

struct Knob {
  const char* name;
  std::atomic<double> Settings::*value;
};

constexpr Knob knobs[] = {
    {"EMULATED_GPUS", &Settings::gpus},
    {"EMULATED_CUDA_MEMORY_MB", &Settings::cuda_memory_mb},
    {"EMULATED_CUDA_QUEUE", &Settings::cuda_queue},
    {"EMULATED_CUDA_VERBOSE", &Settings::cuda_verbose},
    {"EMULATED_CUDA_ERROR", &Settings::cuda_error},
    {"EMULATED_CUDA_ERROR_AT", &Settings::cuda_error_at},
    {"EMULATED_CUDA_ENDLESS_KERNEL_AT", &Settings::cuda_endless_kernel_at},
    {"EMULATED_CUDA_OUT_OF_MEMORY_AT", &Settings::cuda_out_of_memory_at},
    {"EMULATED_CUDA_LOST", &Settings::cuda_lost},
    {"EMULATED_NCCL_VERBOSE", &Settings::nccl_verbose},
    {"EMULATED_NCCL_LINK_MBPS", &Settings::nccl_link_mbps},
    {"EMULATED_NCCL_RUNTIME_CONNECT", &Settings::nccl_runtime_connect},
    {"EMULATED_NCCL_FREE_MS", &Settings::nccl_free_ms},
    {"EMULATED_NCCL_DEATH_UNNOTICED", &Settings::nccl_death_unnoticed},
    {"EMULATED_NCCL_ABORT_HANGS_S", &Settings::nccl_abort_hangs_s},
    {"EMULATED_NCCL_CONNECT_FAILS_AT", &Settings::nccl_connect_fails_at},
    {"EMULATED_NCCL_LINK_STALLS_AT", &Settings::nccl_link_stalls_at},
    {"EMULATED_NCCL_LINK_STALLS_AFTER_BYTES", &Settings::nccl_link_stalls_after_bytes},
    {"EMULATED_NCCL_LINK_DROPS_AT", &Settings::nccl_link_drops_at},
    {"EMULATED_NCCL_LINK_DROPS_AFTER_BYTES", &Settings::nccl_link_drops_after_bytes},
    {"EMULATED_NCCL_CRASH_ON_USE_AFTER_FREE", &Settings::nccl_crash_on_use_after_free},
};

constexpr const char* speeds = "EMULATED_CUDA_SPEEDS";

// "1,1,0.25": the speed of each device; the last one holds for those after it too.
bool parse_speeds(Settings& into, const char* text) {
  double last = 1;
  for (int device = 0; device < max_devices; device++) {
    if (*text) {
      char* end;
      last = strtod(text, &end);
      if (end == text || last <= 0 || (*end && *end != ',')) return false;
      text = *end ? end + 1 : end;
    }
    into.cuda_speed[device] = last;
  }
  return true;
}

// Null if the value was taken, otherwise what is wrong.
const char* assign(Settings& into, const char* name, const char* text) {
  if (!strcmp(name, speeds)) return parse_speeds(into, text) ? nullptr : "takes positive numbers with commas between them";
  for (const Knob& knob : knobs) {
    if (strcmp(name, knob.name)) continue;
    char* end;
    double value = strtod(text, &end);
    if (end == text || *end || value < 0) return "takes a number that is not negative";
    if (knob.value == &Settings::gpus && (value > max_devices || value != static_cast<int>(value)))
      return "takes a whole number up to 16";
    into.*knob.value = value;
    return nullptr;
  }
  return "is no setting of the emulated GPU; emulated_gpu/README.md has the list";
}

}  // namespace

Settings::Settings() {
  for (auto& speed : cuda_speed) speed = 1;
}

void Settings::read_environment() {
  for (char** variable = environ; *variable; variable++) {
    if (strncmp(*variable, "EMULATED_", 9)) continue;
    const char* equals = strchr(*variable, '=');
    if (!equals) continue;
    std::string name(*variable, equals - *variable);
    if (const char* wrong = assign(*this, name.c_str(), equals + 1))
      fprintf(stderr, "emulated GPU: %s=%s is ignored: it %s\n", name.c_str(), equals + 1, wrong);
  }
}

// Read at the first use in each process: one that is forked for a rank, by a process that has loaded the library and never
// used it, may have set variables in between.
Settings& settings() {
  static Settings* only = new Settings;  // never destroyed: threads of streams outlive main
  static std::atomic<pid_t> read_by{0};
  if (read_by != getpid()) {
    static std::mutex* mutex = new std::mutex;
    std::lock_guard<std::mutex> lock(*mutex);
    if (read_by != getpid()) only->read_environment();
    read_by = getpid();
  }
  return *only;
}

bool falls_due(std::atomic<double>& occasions) {
  double left = occasions;
  while (left > 0)
    if (occasions.compare_exchange_weak(left, left - 1)) return left <= 1;
  return false;
}

bool used_up(std::atomic<double>& amount, double used) {
  constexpr double nothing_left = 0.5;  // no whole number: 0 would mean that the knob is off
  double left = amount;
  while (left > nothing_left)
    if (amount.compare_exchange_weak(left, left > used ? left - used : nothing_left)) return left <= used;
  return left == nothing_left;
}

}  // namespace emulated

// For the Python module of the emulator: null, or why the setting was refused.
extern "C" EMULATED_EXPORT const char* emulated_gpu_set(const char* name, const char* value) {
  return emulated::assign(emulated::settings(), name, value);
}
