// Kernels of torch's own libraries: registered, launched, counted; they compute nothing.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "device.h"

static std::atomic<long> launches{0};
long num_launches() {
  return launches;
}
static std::map<const void*, std::string> names;
static thread_local std::vector<std::tuple<dim3, dim3, size_t, void*>> configuration;
static void* fat_handle[4];
X void** __cudaRegisterFatBinary(void*) {
  return fat_handle;
}
X void __cudaRegisterFatBinaryEnd(void**) {
}
X void __cudaUnregisterFatBinary(void**) {
}
X void __cudaRegisterFunction(void**, const char* f, char*, const char* name, int, uint3*, uint3*,
                              dim3*, dim3*, int*) {
  names[f] = name;
}
X void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {
}
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
static cudaError_t launch(const void* kernel, void* stream) {
  launches++;
  if (traces()) {
    auto found = names.find(kernel);
    TRACE("kernel %.90s on stream %d", found == names.end() ? "?" : found->second.c_str(),
          number_of(stream));
  }
  enqueue(stream, kernel_s(), {Did::LAUNCH}, {});
  return cudaSuccess;
}
X cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3, dim3, void**, size_t, cudaStream_t s) {
  return launch((const void*)k, s);
}
X cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* k, void**) {
  return launch(k, c->stream);
}
X cudaError_t cudaLaunchKernel(const void* k, dim3, dim3, void**, size_t, cudaStream_t s) {
  return launch(k, s);
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
