/* The parts of the platform that only macOS has; see platform.h. */

#ifdef __APPLE__

#define _DARWIN_C_SOURCE

#include "platform.h"

#include <dlfcn.h>
#include <mach-o/dyld.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int dlx_count_cores(void) {
  long cores = sysconf(_SC_NPROCESSORS_ONLN); /* a process cannot be bound to cores */
  return cores > 0 ? (int)cores : 1;
}

void* dlx_find_loaded_symbol(const char* library, const char* symbol) {
  char end[64];
  int length = snprintf(end, sizeof end, "/lib%s.dylib", library);
  for (uint32_t i = 0; i < _dyld_image_count(); i++) {
    const char* path = _dyld_get_image_name(i); /* NULL if a library was unloaded since */
    size_t n = path ? strlen(path) : 0;
    if (n < (size_t)length || strcmp(path + n - length, end) != 0) continue;
    void* loaded = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    void* found = loaded ? dlsym(loaded, symbol) : NULL;
    if (loaded) dlclose(loaded); /* its users keep it loaded */
    return found;
  }
  return NULL;
}

#endif
