#ifndef DLX_GIL_H_
#define DLX_GIL_H_

/* Whether this thread may touch Python objects, asked by deleters, which run on any thread. Not
 * PyGILState_Check: once the process has made a second interpreter, that answers 1 everywhere. */

#include <Python.h>

/* GIL: not needed. Errors: none. */
static inline int py_holds_gil(void) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyThreadState_GetUnchecked() != NULL;
#elif PY_VERSION_HEX >= 0x030C0000
  return _PyThreadState_UncheckedGet() != NULL;
#else
  /* Before 3.12 "the current thread state" is that of whichever thread holds the GIL. */
  const PyThreadState* own = PyGILState_GetThisThreadState();
  if (own == NULL) return 0; /* a thread that Python has never seen */
  const PyThreadState* current = _PyThreadState_UncheckedGet();
  if (current == own) return 1;
  /* This thread may run another interpreter, in which it has another state. */
  return current && PyGILState_Check() && current->thread_id == PyThread_get_thread_ident();
#endif
}

/* Whether Python objects may not be touched from here any more, nor the GIL asked for: there is no
 * interpreter, or it is going, and a thread that asked would never return. GIL: not needed. */
static inline int py_is_over(int holds_gil) {
#if PY_VERSION_HEX >= 0x030D0000
  int is_going = Py_IsFinalizing();
#else
  int is_going = _Py_IsFinalizing();
#endif
  return !Py_IsInitialized() || (is_going && !holds_gil);
}

#endif
