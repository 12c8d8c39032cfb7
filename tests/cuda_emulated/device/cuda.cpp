// A CUDA runtime + driver whose device is lazily mapped host memory: allocations, copies, streams
// and events are real, kernels do nothing. Enough for torch's CUDA build (2.11, cu130) and Triton's
// launcher.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>
#define X extern "C" __attribute__((visibility("default")))
static std::mutex mu;
static std::map<char*, size_t> device_memory;  // start -> size
static std::map<char*, size_t> pinned;         // cudaHostAlloc and cudaHostRegister
static std::map<char*, bool> registered;
static std::map<char*, char*> shadows;
static bool strict() {
  static bool v = !getenv("EMULATED_LAX");
  return v;
}
static size_t used = 0, peak = 0;
static std::atomic<long> launches{0}, copies{0}, triton_launches{0};
static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static size_t total() {
  const char* s = getenv("EMULATED_BYTES");
  return s ? strtoull(s, 0, 10) : 150109880320ull;
}
static size_t copy_limit() {
  static size_t v = [] {
    const char* s = getenv("EMULATED_COPY_LIMIT");
    return s ? strtoull(s, 0, 10) : (size_t)1 << 20;
  }();
  return v;
}
static bool trace() {
  static bool v = getenv("EMULATED_TRACE") != nullptr;
  return v;
}
static double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
#define TRACE(...)                              \
  do {                                          \
    if (trace()) {                              \
      fprintf(stderr, "[device] " __VA_ARGS__); \
      fputc('\n', stderr);                      \
    }                                           \
  } while (0)
