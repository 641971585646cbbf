/* The exchange table for any array, published as dlx.exchange_api: dlx.Tensor's table, with slots
 * that read any object that dlx.convert(obj, to="dlx") takes. Guards are checked, in contrast to
 * the tables of frameworks. */

#include "pairs.h"

static PyObject *function, *target; /* the fast path, and its `to` */
static PyObject* fallback;          /* fallback(obj): the Python path; returns a dlx.Tensor */
static PyObject*
    borrow_error; /* of `borrow_any`; created once, as programs may meet it at every call */

static int find_pair(PyObject* obj, py_pair* out) {
  if (!py_pair_learn((FastPathObject*)function, Py_TYPE(obj), target, out)) return 0;
  if (out->what == PY_CONVERTS) return 1;
  py_pair_release(out);
  return 0;
}

/* Owns: the caller owns *out, which keeps the memory alive. */
static int export_any(void* obj, DLManagedTensorVersioned** out) {
  py_offer offer = {.made = NULL};
  unsigned options = DLX_SHARES | DLX_HOST_ONLY;
  py_maps_begin();
  py_pair pair;
  if (find_pair(obj, &pair)) {
    if (py_target_holds(pair.target, options))
      pair.source->take(pair.source, pair.target, obj, options, &offer);
    py_pair_release(&pair);
  }
  py_maps_end();
  if ((*out = offer.made) != NULL) return 0;
  PyObject* tensor = PyErr_Occurred() ? NULL : PyObject_CallOneArg(fallback, obj);
  if (tensor == NULL) return -1;
  int status = py_tensor_table.managed_tensor_from_py_object_no_sync(tensor, out);
  Py_DECREF(tensor);
  return status;
}

/* Borrow a writable host array that has a pair. Owns: nothing; *out is valid until Python code runs
 * or the next borrow. */
static int borrow_any(void* obj, DLTensor* out) {
  if (Py_IS_TYPE((PyObject*)obj, &py_tensor_type))
    return py_tensor_table.dltensor_from_py_object_no_sync(obj, out);
  int found = 0;
  py_maps_begin();
  py_pair pair;
  if (find_pair(obj, &pair)) {
    found =
        py_borrow(pair.source, pair.target, obj, NULL, out) && out->device.device_type == kDLCPU;
    py_pair_release(&pair);
  }
  py_maps_end();
  if (found) return 0;
  if (!PyErr_Occurred()) PyErr_SetObject(PyExc_BufferError, borrow_error);
  return -1;
}

PyObject* py_exchange_any(PyObject* callable, PyObject* to, PyObject* python_path) {
  static DLPackExchangeAPI table;
  if (borrow_error == NULL)
    borrow_error = PyUnicode_FromString(
        "this array cannot be borrowed as a DLTensor. Export a managed tensor instead.");
  if (borrow_error == NULL) return NULL;
  table = py_tensor_table;
  table.managed_tensor_from_py_object_no_sync = export_any;
  table.dltensor_from_py_object_no_sync = borrow_any;
  Py_XSETREF(function, Py_NewRef(callable));
  Py_XSETREF(target, Py_NewRef(to));
  Py_XSETREF(fallback, Py_NewRef(python_path));
  return PyCapsule_New(&table, "dlpack_exchange_api", NULL);
}
