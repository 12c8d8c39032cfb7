// Device memory, pinned host memory, copies.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"

static constexpr size_t GRANULE_BYTES = 2 << 20;
static constexpr size_t STAGED_BYTES = 64 << 10;  // pageable copies up to here do not wait

struct Allocation {
  size_t size;
  char* shadow;
};
static std::mutex mutex;
static std::map<char*, Allocation> device_memory;
static std::map<char*, size_t> pinned;  // cudaHostAlloc and cudaHostRegister
static std::map<char*, bool> registered;
static size_t used = 0, peak = 0;
static std::atomic<size_t> limit_bytes{0};  // 0: as the environment says
static std::atomic<long> copies{0}, host_copies{0};

static size_t number_in(const char* variable, size_t otherwise) {
  const char* text = getenv(variable);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}
// Requests for memory since memo_device_refuse, and from which of them on none is granted.
static std::atomic<long> requests{0}, first_refused{-1}, num_refused{-1};
static bool is_refused() {
  long number = requests++, first = first_refused, after = num_refused;
  return first >= 0 && number >= first && (after < 0 || number < first + after);
}
size_t total_bytes() {
  static size_t declared = number_in("EMULATED_BYTES", kind_bytes());
  size_t limit = limit_bytes;
  return limit ? limit : declared;
}
static size_t copy_limit() {
  static size_t limit = number_in("EMULATED_COPY_LIMIT", 1 << 20);
  return limit;
}
size_t used_bytes() {
  std::lock_guard<std::mutex> hold(mutex);
  return used;
}
size_t peak_bytes() {
  std::lock_guard<std::mutex> hold(mutex);
  return peak;
}
long num_copies() {
  return copies;
}
long num_host_copies() {
  return host_copies;
}

template <typename Value, typename Size>
static typename std::map<char*, Value>::iterator around(std::map<char*, Value>& ranges,
                                                        const void* address, Size size) {
  auto found = ranges.upper_bound((char*)address);
  if (found == ranges.begin()) return ranges.end();
  --found;
  return (char*)address < found->first + size(found->second) ? found : ranges.end();
}
static auto on_device(const void* address) {
  return around(device_memory, address, [](const Allocation& one) { return one.size; });
}
static auto in_pinned(const void* address) {
  return around(pinned, address, [](size_t size) { return size; });
}
Place place_of(const void* address) {
  std::lock_guard<std::mutex> hold(mutex);
  return {on_device(address) != device_memory.end(), in_pinned(address) != pinned.end()};
}
// True for bytes of which only the first lie in the pinned memory around them: CUDA copies none.
static bool leaves_pinned(const void* start, size_t size) {
  std::lock_guard<std::mutex> hold(mutex);
  auto found = in_pinned(start);
  return found != pinned.end() && (char*)start + size > found->first + found->second;
}
void* shadow_of(const void* address) {
  std::lock_guard<std::mutex> hold(mutex);
  auto found = on_device(address);
  if (found == device_memory.end()) return (void*)address;
  return found->second.shadow + ((char*)address - found->first);
}

void keep_place(char* start, size_t size, char* shadow) {
  std::lock_guard<std::mutex> hold(mutex);
  device_memory[start] = {size, shadow};
}
void drop_place(char* start) {
  std::lock_guard<std::mutex> hold(mutex);
  device_memory.erase(start);
}
bool take_bytes(size_t size) {
  if (is_refused()) return false;
  std::lock_guard<std::mutex> hold(mutex);
  if (used + size + CONTEXT_BYTES > total_bytes()) return false;
  used += size;
  if (used > peak) peak = used;
  return true;
}
void give_bytes(size_t size) {
  std::lock_guard<std::mutex> hold(mutex);
  used -= size;
}

