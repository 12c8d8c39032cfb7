// The driver's functions, which Triton's launcher and torch's lazy loading call.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "device.h"

static std::atomic<long> triton_launches{0};
long num_triton_launches() {
  return triton_launches;
}
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
static CUresult launch(CUfunction kernel, CUstream stream) {
  triton_launches++;
  TRACE("triton %s on stream %d", (char*)kernel, number_of(stream));
  enqueue(stream, kernel_s(), {Did::LAUNCH}, {});
  return CUDA_SUCCESS;
}
X CUresult cuLaunchKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          unsigned, CUstream s, void**, void**) {
  return launch(f, s);
}
X CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  return launch(f, c->hStream);
}
X CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned, unsigned, unsigned, unsigned, unsigned,
                                     unsigned, unsigned, CUstream s, void**) {
  return launch(f, s);
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
