/* Options of the fast path; calls with other options go to Python. */

#include "function.h"

#include <stdatomic.h>

/* Objects that name the host besides "cpu", then NULL. Entries never change, so threads read them
 * without a lock. Release, acquire: initialized objects. */
static _Atomic(PyObject*) hosts[8];

static int names_host(PyObject* value) {
  if (value == py_name_cpu) return 1;
  for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
    PyObject* host = atomic_load_explicit(&hosts[i], memory_order_acquire);
    if (host == NULL) return 0;
    int same = Py_IS_TYPE(value, Py_TYPE(host)) ? PyObject_RichCompareBool(value, host, Py_EQ) : 0;
    if (same < 0) py_error_forget();
    if (same) return same == 1;
  }
  return 0;
}

static int read_option(py_call* call, PyObject* name, PyObject* value) {
  unsigned* options = &call->options;
  if (name == py_name_copy) {
    *options |= value == Py_True ? DLX_COPIES : value == Py_False ? DLX_SHARES : 0;
    return value == Py_True || value == Py_False || value == Py_None;
  }
  if (name == py_name_readonly) { /* the Python path validates */
    for (Py_ssize_t i = 0; py_hooks.readonly_words && i < PyTuple_GET_SIZE(py_hooks.readonly_words);
         i++) {
      if (value != PyTuple_GET_ITEM(py_hooks.readonly_words, i)) continue;
      *options |= i == 1 ? DLX_KEEPS_READONLY : i ? DLX_UNMARKS : 0;
      return 1;
    }
    return 0;
  }
  if (name == py_name_detach) {
    if (value == Py_True) *options |= DLX_EXAMINES | DLX_DETACHES;
    return value == Py_True || value == Py_False;
  }
  if (name == py_name_lazy) {
    if (value == Py_True) *options |= DLX_VIEWS;
    return value == Py_True || value == Py_False;
  }
  if (name == py_name_device && value != Py_None) {
    int is_host = names_host(value);
    *options |= is_host ? DLX_EXAMINES | DLX_HOST_ONLY | DLX_NAMES_DEVICE : DLX_MOVES;
    if (!is_host) call->device = value;
    return 1;
  }
  if (name == py_name_device) return 1;
  return 0;
}

int py_options_read(py_call* call, PyObject* const* args, Py_ssize_t n, PyObject* names,
                    PyObject** like) {
  PyObject* own = call->function->to;
  Py_ssize_t n_names = names ? PyTuple_GET_SIZE(names) : 0;
  *like = NULL;
  call->to = own ? own : n == 2 ? args[1] : NULL;
  if (own) return n == 1 && n_names == 0;
  if (n != 1 && n != 2) return 0;
  for (Py_ssize_t i = 0; i < n_names; i++) {
    PyObject *name = PyTuple_GET_ITEM(names, i), *value = args[n + i];
    if (name == py_name_to && n == 1)
      call->to = value;
    else if (name == py_name_like && n_names == 1 && n == 1)
      *like = value;
    else if (!read_option(call, name, value))
      return 0;
  }
  return call->to || *like;
}

PyDoc_STRVAR(add_host_doc,
             "add_host(device, /)\n--\n\n"
             "Register an object of an immutable type that names the host in the option `device`.");

/* Owns: keeps a reference. Errors: NULL with an exception. */
static PyObject* add_host(PyObject* module, PyObject* device) {
  size_t i = 0;
  PyObject* none = NULL;
  if (names_host(device)) Py_RETURN_NONE;
  if (PyErr_Occurred()) return NULL;
  Py_INCREF(device);
  while (i < sizeof hosts / sizeof *hosts &&
         !atomic_compare_exchange_strong_explicit(&hosts[i], &none, device, memory_order_release,
                                                  memory_order_relaxed)) {
    none = NULL;
    i++;
  }
  if (i == sizeof hosts / sizeof *hosts) Py_DECREF(device); /* full: Python reads this one */
  Py_RETURN_NONE;
}

static PyMethodDef option_functions[] = {
    PY_ONE(add_host),
    PY_END,
};

int py_options_init(PyObject* module) {
  return PyModule_AddFunctions(module, option_functions);
}