// ---- allocation
X cudaError_t cudaMalloc(void** made, size_t size) {
  std::lock_guard<std::mutex> hold(mutex);
  *made = nullptr;
  if (!size) return cudaSuccess;
  size_t rounded = (size + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES;
  if (is_refused() || used + rounded + CONTEXT_BYTES > total_bytes())
    return fail(cudaErrorMemoryAllocation);
  int file = memfd_create("emulated_cuda", 0);
  if (file < 0 || ftruncate(file, rounded)) {
    if (file >= 0) close(file);
    return fail(cudaErrorMemoryAllocation);
  }
  int flags = MAP_SHARED | MAP_NORESERVE;
  char* seen = (char*)mmap(nullptr, rounded, PROT_NONE, flags, file, 0);
  char* shadow = (char*)mmap(nullptr, rounded, PROT_READ | PROT_WRITE, flags, file, 0);
  close(file);
  if (seen == MAP_FAILED || shadow == MAP_FAILED) {
    if (seen != MAP_FAILED) munmap(seen, rounded);
    if (shadow != MAP_FAILED) munmap(shadow, rounded);
    return fail(cudaErrorMemoryAllocation);
  }
  device_memory[seen] = {rounded, shadow};
  used += rounded;
  if (used > peak) peak = used;
  *made = seen;
  TRACE("malloc %zu -> %p", size, seen);
  return cudaSuccess;
}
X cudaError_t cudaFree(void* start) {
  if (!start) return cudaSuccess;
  synchronize_all();  // as CUDA does
  std::lock_guard<std::mutex> hold(mutex);
  auto found = device_memory.find((char*)start);
  if (found == device_memory.end()) return fail(cudaErrorInvalidValue);
  auto [size, shadow] = found->second;
  log_did(Did::FREE, nullptr, start, nullptr, size);
  munmap(start, size);
  munmap(shadow, size);
  used -= size;
  device_memory.erase(found);
  TRACE("free %p", start);
  return cudaSuccess;
}
X cudaError_t cudaMallocAsync(void** made, size_t size, cudaStream_t) {
  return cudaMalloc(made, size);
}
X cudaError_t cudaFreeAsync(void* start, cudaStream_t) {
  return cudaFree(start);
}
X cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> hold(mutex);
  size_t taken = used + CONTEXT_BYTES;
  *total = total_bytes();
  *free_bytes = *total > taken ? *total - taken : 0;
  return cudaSuccess;
}
// The device has so many bytes from now on, its context's included; 0: as at first.
X void memo_device_limit(size_t bytes) {
  limit_bytes = bytes;
}
// Of the requests for device or pinned memory from now on, `first` is refused (0: the next) and
// those after it, `number` in all; a negative number: all of them. A negative first: none.
X void memo_device_refuse(long first, long number) {
  first_refused = first;
  num_refused = number;
  requests = 0;
}
X long memo_device_requests() {
  return requests;
}

// ---- host memory
static bool refuses_to_pin() {
  return getenv("EMULATED_NO_PIN") != nullptr;
}
X cudaError_t cudaHostAlloc(void** made, size_t size, unsigned) {
  std::lock_guard<std::mutex> hold(mutex);
  if (is_refused() || posix_memalign(made, 4096, size ? size : 1))
    return fail(cudaErrorMemoryAllocation);
  pinned[(char*)*made] = size;
  TRACE("hostalloc %zu", size);
  return cudaSuccess;
}
X cudaError_t cudaFreeHost(void* start) {
  synchronize_all();
  std::lock_guard<std::mutex> hold(mutex);
  pinned.erase((char*)start);
  free(start);
  return cudaSuccess;
}
X cudaError_t cudaHostRegister(void* start, size_t size, unsigned) {
  std::lock_guard<std::mutex> hold(mutex);
  TRACE("register %p %zu", start, size);
  if (is_refused() || refuses_to_pin()) return fail(cudaErrorMemoryAllocation);
  if (pinned.count((char*)start)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned[(char*)start] = size;
  registered[(char*)start] = true;
  return cudaSuccess;
}
// CUDA does not promise to wait here: the log says that a copy in flight has lost its memory.
X cudaError_t cudaHostUnregister(void* start) {
  TRACE("unregister %p", start);
  log_did(Did::FREE, nullptr, start, nullptr, place_of(start).is_pinned ? pinned[(char*)start] : 0);
  synchronize_all();  // so that this process lives on
  std::lock_guard<std::mutex> hold(mutex);
  if (!registered.count((char*)start)) return fail(cudaErrorHostMemoryNotRegistered);
  pinned.erase((char*)start);
  registered.erase((char*)start);
  return cudaSuccess;
}
X cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  Place place = place_of(address);
  memset(found, 0, sizeof *found);
  found->type = place.on_device   ? cudaMemoryTypeDevice
                : place.is_pinned ? cudaMemoryTypeHost
                                  : cudaMemoryTypeUnregistered;
  if (place.on_device || place.is_pinned) found->devicePointer = (void*)address;
  if (place.is_pinned) found->hostPointer = (void*)address;
  return cudaSuccess;
}
X long memo_device_pinned_bytes() {
  std::lock_guard<std::mutex> hold(mutex);
  long sum = 0;
  for (auto& [start, size] : pinned) sum += size;
  return sum;
}
// What the device reads and writes at `address`: for a test that stands in for a kernel.
X void* memo_device_shadow(const void* address) {
  return shadow_of(address);
}

