#include "error.h"

PyObject* py_raise(int status, const char* format, ...) {
  if (status == DLX_E_MEMORY) return PyErr_NoMemory();
  PyObject* code = PyLong_FromLong(status);
  if (code == NULL) return NULL;
  PyObject* class = py_hooks.errors ? PyDict_GetItemWithError(py_hooks.errors, code) : NULL;
  Py_DECREF(code);
  if (class == NULL) {
    if (!PyErr_Occurred())
      PyErr_Format(PyExc_SystemError, "no exception is registered for status %d", status);
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

int py_check(int status) {
  return status == DLX_OK ? 0 : (py_raise(status, NULL), -1);
}

PyObject* py_error_take(void) {
  if (!py_error_may_go(PyErr_Occurred())) return NULL;
  py_pending error = py_pending_save();
  PyErr_NormalizeException(&error.type, &error.value, &error.traceback);
  if (error.traceback) PyException_SetTraceback(error.value, error.traceback);
  Py_XDECREF(error.type);
  Py_XDECREF(error.traceback);
  return error.value;
}
