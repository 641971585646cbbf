/* The exchange table for any array, published as dlx.exchange_api: dlx.Tensor's own table, but what
 * reads an object takes any that dlx.convert(obj, to="dlx") takes. Guards are asked, which the
 * tables that frameworks put on their types do not. */

#include "route.h"

static PyObject *convert, *target; /* the fast path, and its `to` */
static PyObject* otherwise;        /* otherwise(obj): the Python path; gives a dlx.Tensor */
static PyObject* refusal;          /* what `borrow` raises: a program may meet it at every call */

/* The route of an object's type. Owns: borrowed. GIL: needed; may run Python. Errors: NULL = ask
 * Python, unless an exception is set. */
static py_route* route_of(PyObject* obj) {
  py_route* r = py_fast_path_route(convert, Py_TYPE(obj), target);
  return r && r->is_fast_path && !r->is_same ? r : NULL;
}

/* Owns: the caller owns *out, which keeps the memory alive by itself. GIL: needed; may run Python.
 * Errors: -1 with an exception. */
static int to_managed(void* obj, DLManagedTensorVersioned** out) {
  uint32_t resolvable;
  *out = NULL;
  py_routes_begin();
  py_route* r = route_of(obj);
  if (r) {
    py_route_enter(r);
    *out = py_fast_path_borrow(r, obj, DLX_SHARES | DLX_HOST_ONLY, &resolvable);
    py_route_leave(r);
  }
  py_routes_end();
  if (*out) return 0;
  if (PyErr_Occurred()) return -1;
  PyObject* tensor = PyObject_CallOneArg(otherwise, obj);
  if (tensor == NULL) return -1;
  int status = py_tensor_table.managed_tensor_from_py_object_no_sync(tensor, out);
  Py_DECREF(tensor);
  return status;
}

/* Borrow. Only of what needs no conversion: of a route, on the host, writable.
 * Owns: nothing; *out is good until Python code runs or something else is borrowed. GIL: needed;
 * may run Python. Errors: -1 with an exception. */
static int borrow(void* obj, DLTensor* out) {
  if (Py_IS_TYPE((PyObject*)obj, &py_tensor_type))
    return py_tensor_table.dltensor_from_py_object_no_sync(obj, out);
  int found = 0;
  py_routes_begin();
  py_route* r = route_of(obj);
  if (r) {
    py_route_enter(r);
    found = py_fast_path_look(r, obj, out);
    py_route_leave(r);
  }
  py_routes_end();
  if (found) return 0;
  if (PyErr_Occurred()) return -1;
  PyErr_SetObject(PyExc_BufferError, refusal);
  return -1;
}

PyObject* py_exchange_any(PyObject* callable, PyObject* to, PyObject* python_path) {
  static DLPackExchangeAPI table;
  if (refusal == NULL)
    refusal = PyUnicode_FromString(
        "a DLTensor cannot be borrowed from this array as it is. Take a managed tensor.");
  if (refusal == NULL) return NULL;
  table = py_tensor_table;
  table.managed_tensor_from_py_object_no_sync = to_managed;
  table.dltensor_from_py_object_no_sync = borrow;
  Py_XSETREF(convert, Py_NewRef(callable));
  Py_XSETREF(target, Py_NewRef(to));
  Py_XSETREF(otherwise, Py_NewRef(python_path));
  return PyCapsule_New(&table, "dlpack_exchange_api", NULL);
}
