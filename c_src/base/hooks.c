#include "hooks.h"
#include "extension.h"

py_hooks_table py_hooks;

PyObject* py_hook(PyObject* hook, const char* name) {
  if (hook == NULL) PyErr_SetString(PyExc_AttributeError, name);
  return hook;
}

static int set_hook(PyObject* name, PyObject* value) {
  const struct { /* not static: on Windows, addresses in CPython are no constants */
    const char* name;
    PyObject** place;
    PyTypeObject* type;
  } places[] = {
#define PLACE(name, type) {#name, &py_hooks.name, type},
      PY_HOOKS(PLACE)};
  for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
    if (PyUnicode_CompareWithASCIIString(name, places[i].name) != 0) continue;
    if (places[i].type ? !PyObject_TypeCheck(value, places[i].type) : !PyCallable_Check(value)) {
      PyErr_Format(PyExc_TypeError, "hook %U cannot be of type %.200s", name,
                   Py_TYPE(value)->tp_name);
      return -1;
    }
    Py_XSETREF(*places[i].place, Py_NewRef(value));
    return 0;
  }
  PyErr_Format(PyExc_TypeError, "unknown hook %R", name);
  return -1;
}

PyDoc_STRVAR(register_hooks_doc,
             "register(**hooks)\n--\n\n"
             "Register Python objects that C uses, by name; see hooks.h.");

static PyObject* register_hooks(PyObject* module, PyObject* const* args, Py_ssize_t nargs,
                                PyObject* names) {
  if (!py_check_args("register", nargs, 0, 0)) return NULL;
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
    if (set_hook(PyTuple_GET_ITEM(names, i), args[i]) < 0) return NULL;
  }
  Py_RETURN_NONE;
}

PyMethodDef py_hooks_functions[] = {PY_KEYWORDS("register", register_hooks), PY_END};
