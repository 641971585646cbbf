/* The one bridge from cffi to CPython: dlx_bind adds one builtin to a module object, and that adds
 * those of the py_ files. They are ordinary builtins: the GIL held, real exceptions, real objects.
 */

#include "route.h"

int dlx_bind(uintptr_t module);

static PyObject*
    classes; /* {status: exception class}, from native.py; lives as long as the process */

PyObject* py_raise(int status, const char* format, ...) {
  if (status == DLX_E_MEMORY) return PyErr_NoMemory();
  PyObject* code = PyLong_FromLong(status);
  if (code == NULL) return NULL;
  PyObject* class = classes ? PyDict_GetItemWithError(classes, code) : NULL;
  Py_DECREF(code);
  if (class == NULL) {
    if (!PyErr_Occurred())
      PyErr_Format(PyExc_SystemError, "dlx has no error for status %d", status);
    return NULL;
  }
  if (format == NULL) {
    int of_driver = status <= DLX_E_NO_DRIVER && status >= DLX_E_DRIVER;
    PyErr_SetString(class, of_driver ? dlx_cuda_message() : dlx_status_text(status));
    return NULL;
  }
  va_list values;
  va_start(values, format);
  PyErr_FormatV(class, format, values);
  va_end(values);
  return NULL;
}

int py_error_may_go(PyObject* type) {
  return PyErr_GivenExceptionMatches(type, PyExc_Exception) &&
         !PyErr_GivenExceptionMatches(type, PyExc_MemoryError);
}

int py_error_forget(void) {
  PyObject* type = PyErr_Occurred();
  if (type && !py_error_may_go(type)) return -1;
  PyErr_Clear();
  return 0;
}

PyDoc_STRVAR(set_errors_doc,
             "set_errors(classes, /)\n--\n\n"
             "Tell the C side which class to raise for each status, as a dict {status: class}.");

static PyObject* set_errors(PyObject* module, PyObject* mapping) {
  if (!PyDict_Check(mapping)) {
    PyErr_SetString(PyExc_TypeError, "set_errors takes a dict");
    return NULL;
  }
  Py_INCREF(mapping);
  Py_XSETREF(classes, mapping);
  Py_RETURN_NONE;
}

static PyMethodDef module_functions[] = {
    {"set_errors", set_errors, METH_O, set_errors_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(bind_doc,
             "bind(module, /)\n--\n\n"
             "Add every builtin and type to a module. Types, routes and spare memory exist once a "
             "process:\nImportError in any interpreter but the first that did so.");

static PyObject* bind(PyObject* self, PyObject* module) {
  static int64_t first = -1; /* numbers of interpreters are never used again */
  int64_t here = PyInterpreterState_GetID(PyInterpreterState_Get());
  if (here < 0) return NULL;
  if (first >= 0 && first != here) {
    PyErr_Format(PyExc_ImportError,
                 "dlx works in one interpreter of a process: it is in use in interpreter %lld, and "
                 "this is interpreter %lld. Use it from there, or use processes "
                 "(multiprocessing) instead of interpreters.",
                 (long long)first, (long long)here);
    return NULL;
  }
  first = here;
  if (PyModule_AddFunctions(module, module_functions) < 0 ||
      PyModule_AddFunctions(module, py_capsule_functions) < 0 ||
      PyModule_AddFunctions(module, py_make_functions) < 0 ||
      PyModule_AddFunctions(module, py_adopt_functions) < 0 ||
      PyModule_AddFunctions(module, py_cuda_functions) < 0 ||
      PyModule_AddFunctions(module, py_describe_functions) < 0 ||
      PyModule_AddFunctions(module, py_route_functions) < 0 || py_tensor_init(module) < 0 ||
      py_fast_path_init(module) < 0 || py_view_init(module) < 0)
    return NULL;
  Py_RETURN_NONE;
}

/* Owns: borrows the module. GIL: taken (cffi released it). In which interpreter is not known here:
 * nothing is done but what is right in any. Errors: -1 with the exception printed, since cffi would
 * lose it. */
int dlx_bind(uintptr_t module) {
  static PyMethodDef functions[] = {{"bind", bind, METH_O, bind_doc}, {NULL, NULL, 0, NULL}};
  PyGILState_STATE state = PyGILState_Ensure();
  int failed = PyModule_AddFunctions((PyObject*)module, functions) < 0;
  if (failed) PyErr_Print();
  PyGILState_Release(state);
  return failed ? -1 : 0;
}
