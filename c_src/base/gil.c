/* Taking the GIL on threads unknown to Python, until the interpreter ends. */

#include "gil.h"
#include "core/thread_state.h"

/* Python cannot check that the interpreter lives and take the GIL in one step. A thread between
 * both would use an interpreter that is being deleted (3.14 even gives it the GIL), so an atexit
 * handler waits for such threads. Each thread has a flag in its state: torch's threads release
 * without the GIL, and would contend for a shared counter.
 *
 * All of this is seq_cst: a thread enters and then reads `closed`, close_gil sets it and then looks
 * for entering threads, and at least one of them must see the other. */
static atomic_int stateless; /* seq_cst, see above: such threads without a state (no memory) */
static atomic_int closed;    /* seq_cst, see above */

int py_gil_take(PyGILState_STATE* state) {
  dlx_thread_state* own = dlx_state_of_thread();
  atomic_int* entering = own ? &own->entering : &stateless;
  atomic_fetch_add_explicit(entering, 1, memory_order_seq_cst);
#if PY_VERSION_HEX >= 0x030D0000
  int is_going = Py_IsFinalizing();
#else
  int is_going = _Py_IsFinalizing();
#endif
  int may_take =
      !atomic_load_explicit(&closed, memory_order_seq_cst) && !is_going && Py_IsInitialized();
  if (may_take) *state = PyGILState_Ensure();
  if (own)
    atomic_store_explicit(entering, 0, memory_order_release); /* only this thread writes to it */
  else
    atomic_fetch_sub_explicit(entering, 1, memory_order_release);
  return may_take;
}

/* Only the forking thread exists in the child. */
static void after_fork(void) {
  atomic_store_explicit(&stateless, 0, memory_order_relaxed);
}

static int is_any_entering(void) {
  int found = atomic_load_explicit(&stateless, memory_order_seq_cst);
  for (dlx_thread_state* each = dlx_first_state(); each; each = each->next)
    found |= atomic_load_explicit(&each->entering, memory_order_seq_cst);
  return found;
}

static void watch_forks(void) {
  dlx_watch_forks(NULL, NULL, after_fork);
}

/* Stop all threads from taking the GIL; from now on Python objects leak. Does not wait for threads
 * that already have the GIL: they may wait for this thread. */
static PyObject* close_gil(PyObject* self, PyObject* unused) {
  atomic_store_explicit(&closed, 1, memory_order_seq_cst);
  Py_BEGIN_ALLOW_THREADS
    while (is_any_entering()) dlx_nap();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

int py_gil_open(void) {
  static PyMethodDef close = {"close_gil", close_gil, METH_NOARGS, NULL};
  static dlx_once once = DLX_ONCE_INIT;
  PyObject* atexit = PyImport_ImportModule("atexit");
  PyObject* function = atexit ? PyCFunction_New(&close, NULL) : NULL;
  PyObject* done = function ? PyObject_CallMethod(atexit, "register", "O", function) : NULL;
  Py_XDECREF(atexit);
  Py_XDECREF(function);
  if (done == NULL) return -1;
  Py_DECREF(done);
  dlx_run_once(&once, watch_forks);
  atomic_store_explicit(&closed, 0, memory_order_seq_cst);
  return 0;
}
