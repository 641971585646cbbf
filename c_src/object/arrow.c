/* dlx.Tensor's Arrow PyCapsule interface: __arrow_c_array__ and __arrow_c_schema__. */

#include "tensor.h"

#include "core/allocate.h"
#include "core/arrow.h"

static const char k_schema[] = "arrow_schema";
static const char k_array[] = "arrow_array";

typedef union {
  struct ArrowSchema schema;
  struct ArrowArray array;
} arrow_struct;

/* Release an exported struct, unless a consumer has moved it. Owns: takes `self`. */
static void drop(arrow_struct* self, int is_schema) {
  py_pending pending = py_pending_save(); /* a foreign deleter may run */
  if (is_schema && self->schema.release) self->schema.release(&self->schema);
  if (!is_schema && self->array.release) self->array.release(&self->array);
  py_pending_restore(pending);
  free(self);
}

static void destroy_schema(PyObject* capsule) {
  drop(PyCapsule_GetPointer(capsule, k_schema), 1);
}

static void destroy_array(PyObject* capsule) {
  drop(PyCapsule_GetPointer(capsule, k_array), 0);
}

static PyObject* raise_export_error(int status, const DLManagedTensorVersioned* made) {
  const DLTensor* tensor = &made->dl_tensor;
  if (status == DLX_E_DTYPE)
    return py_raise(status,
                    "cannot export this dlx.Tensor to Arrow: Arrow has no type for DLPack type "
                    "code %d with %d bits and %d lanes in this layout",
                    tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
  if (status == DLX_E_NDIM)
    return py_raise(status, "cannot export this dlx.Tensor to Arrow: it has 0 dimensions");
  if (status == DLX_E_COPY)
    return py_raise(status,
                    "cannot export this dlx.Tensor to Arrow: it is not row-major. "
                    "Call dlx.convert(tensor, to='arrow').");
  return py_raise(status, NULL);
}

static PyObject* new_capsule(DLManagedTensorVersioned* made, int is_schema) {
  arrow_struct* self = dlx_allocate(sizeof *self);
  if (self == NULL) return PyErr_NoMemory();
  int status = is_schema ? dlx_arrow_export_schema(&made->dl_tensor, &self->schema)
                         : dlx_arrow_export_array(made, &self->array);
  if (status != DLX_OK) {
    free(self);
    return raise_export_error(status, made);
  }
  PyObject* capsule = is_schema ? PyCapsule_New(self, k_schema, destroy_schema)
                                : PyCapsule_New(self, k_array, destroy_array);
  if (capsule == NULL) drop(self, is_schema);
  return capsule;
}

PyObject* py_arrow_schema(PyObject* tensor, PyObject* unused) {
  DLManagedTensorVersioned* made = py_tensor_managed(tensor);
  return made ? new_capsule(made, 1) : NULL;
}

PyObject* py_arrow_array(PyObject* tensor, PyObject* const* args, Py_ssize_t nargs,
                         PyObject* names) {
  Py_ssize_t n_keywords = names ? PyTuple_GET_SIZE(names) : 0;
  if (nargs + n_keywords > 1 ||
      (n_keywords &&
       PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "requested_schema") != 0))
    return PyErr_Format(PyExc_TypeError, "__arrow_c_array__ takes only requested_schema");
  DLManagedTensorVersioned* made = py_tensor_managed(tensor);
  PyObject* array = made ? new_capsule(made, 0) : NULL;
  PyObject* schema = array ? py_arrow_schema(tensor, NULL) : NULL;
  PyObject* pair = schema ? PyTuple_Pack(2, schema, array) : NULL;
  Py_XDECREF(schema);
  Py_XDECREF(array);
  return pair;
}
