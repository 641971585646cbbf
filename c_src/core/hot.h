#ifndef DLX_HOT_H_
#define DLX_HOT_H_

/* Every conversion goes through these. The linker lays them side by side, whichever file they are
 * in, so that their times do not change with what is added elsewhere. */
#define DLX_HOT __attribute__((hot))

/* The cheap kind of thread-local storage; under glibc a library that is loaded late has room for a
 * few words of it, elsewhere (musl) it has none. */
#ifdef __GLIBC__
#define FEW_WORDS _Thread_local __attribute__((tls_model("initial-exec")))
#else
#define FEW_WORDS _Thread_local
#endif

#endif
