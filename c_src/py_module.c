/* The one bridge from cffi to CPython: dlx_bind adds the builtins of the py_ files to a module
 * object, once. After that they are ordinary builtins: the GIL held, real exceptions, real objects.
 */

#include "py_route.h"

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

/* Owns: borrows the module. GIL: taken (cffi released it). Errors: -1 with the exception printed,
 * since cffi would lose it. */
int dlx_bind(uintptr_t module) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject* m = (PyObject*)module;
  int failed = PyModule_AddFunctions(m, module_functions) < 0 ||
               PyModule_AddFunctions(m, py_capsule_functions) < 0 ||
               PyModule_AddFunctions(m, py_make_functions) < 0 ||
               PyModule_AddFunctions(m, py_adopt_functions) < 0 ||
               PyModule_AddFunctions(m, py_cuda_functions) < 0 ||
               PyModule_AddFunctions(m, py_describe_functions) < 0 ||
               PyModule_AddFunctions(m, py_route_functions) < 0 || py_tensor_init(m) < 0 ||
               py_lane_init(m) < 0 || py_view_init(m) < 0;
  if (failed) PyErr_Print();
  PyGILState_Release(state);
  return failed ? -1 : 0;
}
