/* The options that the fast path understands; calls with any other go to Python. */

#include "function.h"

#include <stdatomic.h>

static PyObject *to_name, *copy_name, *readonly_name, *detach_name, *device_name, *lazy_name,
    *like_name, *cpu_name;       /* interned, as the words of a call are */
static PyObject* readonly_words; /* "copy", "error", "share"; NULL until registered */

/* What stands for the host, beside "cpu"; NULL where there is no more. None is ever replaced, so
 * that threads read them without a lock. */
static _Atomic(PyObject*) hosts[8];

/* Errors: 0 = ask Python, unless an exception is set. */
static int names_host(PyObject* value) {
  if (value == cpu_name) return 1;
  for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
    PyObject* host = atomic_load_explicit(&hosts[i], memory_order_acquire);
    if (host == NULL) return 0;
    int same = Py_IS_TYPE(value, Py_TYPE(host)) ? PyObject_RichCompareBool(value, host, Py_EQ) : 0;
    if (same < 0) py_error_forget();
    if (same) return same == 1;
  }
  return 0;
}

/* One option of a call. Errors: 0 where only Python understands it, unless an exception is set. */
static int read_option(unsigned* options, PyObject* name, PyObject* value) {
  if (name == copy_name) {
    *options |= value == Py_True ? DLX_COPIES : value == Py_False ? DLX_SHARES : 0;
    return value == Py_True || value == Py_False || value == Py_None;
  }
  if (name == readonly_name) { /* the Python path checks the value where it matters */
    for (Py_ssize_t i = 0; readonly_words && i < PyTuple_GET_SIZE(readonly_words); i++) {
      if (value != PyTuple_GET_ITEM(readonly_words, i)) continue;
      *options |= i == 1 ? DLX_KEEPS_READONLY : i ? DLX_UNMARKS : 0;
      return 1;
    }
    return 0;
  }
  if (name == detach_name) {
    if (value == Py_True) *options |= DLX_EXAMINES | DLX_DETACHES;
    return value == Py_True || value == Py_False;
  }
  if (name == lazy_name) {
    if (value == Py_True) *options |= DLX_VIEWS;
    return value == Py_True || value == Py_False;
  }
  if (name == device_name) { /* arrays of devices are moved by the Python path */
    int is_host = value != Py_None && names_host(value);
    if (is_host) *options |= DLX_EXAMINES | DLX_HOST_ONLY | DLX_NAMES_DEVICE;
    return is_host || value == Py_None;
  }
  return 0;
}

int py_options_read(py_call* call, PyObject* const* args, Py_ssize_t n, PyObject* names,
                    PyObject** like) {
  PyObject* own = call->function->to;
  Py_ssize_t n_names = names ? PyTuple_GET_SIZE(names) : 0;
  *like = NULL;
  call->to = own ? own : n == 2 ? args[1] : NULL;
  if (own) return n == 1 && n_names == 0;
  if (n == 1 && n_names == 1 && PyTuple_GET_ITEM(names, 0) == to_name) {
    call->to = args[1];
    return 1;
  }
  if (n != 1 && n != 2) return 0;
  for (Py_ssize_t i = 0; i < n_names; i++) {
    PyObject *name = PyTuple_GET_ITEM(names, i), *value = args[n + i];
    if (name == to_name && n == 1)
      call->to = value;
    else if (name == like_name && n_names == 1 && n == 1)
      *like = value;
    else if (!read_option(&call->options, name, value))
      return 0;
  }
  return call->to || *like;
}

static int intern_words(void) {
  struct {
    PyObject** where;
    const char* word;
  } words[] = {{&to_name, "to"},         {&copy_name, "copy"}, {&readonly_name, "readonly"},
               {&detach_name, "detach"}, {&like_name, "like"}, {&device_name, "device"},
               {&lazy_name, "lazy"},     {&cpu_name, "cpu"}};
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    if ((*words[i].where = PyUnicode_InternFromString(words[i].word)) == NULL) return -1;
  }
  return 0;
}

PyDoc_STRVAR(set_readonly_words_doc,
             "set_readonly_words(words, /)\n--\n\n"
             "Register the values of the option `readonly`: 'copy', 'error', 'share', interned.");

/* Owns: keeps a reference to `words`. GIL: needed. Errors: NULL with TypeError. */
static PyObject* set_readonly_words(PyObject* module, PyObject* words) {
  if (!PyTuple_CheckExact(words)) {
    PyErr_SetString(PyExc_TypeError, "set_readonly_words takes a tuple");
    return NULL;
  }
  Py_INCREF(words);
  Py_XSETREF(readonly_words, words);
  Py_RETURN_NONE;
}

PyDoc_STRVAR(add_host_doc,
             "add_host(device, /)\n--\n\n"
             "Register an object of an immutable type that stands for the host where a call says "
             "`device`.");

/* Owns: keeps a reference. GIL: needed; may run Python. Errors: NULL with an exception. */
static PyObject* add_host(PyObject* module, PyObject* device) {
  size_t i = 0;
  PyObject* none = NULL;
  if (names_host(device)) Py_RETURN_NONE;
  if (PyErr_Occurred()) return NULL;
  Py_INCREF(device);
  while (i < sizeof hosts / sizeof *hosts &&
         !atomic_compare_exchange_strong(&hosts[i], &none, device)) {
    none = NULL;
    i++;
  }
  if (i == sizeof hosts / sizeof *hosts) Py_DECREF(device); /* there are enough: Python is asked */
  Py_RETURN_NONE;
}

static PyMethodDef option_functions[] = {
    {"add_host", add_host, METH_O, add_host_doc},
    {"set_readonly_words", set_readonly_words, METH_O, set_readonly_words_doc},
    {NULL, NULL, 0, NULL},
};

int py_options_init(PyObject* module) {
  return intern_words() < 0 ? -1 : PyModule_AddFunctions(module, option_functions);
}