// ---- copies
// A copy between the device and pageable memory holds the host up, unless it is small and goes to
// the device: then it is made from a copy of its source.
static cudaError_t copy(void* to, const void* from, size_t size, void* stream, bool async) {
  Place target = place_of(to), source = place_of(from);
  bool crosses = target.on_device != source.on_device;
  if (crosses && leaves_pinned(target.on_device ? from : to, size))
    return fail(cudaErrorInvalidValue);
  bool is_pinned = crosses && (target.on_device ? source.is_pinned : target.is_pinned);
  if (is_captured(stream) && (!async || (crosses && !is_pinned)))
    return forbid(cudaErrorStreamCaptureUnsupported);
  TRACE("copy %s->%s %zu B stream %d %s%s", target.on_device ? "dev" : "host",
        source.on_device ? "dev" : "host", size, number_of(stream), is_pinned ? "pinned " : "",
        async ? "async" : "sync");
  copies++;
  if (crosses) host_copies++;
  bool is_staged = crosses && !is_pinned && target.on_device && size <= STAGED_BYTES;
  Logged logged{is_staged ? Did::FILL : Did::COPY, to, is_staged ? nullptr : from, size};
  bool is_made = size <= copy_limit();
  void* written = shadow_of(to);
  double speed = !crosses    ? COPY_ON_DEVICE_BYTES_PER_S
                 : is_pinned ? pinned_bytes_per_s()
                             : PAGEABLE_BYTES_PER_S;
  if (is_staged) {
    std::vector<char> staged((const char*)from, (const char*)from + size);
    enqueue(stream, size / speed, logged,
            [written, staged] { memcpy(written, staged.data(), staged.size()); });
  } else {
    const void* read = shadow_of(from);
    enqueue(stream, size / speed, logged, [=] {
      if (is_made) memmove(written, read, size);
    });
    if (crosses && !is_pinned) synchronize(stream);
  }
  if (!async) synchronize(stream);
  return cudaSuccess;
}
X cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return copy(to, from, size, nullptr, false);
}
X cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind,
                              cudaStream_t stream) {
  return copy(to, from, size, stream, true);
}
X cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size,
                                  cudaStream_t stream) {
  return copy(to, from, size, stream, true);
}
X cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
X cudaError_t cudaMemsetAsync(void* start, int value, size_t size, cudaStream_t stream) {
  void* written = shadow_of(start);
  bool is_made = size <= copy_limit();
  enqueue(stream, size / FILL_BYTES_PER_S, {Did::FILL, start, nullptr, size}, [=] {
    if (is_made) memset(written, value, size);
  });
  return cudaSuccess;
}
X cudaError_t cudaMemset(void* start, int value, size_t size) {
  return cudaMemsetAsync(start, value, size, nullptr);
}
X cudaError_t cudaGetSymbolAddress(void** found, const void* symbol) {
  static std::map<const void*, void*> symbols;
  std::lock_guard<std::mutex> hold(mutex);
  if (!symbols.count(symbol)) symbols[symbol] = calloc(1, 1 << 16);
  *found = symbols[symbol];
  return cudaSuccess;
}
