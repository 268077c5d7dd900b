// The knobs of the emulator: what it pretends to be, and which faults it plays.
//
// Each is an environment variable, read at the first use in each process; a running process changes one with
// `emulated_gpu.set(name, value)`. README.md has the table of what they mean.
#pragma once

#include <atomic>
#include <cstdint>

#define EMULATED_EXPORT __attribute__((visibility("default")))

namespace emulated {

constexpr int max_devices = 16;

struct Settings {
  // What the machine is.
  std::atomic<double> gpus{1};
  std::atomic<double> cuda_memory_mb{81559};
  std::atomic<double> cuda_queue{1024};
  std::atomic<double> cuda_speed[max_devices];
  std::atomic<double> cuda_verbose{0};
  std::atomic<double> nccl_verbose{0};
  std::atomic<double> nccl_link_mbps{0};
  std::atomic<double> nccl_runtime_connect{1};
  std::atomic<double> nccl_free_ms{20};
  // Faults of the device. A count of 0 means never; 1 is the next one.
  std::atomic<double> cuda_error{700};
  std::atomic<double> cuda_error_at{0};
  std::atomic<double> cuda_endless_kernel_at{0};
  std::atomic<double> cuda_out_of_memory_at{0};
  std::atomic<double> cuda_lost{0};
  // Faults of NCCL and its links.
  std::atomic<double> nccl_death_unnoticed{0};
  std::atomic<double> nccl_abort_hangs_s{0};
  std::atomic<double> nccl_connect_fails_at{0};
  std::atomic<double> nccl_link_stalls_at{0};
  std::atomic<double> nccl_link_stalls_after_bytes{0};
  std::atomic<double> nccl_link_drops_at{0};
  std::atomic<double> nccl_link_drops_after_bytes{0};
  std::atomic<double> nccl_crash_on_use_after_free{0};

  Settings();
  void read_environment();
};

EMULATED_EXPORT Settings& settings();

// Counts down a knob such as cuda_error_at; true on the occasion that it named.
EMULATED_EXPORT bool falls_due(std::atomic<double>& occasions);

// Uses up a number of bytes or allocations: true once there are none left, and from then on until the knob is set anew.
EMULATED_EXPORT bool used_up(std::atomic<double>& amount, double used);

}  // namespace emulated
