#ifndef DLX_PARALLEL_H_
#define DLX_PARALLEL_H_

/* Threads of dlx's own, which whoever starts them joins; cffi never reads this. */

#include <pthread.h>

/* How many cores this process may use: no more threads are of use. GIL: not needed. Errors: 1. */
int dlx_cores(void);

/* Start a thread with a small stack. It takes no signals: handlers expect those of the program. A
 * fault is its own: where that is blocked, the process ends without its handler. Owns: the caller
 * joins the thread. GIL: not needed. Errors: as pthread_create. */
int dlx_thread_start(pthread_t* thread, void* (*function)(void*), void* argument);

#endif
