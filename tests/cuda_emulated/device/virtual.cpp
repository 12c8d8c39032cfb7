// Virtual memory management: addresses that are reserved first and filled later, as torch's
// allocator does with expandable_segments.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "device.h"

static constexpr size_t GRANULE_BYTES = 2 << 20;
static std::mutex mutex;
struct Piece {
  int file;
  size_t size;
};
static std::map<CUmemGenericAllocationHandle, Piece> pieces;
static CUmemGenericAllocationHandle last_piece = 0;

X CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                         CUmemAllocationGranularity_flags) {
  *bytes = GRANULE_BYTES;
  return CUDA_SUCCESS;
}
X CUresult cuMemAddressReserve(CUdeviceptr* made, size_t size, size_t, CUdeviceptr,
                               unsigned long long) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* seen = (char*)mmap(nullptr, size, PROT_NONE, flags, -1, 0);
  char* shadow = (char*)mmap(nullptr, size, PROT_NONE, flags, -1, 0);
  if (seen == MAP_FAILED || shadow == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  keep_place(seen, size, shadow);
  *made = (CUdeviceptr)seen;
  return CUDA_SUCCESS;
}
X CUresult cuMemAddressFree(CUdeviceptr start, size_t size) {
  char* shadow = (char*)shadow_of((void*)start);
  drop_place((char*)start);
  munmap((void*)start, size);
  munmap(shadow, size);
  return CUDA_SUCCESS;
}
X CUresult cuMemCreate(CUmemGenericAllocationHandle* made, size_t size, const CUmemAllocationProp*,
                       unsigned long long) {
  if (!take_bytes(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = memfd_create("emulated_cuda", 0);
  if (file < 0 || ftruncate(file, size)) {
    if (file >= 0) close(file);
    give_bytes(size);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  std::lock_guard<std::mutex> hold(mutex);
  *made = ++last_piece;
  pieces[*made] = {file, size};
  return CUDA_SUCCESS;
}
X CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> hold(mutex);
  auto found = pieces.find(handle);
  if (found == pieces.end()) return CUDA_ERROR_INVALID_VALUE;
  close(found->second.file);
  give_bytes(found->second.size);
  pieces.erase(found);
  return CUDA_SUCCESS;
}
X CUresult cuMemMap(CUdeviceptr at, size_t size, size_t, CUmemGenericAllocationHandle handle,
                    unsigned long long) {
  std::lock_guard<std::mutex> hold(mutex);
  auto found = pieces.find(handle);
  if (found == pieces.end()) return CUDA_ERROR_INVALID_VALUE;
  int flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file = found->second.file;
  mmap((void*)at, size, PROT_NONE, flags, file, 0);
  mmap(shadow_of((void*)at), size, PROT_READ | PROT_WRITE, flags, file, 0);
  return CUDA_SUCCESS;
}
X CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  synchronize_all();  // the caller has waited; this process must live on
  log_did(Did::FREE, nullptr, (void*)at, nullptr, size);
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  void* shadow = shadow_of((void*)at);
  mmap((void*)at, size, PROT_NONE, flags, -1, 0);
  mmap(shadow, size, PROT_NONE, flags, -1, 0);
  return CUDA_SUCCESS;
}
X CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
  return CUDA_SUCCESS;
}
