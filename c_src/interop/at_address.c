/* The raw entry points of C interop: a dlx.Tensor from a managed tensor at an address or over fresh
 * memory, and the address of a dlx.Tensor's DLTensor. */

#include "interop.h"

#include "core/allocate.h"

/* The owner of an adopted tensor: the foreign struct, and the Python object that may hold the
 * memory of that struct itself. */
typedef struct {
  DLManagedTensorVersioned* wrapper; /* owes the foreign deleter; disowned when only borrowed */
  PyObject* keep;                    /* may be NULL; released after the deleter has run */
} adopted;

/* GIL: not needed. */
static void release_adopted(void* owner) {
  adopted* self = owner;
  dlx_managed_release(self->wrapper);
  if (self->keep) py_release_object(self->keep);
  free(self);
}

/* Owns: on success `out` owes the deleter (unless borrowed) and a reference to `keep`; on failure
 * nothing is taken and the struct was only read. Errors: a status. */
static int adopt(void* foreign, int legacy, int borrow, PyObject* keep,
                 DLManagedTensorVersioned** out) {
  adopted* self = dlx_allocate(sizeof *self);
  if (self == NULL) return DLX_E_MEMORY;
  *self = (adopted){.keep = keep};
  int status = legacy ? dlx_legacy_adopt(foreign, &self->wrapper)
                      : dlx_managed_adopt(foreign, &self->wrapper);
  if (status == DLX_OK) {
    /* The copied flag describes a hand-over, not the memory. */
    uint64_t flags = self->wrapper->flags & ~(uint64_t)DLPACK_FLAG_BITMASK_IS_COPIED;
    status = dlx_managed_new(&self->wrapper->dl_tensor, flags, self, release_adopted, out);
    if (status != DLX_OK || borrow) dlx_managed_own(self->wrapper, NULL, NULL);
    if (status != DLX_OK) dlx_managed_release(self->wrapper);
  }
  if (status == DLX_OK)
    Py_XINCREF(keep);
  else
    free(self);
  return status;
}

PyDoc_STRVAR(managed_adopt_doc,
             "managed_adopt(address, legacy, borrow, keep)\n--\n\n"
             "Make a dlx.Tensor from the DLManagedTensor(Versioned) at an address, which it then "
             "owes its deleter,\n"
             "unless borrowed. `keep` lives until the deleter has run. A refused struct is only "
             "read.");

static PyObject* managed_adopt(PyObject* module, PyObject* args) {
  PyObject *address, *keep;
  int legacy, borrow;
  if (!PyArg_ParseTuple(args, "OppO:managed_adopt", &address, &legacy, &borrow, &keep)) return NULL;
  void* foreign = PyLong_AsVoidPtr(address);
  if (foreign == NULL) {
    if (!PyErr_Occurred()) py_raise(DLX_E_NULL, "there is no managed tensor at address 0");
    return NULL;
  }
  /* The shell comes first: nothing may fail once memory has been taken. */
  TensorObject* tensor = py_tensor_alloc();
  if (tensor == NULL) return NULL;
  int status = adopt(foreign, legacy, borrow, keep == Py_None ? NULL : keep, &tensor->managed);
  if (status == DLX_OK) return (PyObject*)tensor;
  Py_DECREF(tensor);
  if (status != DLX_E_VERSION) return py_raise(status, NULL);
  const DLPackVersion* found = foreign; /* the first field of every version */
  return py_raise(status, "the struct says DLPack %u.%u, dlx reads 1.x", found->major,
                  found->minor);
}

PyDoc_STRVAR(tensor_address_doc,
             "tensor_address(tensor, /)\n--\n\n"
             "Return the address of a dlx.Tensor's DLTensor, which lives as long as the tensor.");

static PyObject* tensor_address(PyObject* module, PyObject* tensor) {
  DLManagedTensorVersioned* made = py_tensor_managed(tensor);
  return made ? PyLong_FromVoidPtr(&made->dl_tensor) : NULL;
}

PyDoc_STRVAR(tensor_empty_doc,
             "tensor_empty(like, /)\n--\n\n"
             "Make a dlx.Tensor over fresh, uninitialised, row-major host memory aligned to 256 "
             "bytes, with\n"
             "the shape and dtype of the DLTensor at an address; its other fields are not read.");

static PyObject* tensor_empty(PyObject* module, PyObject* address) {
  const DLTensor* like = PyLong_AsVoidPtr(address);
  if (like == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no DLTensor at address 0");
    return NULL;
  }
  DLManagedTensorVersioned* made;
  int status;
  Py_BEGIN_ALLOW_THREADS
    status = dlx_managed_empty(like, 0, 0, &made);
  Py_END_ALLOW_THREADS
  return py_tensor_result(status, made);
}

PyMethodDef py_adopt_functions[] = {
    PY_VARARGS(managed_adopt),
    PY_ONE(tensor_address),
    PY_ONE(tensor_empty),
    PY_END,
};
