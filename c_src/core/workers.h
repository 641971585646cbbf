#ifndef DLX_WORKERS_H_
#define DLX_WORKERS_H_

/* The threads that dlx starts itself. Nothing here wants the GIL. */

#include <pthread.h>

/* Count the cores that this process may use. */
int dlx_cores(void);

/* Start a thread with a small stack, which takes no signals but its own faults. Owns: the caller
 * joins it. Errors: as pthread_create. */
int dlx_thread_start(pthread_t* thread, void* (*function)(void*), void* argument);

#endif
