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
  /* Before 3.12 "the current thread state" is that of whichever thread holds the GIL. */
  const PyThreadState* current = _PyThreadState_UncheckedGet();
  if (current == NULL)
    return 0; /* as where torch releases what it had: the cheaper question first */
  const PyThreadState* own = PyGILState_GetThisThreadState();
  if (own == NULL) return 0; /* a thread that Python has never seen */
  if (current == own) return 1;
  /* This thread may run another interpreter, in which it has another state. */
  return PyGILState_Check() && current->thread_id == PyThread_get_thread_ident();
#endif
}

/* Take the GIL on a thread that does not hold it; PyGILState_Release gives it back. 0 where that is
 * not possible any more: there is no interpreter, or it is going. GIL: not held. Errors: none. */
int py_gil_take(PyGILState_STATE* state);

/* Let threads take the GIL until Python's atexit. Each library has a py_gil_open of its own to call
 * before the first py_gil_take. GIL: held. Errors: -1 with an exception. */
int py_gil_open(void);

#endif
