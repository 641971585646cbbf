/* The platform for Windows; see platform.h. */

#ifdef _WIN32

#define WIN32_LEAN_AND_MEAN

#include "platform.h"
#include "dlx.h"

#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <windows.h>

_Static_assert(sizeof(SRWLOCK) == sizeof(dlx_mutex), "dlx_mutex is another lock");
_Static_assert(sizeof(INIT_ONCE) == sizeof(dlx_once), "dlx_once is another struct");

/* ---- threads --------------------------------------------------------------------------------- */

void dlx_lock(dlx_mutex* mutex) {
  AcquireSRWLockExclusive((PSRWLOCK)mutex);
}

void dlx_unlock(dlx_mutex* mutex) {
  ReleaseSRWLockExclusive((PSRWLOCK)mutex);
}

static BOOL CALLBACK call_function(PINIT_ONCE once, void* function, void** unused) {
  (void)once;
  (void)unused;
  (*(void (**)(void))function)();
  return TRUE;
}

void dlx_run_once(dlx_once* once, void (*function)(void)) {
  InitOnceExecuteOnce((PINIT_ONCE)once, call_function, &function, NULL);
}

/* A key of a fiber calls its function at the end of a thread, also on other compilers than MSVC. */
void dlx_create_key(dlx_thread_key* key, void (*function)(void*)) {
  *key = FlsAlloc((PFLS_CALLBACK_FUNCTION)function);
}

void dlx_set_key(dlx_thread_key key, void* value) {
  if (key != FLS_OUT_OF_INDEXES) FlsSetValue(key, value);
}

int dlx_count_cores(void) {
  DWORD_PTR own = 0, all = 0;
  if (!GetProcessAffinityMask(GetCurrentProcess(), &own, &all)) return 1;
  int cores = __builtin_popcountll(own);
  return cores ? cores : 1; /* 0 = it uses several groups of processors */
}

typedef struct {
  void* (*function)(void*);
  void* argument;
} task;

static DWORD WINAPI run_task(void* argument) {
  task own = *(task*)argument;
  free(argument);
  own.function(own.argument);
  return 0;
}

int dlx_start_thread(dlx_thread* thread, void* (*function)(void*), void* argument) {
  enum { STACK = 256 << 10 };
  task* made = malloc(sizeof *made);
  if (made == NULL) return ENOMEM;
  *made = (task){function, argument};
  *thread = CreateThread(NULL, STACK, run_task, made, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
  if (*thread) return 0;
  free(made);
  return EAGAIN;
}

void dlx_join_thread(dlx_thread thread) {
  WaitForSingleObject(thread, INFINITE);
  CloseHandle(thread);
}

void dlx_nap(void) {
  Sleep(1);
}

void dlx_watch_forks(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
  (void)before;
  (void)in_parent;
  (void)in_child;
}

/* ---- memory and files ------------------------------------------------------------------------ */

void* dlx_malloc_aligned(size_t alignment, size_t size) {
  return _aligned_malloc(size, alignment);
}

void dlx_free_aligned(void* memory) {
  _aligned_free(memory);
}

void* dlx_map(int fd, int64_t size, int mode) {
  (void)fd;
  (void)size;
  (void)mode;
  errno = ENOSYS;
  return NULL;
}

int dlx_is_file(int fd, uint64_t device, uint64_t inode) {
  (void)fd;
  (void)device;
  (void)inode;
  return 0;
}

void dlx_unmap(void* address, int64_t size) {
  (void)address;
  (void)size;
}

/* ---- libraries ------------------------------------------------------------------------------- */

void* dlx_open_library(const char* name, char* why, size_t room) {
  /* A bare name is searched among the system's libraries only. */
  DWORD flags = strpbrk(name, "/\\") ? LOAD_WITH_ALTERED_SEARCH_PATH : LOAD_LIBRARY_SEARCH_SYSTEM32;
  void* library = LoadLibraryExA(name, NULL, flags);
  if (library == NULL) snprintf(why, room, "%s: Windows error %lu", name, GetLastError());
  return library;
}

void dlx_close_library(void* library) {
  FreeLibrary(library);
}

void* dlx_find_symbol(void* library, const char* symbol) {
  return (void*)(uintptr_t)GetProcAddress(library, symbol);
}

void* dlx_find_loaded_symbol(const char* library, const char* symbol) {
  char name[64];
  snprintf(name, sizeof name, "%s.dll", library);
  HMODULE loaded = GetModuleHandleA(name);
  return loaded ? dlx_find_symbol(loaded, symbol) : NULL;
}

#endif
