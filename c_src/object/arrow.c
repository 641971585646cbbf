/* dlx.Tensor's side of Arrow's PyCapsule interface: __arrow_c_array__ and __arrow_c_schema__. */

#include "tensor.h"

#include "core/allocate.h"
#include "core/arrow.h"

static const char k_schema[] = "arrow_schema";
static const char k_array[] = "arrow_array";

static void destroy_schema(PyObject* capsule) {
  struct ArrowSchema* schema = PyCapsule_GetPointer(capsule, k_schema);
  if (schema->release) schema->release(schema);
  free(schema);
}

static void destroy_array(PyObject* capsule) {
  struct ArrowArray* array = PyCapsule_GetPointer(capsule, k_array);
  py_pending pending = py_pending_save(); /* a foreign deleter may run */
  if (array->release) array->release(array);
  py_pending_restore(pending);
  free(array);
}

/* Errors: always returns NULL with an exception. */
static PyObject* cannot_give(int status, const DLManagedTensorVersioned* made) {
  const DLTensor* tensor = &made->dl_tensor;
  if (status == DLX_E_DTYPE)
    return py_raise(status,
                    "Arrow has no numbers of DLPack type code %d with %d bits and %d lanes "
                    "that lie as these do",
                    tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
  if (status == DLX_E_NDIM)
    return py_raise(status, "an Arrow array has one dimension or more, found %d", tensor->ndim);
  if (status == DLX_E_COPY)
    return py_raise(status, "Arrow's arrays are row-major, and this dlx.Tensor is not");
  return py_raise(status, NULL);
}

PyObject* py_arrow_schema(PyObject* tensor, PyObject* unused) {
  DLManagedTensorVersioned* made = py_tensor_managed(tensor);
  if (made == NULL) return NULL;
  struct ArrowSchema* schema = dlx_allocate(sizeof *schema);
  if (schema == NULL) return PyErr_NoMemory();
  int status = dlx_arrow_give_schema(&made->dl_tensor, schema);
  if (status != DLX_OK) {
    free(schema);
    return cannot_give(status, made);
  }
  PyObject* capsule = PyCapsule_New(schema, k_schema, destroy_schema);
  if (capsule == NULL) {
    schema->release(schema);
    free(schema);
  }
  return capsule;
}

static PyObject* array_capsule(DLManagedTensorVersioned* made) {
  struct ArrowArray* array = dlx_allocate(sizeof *array);
  if (array == NULL) return PyErr_NoMemory();
  int status = dlx_arrow_give_array(made, array);
  if (status != DLX_OK) {
    free(array);
    return cannot_give(status, made);
  }
  PyObject* capsule = PyCapsule_New(array, k_array, destroy_array);
  if (capsule == NULL) {
    array->release(array);
    free(array);
  }
  return capsule;
}

PyObject* py_arrow_array(PyObject* tensor, PyObject* const* args, Py_ssize_t nargs,
                         PyObject* names) {
  Py_ssize_t given = names ? PyTuple_GET_SIZE(names) : 0;
  if (nargs + given > 1 || (given && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0),
                                                                      "requested_schema") != 0))
    return PyErr_Format(PyExc_TypeError,
                        "__arrow_c_array__ takes requested_schema and nothing else");
  DLManagedTensorVersioned* made = py_tensor_managed(tensor);
  PyObject* array = made ? array_capsule(made) : NULL;
  PyObject* schema = array ? py_arrow_schema(tensor, NULL) : NULL;
  PyObject* pair = schema ? PyTuple_Pack(2, schema, array) : NULL;
  Py_XDECREF(schema);
  Py_XDECREF(array);
  return pair;
}
