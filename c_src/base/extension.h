#ifndef DLX_EXTENSION_H_
#define DLX_EXTENSION_H_

/* Helpers for dlx's extensions. The caller must hold the GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlx.h"

/* Rows of a method table: the builtin `name`, documented by `name_doc`. */
#define PY_NOARGS(name) {#name, name, METH_NOARGS, name##_doc}
#define PY_ONE(name) {#name, name, METH_O, name##_doc}
#define PY_VARARGS(name) {#name, name, METH_VARARGS, name##_doc}
#define PY_FASTCALL(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, name##_doc}
/* The same with another name, and with keywords. */
#define PY_KEYWORDS(text, name) \
  {text, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS, name##_doc}
#define PY_END {NULL, NULL, 0, NULL}

#define PY_WITHOUT_GIL(...)                     \
  do {                                          \
    PyThreadState* state = PyEval_SaveThread(); \
    __VA_ARGS__;                                \
    PyEval_RestoreThread(state);                \
  } while (0)

/* Docstring of the builtin that follows. It starts with the signature if dlx.adapter exports the
 * builtin; dlx/_core/native.py has all signatures. */
#define PY_DOC(name, text) static const char name##_doc[] = text

/* Check the number of arguments of a builtin. Errors: 0 with TypeError. */
static inline int py_check_args(const char* name, Py_ssize_t n, Py_ssize_t least, Py_ssize_t most) {
  if (n >= least && n <= most) return 1;
  PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, found %zd", name, least, most, n);
  return 0;
}

/* Owns: new reference. Errors: NULL with an exception. */
static inline PyObject* py_new_tuple(const int64_t* numbers, Py_ssize_t n) {
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

/* Return 1 if an exception may be replaced or cleared: an Exception other than MemoryError. */
static inline int py_error_may_go(PyObject* type) {
  return PyErr_GivenExceptionMatches(type, PyExc_Exception) &&
         !PyErr_GivenExceptionMatches(type, PyExc_MemoryError);
}

/* Clear the exception if py_error_may_go allows it. Errors: -1 = it is still set. */
static inline int py_error_forget(void) {
  PyObject* type = PyErr_Occurred();
  if (type && !py_error_may_go(type)) return -1;
  PyErr_Clear();
  return 0;
}

/* Find the table of dlx's major version behind newer ones. Errors: NULL = not found. */
static inline const DLPackExchangeAPI* py_find_exchange(const DLPackExchangeAPIHeader* header) {
  for (int steps = 0; header && steps < 32; steps++, header = header->prev_api) {
    if (header->version.major == DLX_DLPACK_MAJOR) return (const DLPackExchangeAPI*)header;
  }
  return NULL;
}

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

/* Release a reference to an object that may run Python; keeps a pending exception. */
static inline void py_drop(void* object) {
  py_pending pending = py_pending_save();
  Py_DECREF((PyObject*)object);
  py_pending_restore(pending);
}

#endif
