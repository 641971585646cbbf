/* Entry points that frameworks need from libcuda.so.1 and dlx never calls, compiled together with
 * fake_cuda.c. Kernels do nothing. */

#define _GNU_SOURCE

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuGetExportTable(const void** table, const unsigned char* id) {
  (void)table, (void)id;
  return 1;
}

int cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* how) {
  (void)version, (void)flags;
  *found = dlsym(RTLD_DEFAULT, name);
  if (how) *how = *found ? 0 : 1;
  return *found ? 0 : 500;
}

int cuGetProcAddress(const char* name, void** found, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
