/* Taking the GIL on threads that Python may not know, and the end of that. */

#include "gil.h"
#include "core/thread_state.h"

#include <pthread.h>
#include <time.h>

/* Python has no step that both asks whether the interpreter lives and takes the GIL. A thread
 * between the two would touch an interpreter that is being deleted (3.14 even gives it the GIL), so
 * Python's atexit waits for such threads. Each says so in its own state, since threads of torch
 * that release without the GIL would all write to one word. */
static atomic_int unknown; /* threads between the two that have no state: no memory */
static atomic_int closed;  /* no further thread may begin */

int py_gil_take(PyGILState_STATE* state) {
  dlx_thread_state* own = dlx_state_of_thread();
  atomic_int* entering = own ? &own->entering : &unknown;
  atomic_fetch_add(entering, 1); /* before `closed` is read; close_gil does the opposite */
#if PY_VERSION_HEX >= 0x030D0000
  int is_going = Py_IsFinalizing();
#else
  int is_going = _Py_IsFinalizing();
#endif
  int may_take = !atomic_load(&closed) && !is_going && Py_IsInitialized();
  if (may_take) *state = PyGILState_Ensure();
  /* From now on Python knows this thread. */
  if (own)
    atomic_store_explicit(entering, 0, memory_order_release); /* no other thread writes to it */
  else
    atomic_fetch_sub(entering, 1);
  return may_take;
}

/* The other threads are not in the child, so none is between the two. */
static void after_fork(void) {
  atomic_store(&unknown, 0);
}

static int is_any_entering(void) {
  int found = atomic_load(&unknown);
  for (dlx_thread_state* each = atomic_load(&dlx_thread_states); each; each = each->next)
    found |= atomic_load(&each->entering);
  return found;
}

static void watch_forks(void) {
  pthread_atfork(NULL, NULL, after_fork);
}

/* From now on no thread takes the GIL, and Python objects leak. Threads that have it already are
 * not waited for: they may wait for this one. */
static PyObject* close_gil(PyObject* self, PyObject* unused) {
  const struct timespec pause = {.tv_nsec = 100000};
  atomic_store(&closed, 1);
  Py_BEGIN_ALLOW_THREADS
    while (is_any_entering()) nanosleep(&pause, NULL);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

int py_gil_open(void) {
  static PyMethodDef close = {"close_gil", close_gil, METH_NOARGS, NULL};
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  PyObject* atexit = PyImport_ImportModule("atexit");
  PyObject* function = atexit ? PyCFunction_New(&close, NULL) : NULL;
  PyObject* done = function ? PyObject_CallMethod(atexit, "register", "O", function) : NULL;
  Py_XDECREF(atexit);
  Py_XDECREF(function);
  if (done == NULL) return -1;
  Py_DECREF(done);
  pthread_once(&once, watch_forks);
  atomic_store(&closed, 0);
  return 0;
}
