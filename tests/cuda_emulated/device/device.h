// The emulated device, as its parts see it: memory.cpp, virtual.cpp, streams.cpp, kernels.cpp,
// queries.cpp, driver.cpp. Together they are a CUDA runtime and driver, enough for torch's CUDA build (2.11,
// cu130) and Triton's launcher.
//
// Memory is lazily mapped host memory. The addresses that a program gets cannot be touched by the
// host, as on a GPU; the device itself uses a second mapping of the same pages, their shadow.
//
// Streams are queues. Copies, fills and host functions really run, in their stream's order and
// after the events that it waits for: at once, or as late as the host allows
// (memo_device_schedule). Kernels do nothing, unless a test puts a function in their place
// (memo_device_call).
//
// Time is virtual, so that a busy machine changes nothing: each call moves the host's clock a
// little, each piece of work its stream's clock, a wait joins two clocks. Where the host waits it
// sleeps as well, so that clocks of the program are not ahead of the device.
//
// Variables: EMULATED_KIND (h200, a100, b200), EMULATED_BYTES (device memory), EMULATED_COPY_LIMIT
// (the largest copy that is made), EMULATED_NO_PIN (refuse to register host memory),
// EMULATED_TRACE (print every call).
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#define X extern "C" __attribute__((visibility("default")))

constexpr size_t CONTEXT_BYTES = 600ull << 20;  // what a real driver keeps for itself
constexpr double KERNEL_S = 5e-6, PINNED_BYTES_PER_S = 55e9;  // unless memo_device_speeds says more
constexpr double COPY_ON_DEVICE_BYTES_PER_S = 2e12, FILL_BYTES_PER_S = 3e12;
constexpr double PAGEABLE_BYTES_PER_S = 10e9;

bool traces();
#define TRACE(...)                              \
  do {                                          \
    if (traces()) {                             \
      fprintf(stderr, "[device] " __VA_ARGS__); \
      fputc('\n', stderr);                      \
    }                                           \
  } while (0)

cudaError_t fail(cudaError_t error);  // the thread's last error

// ---- memory.cpp
struct Place {
  bool on_device, is_pinned;
};
Place place_of(const void* address);
void* shadow_of(const void* address);  // where the device reads and writes it
void keep_place(char* start, size_t size, char* shadow);  // of the device, filled later
void drop_place(char* start);
bool take_bytes(size_t size);  // false: the device has no more
void give_bytes(size_t size);
size_t total_bytes();
size_t used_bytes();
size_t peak_bytes();
long num_host_copies();
long num_copies();

// ---- streams.cpp
// What happened, in the host's order, for a checker (tests/cuda_emulated/order.py has the names).
enum class Did : int32_t {
  COPY,         // a: destination, b: source, c: bytes
  FILL,         // a: start, c: bytes
  LAUNCH,       // a kernel
  RECORD,       // a: event
  WAIT,         // a: event
  SYNC_STREAM,  // the host waited
  SYNC_EVENT,   // a: event; the host waited, or was told that it has passed
  SYNC_ALL,
  FREE,  // a: start, c: bytes
  READ,  // a: start, c: bytes; said by the program itself (memo_device_says)
  WRITE,
  MARK,  // a: whatever the program says
};
void log_did(Did did, void* stream, const void* a, const void* b, size_t c);
int number_of(void* stream);
bool is_captured(void* stream);          // into a CUDA graph
cudaError_t forbid(cudaError_t error);  // what a capture does not allow: it is invalid now

struct Logged {
  Did did;
  const void *a, *b;
  size_t c;
};
// Work for a stream, and its line in the log, at the same place in the order; run may be empty.
void enqueue(void* stream, double seconds, const Logged& logged, std::function<void()> run);
double kernel_s();
double pinned_bytes_per_s();
void synchronize(void* stream);
void synchronize_all();

// ---- kernels.cpp
long num_launches();
long num_triton_launches();

// ---- queries.cpp
size_t kind_bytes();
int attribute(int which);
