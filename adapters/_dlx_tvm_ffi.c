/* An exchange table for tvm_ffi.Tensor, which has none of its own (tvm-ffi 0.1.15). It belongs to
 * the adapter, not to dlx, as that of numpy does.
 *
 * tvm-ffi's headers are not needed: what an object holds is told by its `__chandle__`, and exported
 * by one function of tvm-ffi's public C interface, which dlx_tvm_ffi.py finds in the library that
 * is loaded. The export owns a count of tvm-ffi's own, so the handle may be moved away later. What
 * makes a tvm_ffi.Tensor is a slot of the one table that tvm-ffi publishes, that of a wrapper. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack_abi.h"

static int (*to_managed)(void* handle, DLManagedTensorVersioned** out); /* of tvm-ffi */
static PyObject* handle_of; /* tvm_ffi.Tensor.__chandle__; never freed */

/* Export. Owns: the caller owns *out, which keeps the memory alive by itself. GIL: needed. Errors:
 * -1 with an exception. */
static int export(void* tensor, DLManagedTensorVersioned** out) {
  PyObject* number = PyObject_CallOneArg(handle_of, tensor);
  void* handle = number ? PyLong_AsVoidPtr(number) : NULL;
  Py_XDECREF(number);
  if (PyErr_Occurred()) return -1;
  if (handle && to_managed(handle, out) == 0) return 0; /* it may answer no question without one */
  PyErr_SetString(PyExc_BufferError, "tvm_ffi has no tensor to give out");
  return -1;
}

static DLPackExchangeAPI table = {
    .header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
    .managed_tensor_from_py_object_no_sync = export,
};

PyDoc_STRVAR(exchange_api_doc,
             "exchange_api(chandle, address, maker, /)\n--\n\n"
             "Return the table in a capsule, given tvm_ffi.Tensor.__chandle__, the address of "
             "tvm-ffi's\nTVMFFITensorToDLPackVersioned, and a table in a capsule that makes "
             "tvm_ffi.Tensor objects, or None.");

static PyObject* exchange_api(PyObject* module, PyObject* args) {
  static const char name[] = "dlpack_exchange_api";
  PyObject *chandle, *address, *maker;
  if (!PyArg_ParseTuple(args, "OO!O:exchange_api", &chandle, &PyLong_Type, &address, &maker))
    return NULL;
  void* function = PyLong_AsVoidPtr(address);
  if (function == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "there is no function at address 0");
    return NULL;
  }
  const DLPackExchangeAPI* makes = maker == Py_None ? NULL : PyCapsule_GetPointer(maker, name);
  if (PyErr_Occurred()) return NULL;
  int is_ours = makes && makes->header.version.major == DLX_DLPACK_MAJOR;
  table.managed_tensor_to_py_object_no_sync =
      is_ours ? makes->managed_tensor_to_py_object_no_sync : NULL;
  Py_XSETREF(handle_of, Py_NewRef(chandle));
  to_managed = (int (*)(void*, DLManagedTensorVersioned**))function;
  return PyCapsule_New(&table, name, NULL);
}

static PyMethodDef functions[] = {
    {"exchange_api", exchange_api, METH_VARARGS, exchange_api_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_dlx_tvm_ffi",
    .m_doc = "An exchange table for tvm_ffi.Tensor.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__dlx_tvm_ffi(void) {
  return PyModule_Create(&definition);
}
