#ifndef DLX_GIL_H_
#define DLX_GIL_H_

/* The GIL for deleters, which run on any thread. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Whether this thread may touch Python objects. Not PyGILState_Check: once the process has made a
 * second interpreter, that answers 1 everywhere. GIL: not needed. Errors: none. */
static inline int py_holds_gil(void) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked() != NULL;
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet() != NULL;
#else
  /* Before 3.12 the current thread state is that of the thread that holds the GIL. */
  const PyThreadState* current = _PyThreadState_UncheckedGet();
  if (current == NULL) return 0; /* the cheaper question first */
  const PyThreadState* own = PyGILState_GetThisThreadState();
  if (own == NULL) return 0; /* a thread that Python has never seen */
  if (current == own) return 1;
  /* This thread may run another interpreter, in which it has another state. */
  return PyGILState_Check() && current->thread_id == PyThread_get_thread_ident();
#endif
}

/* Take the GIL on a thread that does not hold it; PyGILState_Release releases it. Errors: 0 = there
 * is no interpreter any more, or it is going. */
int py_gil_take(PyGILState_STATE* state);

/* Let threads take the GIL until Python's atexit. GIL: held. Errors: -1 with an exception. */
int py_gil_open(void);

#endif
