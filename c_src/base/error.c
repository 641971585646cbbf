#include "error.h"

/* Raise a DlxError: the last sentence of a text that ends with a full stop is its fix. Owns: takes
 * `text`, or NULL. */
static void raise_text(PyObject* class, PyObject* text) {
  Py_ssize_t length = text ? PyUnicode_GET_LENGTH(text) : 0;
  if (length > 0 && PyUnicode_READ_CHAR(text, length - 1) == '.') {
    PyObject* end = PyUnicode_FromString(". ");
    PyObject* parts = end ? PyUnicode_RPartition(text, end) : NULL; /* reason, ". ", fix */
    PyObject* reason = parts ? PyTuple_GetSlice(parts, 0, 1) : NULL;
    PyObject* fix = reason ? Py_BuildValue("{sO}", "fix", PyTuple_GET_ITEM(parts, 2)) : NULL;
    PyObject* error = fix ? PyObject_Call(class, reason, fix) : NULL;
    if (error) PyErr_SetObject(class, error);
    Py_XDECREF(error);
    Py_XDECREF(fix);
    Py_XDECREF(reason);
    Py_XDECREF(parts);
    Py_XDECREF(end);
  } else if (text) {
    PyErr_SetObject(class, text);
  }
  Py_XDECREF(text);
}

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
    raise_text(class,
               PyUnicode_FromString(of_driver ? dlx_cuda_message() : dlx_status_text(status)));
    return NULL;
  }
  va_list values;
  va_start(values, format);
  raise_text(class, PyUnicode_FromFormatV(format, values));
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
