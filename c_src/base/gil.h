#ifndef DLX_GIL_H_
#define DLX_GIL_H_

/* The GIL for deleters, which run on any thread. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Return 1 if this thread may use Python objects. PyGILState_Check returns 1 on every thread once
 * the process has created a second interpreter. GIL: not needed. Errors: none. */
static inline int py_holds_gil(void) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked() != NULL;
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet() != NULL;
#else
  /* Before 3.12, this is the state of the thread that holds the GIL. */
  const PyThreadState* current = _PyThreadState_UncheckedGet();
  if (current == NULL) return 0;
  const PyThreadState* own = PyGILState_GetThisThreadState();
  if (own == NULL) return 0;
  if (current == own) return 1;
  /* A thread has one state per interpreter. */
  return PyGILState_Check() && current->thread_id == PyThread_get_thread_ident();
#endif
}

/* Take the GIL on a thread that does not hold it; release it with PyGILState_Release. Errors: 0 =
 * no interpreter, or it is finalizing. */
int py_gil_take(PyGILState_STATE* state);

/* Allow threads to take the GIL until Python's atexit. GIL: held. Errors: -1 with an exception. */
int py_gil_open(void);

#endif
