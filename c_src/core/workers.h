#ifndef DLX_WORKERS_H_
#define DLX_WORKERS_H_

/* Starting dlx's threads. No function needs the GIL. */

#include <pthread.h>

/* Count the cores that this process may use. */
int dlx_count_cores(void);

/* Start a thread with a small stack. It blocks all signals except its own faults. Owns: the caller
 * joins it. Errors: as pthread_create. */
int dlx_start_thread(pthread_t* thread, void* (*function)(void*), void* argument);

#endif
