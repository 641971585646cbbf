#ifndef DLX_EXTENSION_H_
#define DLX_EXTENSION_H_

/* What every extension of ours shares: rows of method tables, arguments, pending exceptions. cffi
 * never reads this. Everything here wants the GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* Rows of a method table: the builtin `name`, documented by `name_doc`. */
#define PY_NOARGS(name) {#name, name, METH_NOARGS, name##_doc}
#define PY_ONE(name) {#name, name, METH_O, name##_doc}
#define PY_VARARGS(name) {#name, name, METH_VARARGS, name##_doc}
#define PY_FASTCALL(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}
/* The same of a method, under another name, that takes keywords. */
#define PY_KEYWORDS(text, name) \
  {text, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS, name##_doc}
#define PY_END {NULL, NULL, 0, NULL}

/* Whether a builtin got the right number of arguments. Errors: 0 with TypeError. */
static inline int py_args(const char* name, Py_ssize_t n, Py_ssize_t least, Py_ssize_t most) {
  if (n >= least && n <= most) return 1;
  PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, found %zd", name, least, most, n);
  return 0;
}

/* Owns: new reference. Errors: NULL with an exception. */
static inline PyObject* py_tuple_of(const int64_t* numbers, Py_ssize_t n) {
  PyObject* tuple = PyTuple_New(n);
  for (Py_ssize_t i = 0; tuple && i < n; i++) {
    PyObject* number = PyLong_FromLongLong(numbers[i]);
    if (number == NULL)
      Py_CLEAR(tuple);
    else
      PyTuple_SET_ITEM(tuple, i, number);
  }
  return tuple;
}

/* Whether an exception of a type may be replaced by another, or forgotten: an Exception that is no
 * MemoryError. */
static inline int py_error_may_go(PyObject* type) {
  return PyErr_GivenExceptionMatches(type, PyExc_Exception) &&
         !PyErr_GivenExceptionMatches(type, PyExc_MemoryError);
}

/* Clear the exception that is set, if it may go: the Python path raises it again. Errors: -1 with
 * the exception still set; 0 = none is set now. */
static inline int py_error_forget(void) {
  PyObject* type = PyErr_Occurred();
  if (type && !py_error_may_go(type)) return -1;
  PyErr_Clear();
  return 0;
}

/* An exception that is set while foreign code may run is put aside and back again. */
typedef struct {
  PyObject *type, *value, *traceback;
} py_pending;

static inline py_pending py_pending_save(void) {
  py_pending p;
  PyErr_Fetch(&p.type, &p.value, &p.traceback);
  return p;
}

static inline void py_pending_restore(py_pending p) {
  if (PyErr_Occurred()) PyErr_WriteUnraisable(NULL);
  PyErr_Restore(p.type, p.value, p.traceback);
}

/* Give up a reference whose object may run Python when it is freed, as capsules and owners do; a
 * pending exception is kept. Owns: takes the reference. */
static inline void py_drop(void* object) {
  py_pending pending = py_pending_save();
  Py_DECREF((PyObject*)object);
  py_pending_restore(pending);
}

#endif
