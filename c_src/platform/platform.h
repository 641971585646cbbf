#ifndef DLX_PLATFORM_H_
#define DLX_PLATFORM_H_

/* The parts of dlx that differ between operating systems; only this folder tests for which one it
 * is compiled. linux.c, macos.c and windows.c have one system each, posix.c has the parts that
 * Linux and macOS share, missing.c what only Linux has. Windows needs clang. No function needs the
 * GIL. */

#include <stddef.h>
#include <stdint.h>

#ifdef _WIN32
typedef struct { /* an SRWLOCK */
  void* word;
} dlx_mutex;
typedef struct { /* an INIT_ONCE */
  void* word;
} dlx_once;
typedef struct { /* like iovec */
  void* iov_base;
  size_t iov_len;
} dlx_part;
typedef void* dlx_thread;
typedef unsigned long dlx_thread_key;
#define DLX_MUTEX_INIT {NULL}
#define DLX_ONCE_INIT {NULL}
#define DLX_CUDA_LIBRARY "nvcuda.dll"
#else
#include <pthread.h>
#include <sys/uio.h>
typedef pthread_mutex_t dlx_mutex;
typedef pthread_once_t dlx_once;
typedef struct iovec dlx_part;
typedef pthread_t dlx_thread;
typedef pthread_key_t dlx_thread_key;
#define DLX_MUTEX_INIT PTHREAD_MUTEX_INITIALIZER
#define DLX_ONCE_INIT PTHREAD_ONCE_INIT
#ifdef __APPLE__
#define DLX_CUDA_LIBRARY "libcuda.dylib"
#else
#define DLX_CUDA_LIBRARY "libcuda.so.1"
#endif
#endif

/* Fast thread-local storage: glibc reserves a few words for libraries loaded late, musl none. */
#ifdef __GLIBC__
#define DLX_FEW_WORDS _Thread_local __attribute__((tls_model("initial-exec")))
#else
#define DLX_FEW_WORDS _Thread_local
#endif

/* ---- threads --------------------------------------------------------------------------------- */

#ifdef _WIN32
void dlx_lock(dlx_mutex* mutex);
void dlx_unlock(dlx_mutex* mutex);
void dlx_run_once(dlx_once* once, void (*function)(void));
#else
static inline void dlx_lock(dlx_mutex* mutex) {
  pthread_mutex_lock(mutex);
}

static inline void dlx_unlock(dlx_mutex* mutex) {
  pthread_mutex_unlock(mutex);
}

static inline void dlx_run_once(dlx_once* once, void (*function)(void)) {
  pthread_once(once, function);
}
#endif

/* Let `function` run at the end of each thread that sets a value, with this value. Errors: values
 * of the key are ignored. */
void dlx_create_key(dlx_thread_key* key, void (*function)(void*));
void dlx_set_key(dlx_thread_key key, void* value);

/* Count the cores that this process may use. */
int dlx_count_cores(void);

/* Start a thread with a small stack. It blocks all signals except its own faults. Owns: the caller
 * joins it. Errors: not 0. */
int dlx_start_thread(dlx_thread* thread, void* (*function)(void*), void* argument);
void dlx_join_thread(dlx_thread thread);

/* Sleep for about 0.1 ms, or the system's shortest time. */
void dlx_nap(void);

/* Let functions run around each fork, or do nothing on a system without it; NULL = no function. */
void dlx_watch_forks(void (*before)(void), void (*in_parent)(void), void (*in_child)(void));

/* ---- memory ---------------------------------------------------------------------------------- */

/* Owns: the caller calls dlx_free_aligned. Errors: NULL = no memory. */
void* dlx_malloc_aligned(size_t alignment, size_t size);
void dlx_free_aligned(void* memory);

/* Ask for huge pages in new memory that is large: its first use is mostly page faults. */
void dlx_use_huge_pages(void* memory, size_t size);

/* ---- files in memory (Linux) ----------------------------------------------------------------- */

enum { DLX_HUGE_PAGE = 2 << 20, DLX_MAX_PARTS = 1024 /* the kernel's limit for a call */ };

/* Create huge pages, each from an existing page, in a mapping aligned to them. Errors: -1 with
 * errno. */
int dlx_create_huge_pages(char* start, size_t size);

/* Copy memory of this process. Errors: -1, for example unreadable memory. */
int dlx_copy_parts(const dlx_part* to, const dlx_part* from, size_t n);

/* Write all parts to a file; changes `parts`. Errors: -1 with errno. */
int dlx_write_parts(int fd, dlx_part* parts, int n, int64_t at);

/* Wait while a word of shared memory has a value, or wake all that wait. May return early. */
void dlx_wait_word(void* word, uint32_t value, int64_t nanoseconds);
void dlx_wake_word(void* word);

/* ---- libraries ------------------------------------------------------------------------------- */

/* Load a library. Errors: NULL, with the reason in `why`. */
void* dlx_open_library(const char* name, char* why, size_t room);
void dlx_close_library(void* library);

/* Errors: NULL. */
void* dlx_find_symbol(void* library, const char* symbol);

/* The same in a library that is already loaded: "c10" is libc10.so, libc10.dylib or c10.dll. */
void* dlx_find_loaded_symbol(const char* library, const char* symbol);

/* Functions with vectors of 32 bytes, for processors that have them: DLX_WITH_WIDE(...) contains
 * them where they can be compiled, and DLX_HAS_WIDE says whether they can run. DLX_HALF_VECTORS, if
 * defined, are those that can also convert float16. */
#if defined(__x86_64__) && defined(__linux__)
#define DLX_WIDE_VECTORS __attribute__((target("avx2")))
#define DLX_HAS_WIDE (__builtin_cpu_supports("avx2") != 0)
#define DLX_WITH_WIDE(...) __VA_ARGS__
#if (defined(__clang__) ? __clang_major__ >= 18 : __GNUC__ >= 11) /* older ones cannot ask */
#define DLX_HALF_VECTORS __attribute__((target("avx2,f16c")))
#define DLX_HAS_HALVES (DLX_HAS_WIDE && __builtin_cpu_supports("f16c"))
#endif
#else
#define DLX_HAS_WIDE 0
#define DLX_WITH_WIDE(...)
#endif

#endif
