// What the device says of itself: an H200, or what EMULATED_KIND names. And the errors of a thread.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "device.h"

static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

struct Kind {
  const char *id, *name;
  int major, minor, processors, l2_bytes, shared_bytes;
  size_t bytes;
};
static const Kind KINDS[] = {
    {"h200", "NVIDIA H200", 9, 0, 132, 62914560, 233472, 150109880320ull},
    {"a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 41943040, 167936, 85097971712ull},
    {"b200", "NVIDIA B200", 10, 0, 148, 132644864, 233472, 191505629184ull},
};
static const Kind& kind() {
  static const Kind* found = [] {
    const char* wanted = getenv("EMULATED_KIND");
    for (auto& one : KINDS)
      if (wanted && !strcmp(wanted, one.id)) return &one;
    return &KINDS[0];
  }();
  return *found;
}
size_t kind_bytes() {
  return kind().bytes;
}
bool traces() {
  static bool on = getenv("EMULATED_TRACE") != nullptr;
  return on;
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
  strcpy(p->name, kind().name);
  p->totalGlobalMem = total_bytes();
  p->sharedMemPerBlock = 49152;
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = kind().major;
  p->minor = kind().minor;
  p->textureAlignment = 512;
  p->multiProcessorCount = kind().processors;
  p->unifiedAddressing = 1;
  p->concurrentKernels = 1;
  p->asyncEngineCount = 3;
  p->memoryBusWidth = 6144;
  p->l2CacheSize = kind().l2_bytes;
  p->maxThreadsPerMultiProcessor = 2048;
  p->streamPrioritiesSupported = 1;
  p->sharedMemPerMultiprocessor = kind().shared_bytes;
  p->regsPerMultiprocessor = 65536;
  p->managedMemory = 1;
  p->cooperativeLaunch = 1;
  p->sharedMemPerBlockOptin = kind().shared_bytes - 1024;
  p->maxBlocksPerMultiProcessor = 32;
  p->reservedSharedMemPerBlock = 1024;
  p->hostRegisterSupported = 1;
  p->ECCEnabled = 1;
  return cudaSuccess;
}
int attribute(int which) {
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: return 1024;
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrTotalConstantMemory: return 65536;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return kind().processors;
    case cudaDevAttrMemoryClockRate: return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth: return 6144;
    case cudaDevAttrL2CacheSize: return kind().l2_bytes;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrAsyncEngineCount: return 3;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrComputeCapabilityMajor: return kind().major;
    case cudaDevAttrComputeCapabilityMinor: return kind().minor;
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return kind().shared_bytes;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return kind().shared_bytes - 1024;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 32;
    case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    default: return 0;
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
X cudaError_t cudaDriverGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
X cudaError_t cudaRuntimeGetVersion(int* v) {
  *v = 13000;
  return cudaSuccess;
}
// ---- errors
cudaError_t fail(cudaError_t error) {
  last_error = error;
  return error;
}
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
