/* The exchange table for any array, published as dlx.exchange_api: dlx.Tensor's own table, but what
 * reads an object takes any that dlx.convert(obj, to="dlx") takes. Guards are asked, which the
 * tables that frameworks put on their types do not. */

#include "pairs.h"

static PyObject *function, *target; /* the fast path, and its `to` */
static PyObject* otherwise;         /* otherwise(obj): the Python path; gives a dlx.Tensor */
static PyObject* refusal;           /* what `borrow` raises: a program may meet it at every call */

/* Owns, Errors: as py_pair_of. */
static int pair_of(PyObject* obj, py_pair* out) {
  if (!py_pair_of((FastPathObject*)function, Py_TYPE(obj), target, out)) return 0;
  if (out->what == PY_CONVERTS) return 1;
  py_pair_release(out);
  return 0;
}

/* Owns: the caller owns *out, which keeps the memory alive by itself. GIL: needed; may run Python.
 * Errors: -1 with an exception. */
static int to_managed(void* obj, DLManagedTensorVersioned** out) {
  py_offer offer = {.made = NULL};
  unsigned options = DLX_SHARES | DLX_HOST_ONLY;
  py_maps_begin();
  py_pair pair;
  if (pair_of(obj, &pair)) {
    if (py_target_holds(pair.target, options))
      pair.source->take(pair.source, pair.target, obj, options, &offer);
    py_pair_release(&pair);
  }
  py_maps_end();
  if ((*out = offer.made) != NULL) return 0;
  PyObject* tensor = PyErr_Occurred() ? NULL : PyObject_CallOneArg(otherwise, obj);
  if (tensor == NULL) return -1;
  int status = py_tensor_table.managed_tensor_from_py_object_no_sync(tensor, out);
  Py_DECREF(tensor);
  return status;
}

/* Borrow. Only of what needs no conversion: of a pair, on the host, writable.
 * Owns: nothing; *out is good until Python code runs or something else is borrowed. GIL: needed;
 * may run Python. Errors: -1 with an exception. */
static int borrow(void* obj, DLTensor* out) {
  if (Py_IS_TYPE((PyObject*)obj, &py_tensor_type))
    return py_tensor_table.dltensor_from_py_object_no_sync(obj, out);
  int found = 0;
  py_maps_begin();
  py_pair pair;
  if (pair_of(obj, &pair)) {
    found = py_look(pair.source, pair.target, obj, out);
    py_pair_release(&pair);
  }
  py_maps_end();
  if (found) return 0;
  if (!PyErr_Occurred()) PyErr_SetObject(PyExc_BufferError, refusal);
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
  Py_XSETREF(function, Py_NewRef(callable));
  Py_XSETREF(target, Py_NewRef(to));
  Py_XSETREF(otherwise, Py_NewRef(python_path));
  return PyCapsule_New(&table, "dlpack_exchange_api", NULL);
}