static cudaError_t fail(cudaError_t e) {
  last_error = e;
  return e;
}
struct Stream {
  double t = 0;
  int priority = 0;
  int number = 0;
};
struct Event {
  double t = 0;
  bool recorded = false;
};
static Stream default_stream;
static std::atomic<int> stream_numbers{0};
static Stream& S(void* s) {
  return (s == nullptr || s == (void*)1 || s == (void*)2) ? default_stream : *(Stream*)s;
}
static void work(void* s, double seconds) {
  Stream& one = S(s);
  double n = now_s();
  one.t = (one.t > n ? one.t : n) + seconds;
}
static char* find(std::map<char*, size_t>& m, const void* p) {
  auto it = m.upper_bound((char*)p);
  if (it == m.begin()) return nullptr;
  --it;
  return (char*)p < it->first + it->second ? it->first : nullptr;
}
static void* real(const void* p) {
  std::lock_guard<std::mutex> l(mu);
  char* base = find(device_memory, p);
  return base ? shadows[base] + ((char*)p - base) : (void*)p;
}
// ---- device
X cudaError_t cudaGetDeviceCount(int* n) {
  *n = 1;
  return cudaSuccess;
}
X cudaError_t cudaGetDevice(int* d) {
  *d = current_device;
  return cudaSuccess;
}
X cudaError_t cudaSetDevice(int d) {
  current_device = d;
  return d == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
X cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H200");
  p->totalGlobalMem = total();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9;
  p->minor = 0;
  p->textureAlignment = 512;
  p->multiProcessorCount = 132;
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 6144;
  p->l2CacheSize = 62914560;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = 232448;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = 1;
  p->ECCEnabled = 1;
  return cudaSuccess;
}
static int attribute(int a) {
  switch (a) {
    case 1:
      return 1024;
    case 2:
    case 3:
      return 1024;
    case 4:
      return 64;
    case 5:
      return 2147483647;
    case 6:
    case 7:
      return 65535;
    case 8:
      return 49152;
    case 9:
      return 65536;
    case 10:
      return 32;
    case 12:
      return 65536;
    case 13:
      return 1980000;
    case 16:
      return 132;
    case 36:
      return 3201000;
    case 37:
      return 6144;
    case 38:
      return 62914560;
    case 39:
      return 2048;
    case 40:
      return 3;
    case 41:
      return 1;
    case 75:
      return 9;
    case 76:
      return 0;
    case 78:
      return 1;
    case 81:
      return 233472;
    case 82:
      return 65536;
    case 95:
      return 1;
    case 97:
      return 232448;
    case 106:
      return 32;
    case 111:
      return 1024;
    default:
      return 0;
  }
}
X cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr a, int) {
  *v = attribute(a);
  return cudaSuccess;
}
X cudaError_t cudaDeviceCanAccessPeer(int* v, int, int) {
  *v = 0;
  return cudaSuccess;
}
X cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return cudaSuccess;
}
X cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* p, int) {
  *p = (cudaMemPool_t)16;
  return cudaSuccess;
}
X cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int) {
  snprintf(s, n, "0000:00:04.0");
  return cudaSuccess;
}
X cudaError_t cudaDeviceGetStreamPriorityRange(int* lo, int* hi) {
  *lo = 0;
  *hi = -5;
  return cudaSuccess;
}
X cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
X cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
X cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
X cudaError_t cudaMemGetInfo(size_t* f, size_t* t) {
  std::lock_guard<std::mutex> l(mu);
  *t = total();
  *f = total() - used - (600ull << 20);
  return cudaSuccess;
}
// ---- errors
X const char* cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "out of memory"
         : e == cudaSuccess             ? "no error"
                                        : "emulated error";
}
X const char* cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
X cudaError_t cudaGetLastError() {
  auto e = last_error;
  last_error = cudaSuccess;
  return e;
}
X cudaError_t cudaPeekAtLastError() {
  return last_error;
}
// ---- memory
X cudaError_t cudaMalloc(void** p, size_t n) {
  std::lock_guard<std::mutex> l(mu);
  size_t rounded = (n + (2 << 20) - 1) / (2 << 20) * (2 << 20);
  if (used + rounded > total() - (600ull << 20)) {
    *p = nullptr;
    return fail(cudaErrorMemoryAllocation);
  }
  // Twice: what the program gets cannot be touched by the host, as on a GPU; the alias is for
  // copies.
  int fd = memfd_create("emulated_cuda", 0);
  if (ftruncate(fd, rounded)) {
    close(fd);
    return fail(cudaErrorMemoryAllocation);
  }
  char* m = (char*)mmap(nullptr, rounded, strict() ? PROT_NONE : PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE, fd, 0);
  char* shadow =
      (char*)mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  close(fd);
  shadows[m] = shadow;
  if (m == MAP_FAILED || shadow == MAP_FAILED) {
    *p = nullptr;
    return fail(cudaErrorMemoryAllocation);
  }
  device_memory[m] = rounded;
  used += rounded;
  if (used > peak) peak = used;
  *p = m;
  TRACE("malloc %zu -> %p", n, m);
  return cudaSuccess;
}
X cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  std::lock_guard<std::mutex> l(mu);
  auto it = device_memory.find((char*)p);
  if (it == device_memory.end()) return fail(cudaErrorInvalidValue);
  munmap(it->first, it->second);
  munmap(shadows[it->first], it->second);
  shadows.erase(it->first);
  used -= it->second;
  device_memory.erase(it);
  TRACE("free %p", p);
  return cudaSuccess;
}
X cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) {
  return cudaMalloc(p, n);
}
X cudaError_t cudaFreeAsync(void* p, cudaStream_t) {
  return cudaFree(p);
}
X cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) {
  std::lock_guard<std::mutex> l(mu);
  if (posix_memalign(p, 4096, n ? n : 1)) return fail(cudaErrorMemoryAllocation);
  pinned[(char*)*p] = n;
  TRACE("hostalloc %zu", n);
  return cudaSuccess;
}
X cudaError_t cudaFreeHost(void* p) {
  std::lock_guard<std::mutex> l(mu);
  pinned.erase((char*)p);
  free(p);
  return cudaSuccess;
}
X cudaError_t cudaHostRegister(void* p, size_t n, unsigned flags) {
  std::lock_guard<std::mutex> l(mu);
  TRACE("register %p %zu", p, n);
  if (getenv("EMULATED_NO_PIN")) return fail(cudaErrorMemoryAllocation);
  if (pinned.count((char*)p)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned[(char*)p] = n;
  registered[(char*)p] = true;
  return cudaSuccess;
}
X cudaError_t cudaHostUnregister(void* p) {
  std::lock_guard<std::mutex> l(mu);
  TRACE("unregister %p", p);
  if (!registered.count((char*)p)) return fail(cudaErrorHostMemoryNotRegistered);
  pinned.erase((char*)p);
  registered.erase((char*)p);
  return cudaSuccess;
}
X cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::lock_guard<std::mutex> l(mu);
  memset(a, 0, sizeof *a);
  if (find(device_memory, p)) {
    a->type = cudaMemoryTypeDevice;
    a->devicePointer = (void*)p;
  } else if (find(pinned, p)) {
    a->type = cudaMemoryTypeHost;
    a->hostPointer = a->devicePointer = (void*)p;
  } else
    a->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
static void move(void* d, const void* s, size_t n, void* stream, bool async) {
  copies++;
  bool dd, sd, pin;
  {
    std::lock_guard<std::mutex> l(mu);
    dd = find(device_memory, d);
    sd = find(device_memory, s);
    pin = find(pinned, dd ? s : d);
  }
  TRACE("copy %s->%s %zu B stream %d %s%s", dd ? "dev" : "host", sd ? "dev" : "host", n,
        S(stream).number, pin ? "pinned " : "", async ? "async" : "sync");
  if (n <= copy_limit()) memmove(real(d), real(s), n);
  work(stream, n / (dd && sd ? 2.0e12 : pin ? 55e9 : 10e9));
}
X cudaError_t cudaMemcpy(void* d, const void* s, size_t n, cudaMemcpyKind) {
  move(d, s, n, 0, false);
  return cudaSuccess;
}
X cudaError_t cudaMemcpyAsync(void* d, const void* s, size_t n, cudaMemcpyKind, cudaStream_t st) {
  move(d, s, n, st, true);
  return cudaSuccess;
}
X cudaError_t cudaMemcpyPeerAsync(void* d, int, const void* s, int, size_t n, cudaStream_t st) {
  move(d, s, n, st, true);
  return cudaSuccess;
}
X cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
X cudaError_t cudaMemset(void* d, int v, size_t n) {
  if (n <= copy_limit()) memset(real(d), v, n);
  return cudaSuccess;
}
X cudaError_t cudaMemsetAsync(void* d, int v, size_t n, cudaStream_t s) {
  if (n <= copy_limit()) memset(real(d), v, n);
  work(s, n / 3e12);
  return cudaSuccess;
}
X cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) {
  static std::map<const void*, void*> m;
  std::lock_guard<std::mutex> l(mu);
  if (!m.count(symbol)) m[symbol] = calloc(1, 1 << 16);
  *p = m[symbol];
  return cudaSuccess;
}
// ---- streams and events
X cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int p) {
  auto* one = new Stream;
  one->priority = p;
  one->number = ++stream_numbers;
  *s = (cudaStream_t)one;
  return cudaSuccess;
}
X cudaError_t cudaStreamCreate(cudaStream_t* s) {
  return cudaStreamCreateWithPriority(s, 0, 0);
}
X cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}
X cudaError_t cudaStreamQuery(cudaStream_t) {
  return cudaSuccess;
}
static void until(double t) {
  double d = t - now_s();
  if (d > 0) usleep((useconds_t)(d * 1e6));
}
X cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  until(S(s).t);
  TRACE("sync stream %d", S(s).number);
  return cudaSuccess;
}
X cudaError_t cudaStreamGetPriority(cudaStream_t s, int* p) {
  *p = S(s).priority;
  return cudaSuccess;
}
X cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
  Stream& st = S(s);
  if (((Event*)e)->t > st.t) st.t = ((Event*)e)->t;
  TRACE("stream %d waits event %p", st.number, e);
  return cudaSuccess;
}
X cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* c) {
  *c = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
X cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* c,
                                       unsigned long long* id, cudaGraph_t*,
                                       const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                       size_t*) {
  *c = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}
X cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* d, unsigned) {
  f(s, cudaSuccess, d);
  return cudaSuccess;
}
X cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* d) {
  f(d);
  return cudaSuccess;
}
X cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
X cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return fail(cudaErrorNotSupported);
}
X cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
  return fail(cudaErrorNotSupported);
}
X cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
  *e = (cudaEvent_t) new Event;
  return cudaSuccess;
}
X cudaError_t cudaEventCreate(cudaEvent_t* e) {
  return cudaEventCreateWithFlags(e, 0);
}
X cudaError_t cudaEventDestroy(cudaEvent_t e) {
  delete (Event*)e;
  return cudaSuccess;
}
X cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  auto* ev = (Event*)e;
  double n = now_s(), t = S(s).t;
  ev->t = t > n ? t : n;
  ev->recorded = true;
  TRACE("record event %p on stream %d", e, S(s).number);
  return cudaSuccess;
}
X cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) {
  return cudaEventRecord(e, s);
}
X cudaError_t cudaEventQuery(cudaEvent_t) {
  return cudaSuccess;
}
X cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  until(((Event*)e)->t);
  return cudaSuccess;
}
X cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t a, cudaEvent_t b) {
  double d = (((Event*)b)->t - ((Event*)a)->t) * 1e3;
  *ms = d > 1e-3 ? (float)d : 1e-3f;
  return cudaSuccess;
}
// ---- kernels
static std::map<const void*, std::string> names;
static thread_local std::vector<std::tuple<dim3, dim3, size_t, void*>> configuration;
static void* fat_handle[4];
X void** __cudaRegisterFatBinary(void*) {
  return fat_handle;
}
X void __cudaRegisterFatBinaryEnd(void**) {}
X void __cudaUnregisterFatBinary(void**) {}
X void __cudaRegisterFunction(void**, const char* f, char*, const char* name, int, uint3*, uint3*,
                              dim3*, dim3*, int*) {
  names[f] = name;
}
X void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
X unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, struct CUstream_st* st) {
  configuration.emplace_back(g, b, s, st);
  return 0;
}
X cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* s, void* st) {
  auto& c = configuration.back();
  *g = std::get<0>(c);
  *b = std::get<1>(c);
  *s = std::get<2>(c);
  *(void**)st = std::get<3>(c);
  configuration.pop_back();
  return cudaSuccess;
}
X cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) {
  *k = (cudaKernel_t)f;
  return cudaSuccess;
}
X cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void**, size_t, cudaStream_t s) {
  launches++;
  if (trace()) {
    auto it = names.find((const void*)k);
    TRACE("kernel %.90s on stream %d", it == names.end() ? "?" : it->second.c_str(), S(s).number);
  }
  work(s, 5e-6);
  return cudaSuccess;
}
X cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void*, void**) {
  launches++;
  work(c->stream, 5e-6);
  return cudaSuccess;
}
X cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t s) {
  launches++;
  work(s, 5e-6);
  return cudaSuccess;
}
X cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 32;
  a->ptxVersion = a->binaryVersion = 90;
  a->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
X cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
X cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int,
                                                                     size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
X cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) {
  *n = 2;
  return cudaSuccess;
}
X cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}
X cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}
X cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* v) {
  *(uint64_t*)v = 0;
  return cudaSuccess;
}
X cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
X cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}
X cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) {
  return cudaSuccess;
}
// ---- driver
X CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}
X CUresult cuDriverGetVersion(int* v) {
  *v = 13000;
  return CUDA_SUCCESS;
}
X CUresult cuDeviceGet(CUdevice* d, int n) {
  *d = n;
  return CUDA_SUCCESS;
}
X CUresult cuDeviceGetCount(int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}
X CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  *v = attribute(a);
  return CUDA_SUCCESS;
}
X CUresult cuCtxGetCurrent(CUcontext* c) {
  *c = (CUcontext)32;
  return CUDA_SUCCESS;
}
X CUresult cuCtxSetCurrent(CUcontext) {
  return CUDA_SUCCESS;
}
X CUresult cuCtxGetDevice(CUdevice* d) {
  *d = 0;
  return CUDA_SUCCESS;
}
X CUresult cuCtxGetLimit(size_t* v, CUlimit) {
  *v = 1 << 20;
  return CUDA_SUCCESS;
}
X CUresult cuCtxSetLimit(CUlimit, size_t) {
  return CUDA_SUCCESS;
}
X CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  *c = (CUcontext)32;
  return CUDA_SUCCESS;
}
X CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* f, int* a) {
  *f = 0;
  *a = 1;
  return CUDA_SUCCESS;
}
X CUresult cuGetErrorString(CUresult, const char** s) {
  *s = "emulated driver error";
  return CUDA_SUCCESS;
}
X CUresult cuGetErrorName(CUresult, const char** s) {
  *s = "emulated";
  return CUDA_SUCCESS;
}
X CUresult cuModuleLoad(CUmodule* m, const char*) {
  *m = (CUmodule)48;
  return CUDA_SUCCESS;
}
X CUresult cuModuleLoadData(CUmodule* m, const void*) {
  *m = (CUmodule)48;
  return CUDA_SUCCESS;
}
X CUresult cuModuleLoadDataEx(CUmodule* m, const void*, unsigned, CUjit_option*, void**) {
  *m = (CUmodule)48;
  return CUDA_SUCCESS;
}
X CUresult cuModuleUnload(CUmodule) {
  return CUDA_SUCCESS;
}
X CUresult cuModuleGetFunction(CUfunction* f, CUmodule, const char* name) {
  *f = (CUfunction)strdup(name);
  return CUDA_SUCCESS;
}
X CUresult cuFuncGetAttribute(int* v, CUfunction_attribute a, CUfunction) {
  *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS                ? 32
       : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                      : 0;
  return CUDA_SUCCESS;
}
X CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}
X CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) {
  return CUDA_SUCCESS;
}
X CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, CUstream s, void**, void**) {
  triton_launches++;
  TRACE("triton %s on stream %d", (char*)f, S(s).number);
  work(s, 5e-6);
  return CUDA_SUCCESS;
}
X CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  triton_launches++;
  TRACE("triton %s on stream %d", (char*)f, S(c->hStream).number);
  work(c->hStream, 5e-6);
  return CUDA_SUCCESS;
}
X CUresult cuLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                     unsigned, unsigned, CUstream s, void**) {
  work(s, 5e-6);
  return CUDA_SUCCESS;
}
X CUresult cuLinkAddData_v2(CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned,
                            CUjit_option*, void**) {
  return CUDA_SUCCESS;
}
X CUresult cuLinkComplete(CUlinkState, void** p, size_t* n) {
  static char c;
  *p = &c;
  *n = 1;
  return CUDA_SUCCESS;
}
X CUresult cuLinkCreate_v2(unsigned, CUjit_option*, void**, CUlinkState*) {
  return CUDA_SUCCESS;
}
X CUresult cuLinkDestroy(CUlinkState) {
  return CUDA_SUCCESS;
}
X CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}
X CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction, const CUlaunchConfig*) {
  *n = 8;
  return CUDA_SUCCESS;
}
X CUresult cuPointerGetAttribute(void* v, CUpointer_attribute a, CUdeviceptr p) {
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *(CUdeviceptr*)v = p;
    return CUDA_SUCCESS;
  }
  if (a == CU_POINTER_ATTRIBUTE_CONTEXT) {
    *(CUcontext*)v = (CUcontext)32;
    return CUDA_SUCCESS;
  }
  *(unsigned*)v = 2;
  return CUDA_SUCCESS;
}
X CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                  const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                  const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}
#include <dlfcn.h>
static CUresult unsupported() {
  return CUDA_ERROR_NOT_SUPPORTED;
}
X cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned,
                                               unsigned long long,
                                               cudaDriverEntryPointQueryResult* status) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (!*f) *f = (void*)unsupported;
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
X void memo_emulated_counts(long* out) {
  out[0] = launches;
  out[1] = triton_launches;
  out[2] = copies;
  out[3] = (long)used;
  out[4] = (long)peak;
}
