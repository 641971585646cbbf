#ifndef DLX_TENSOR_H_
#define DLX_TENSOR_H_

/* dlx.Tensor. cffi never reads this. Everything here wants the GIL unless it says so. */

#include "base/error.h"

/* ---- object/tensor.c ------------------------------------------------------------------------ */

/* dlx.Tensor: one count on a managed tensor that dlx made. `managed` is NULL once it was
 * consumed on the fast path, or the collector has cleared the object. */
typedef struct {
  PyObject_HEAD DLManagedTensorVersioned* managed;
  PyObject* weakrefs;
  dlx_ready* ready;     /* device memory: when it may be read; NULL = now */
  int is_ordered;       /* device memory for one consumer, whose stream was already synchronized */
  int is_on_own_stream; /* device memory that is worked on in dlx's own stream, see
                           py_cuda_to_own_stream */
} TensorObject;

/* Types whose objects are made all the time are static: those on the heap count references in each
 * object, on one word for all threads. */
extern PyTypeObject py_tensor_type;

/* dlx_release for a Python object: takes the GIL from any thread, keeps a pending error, and leaks
 * on purpose once the interpreter is gone. GIL: not needed. */
void py_release_object(void* object);

/* A dlx.Tensor object without a managed tensor, so that nothing can fail once memory has been
 * taken. Owns: new reference. */
TensorObject* py_tensor_alloc(void);

/* The managed tensor inside. Errors: NULL with an exception when it is no dlx.Tensor or
 * cleared. */
DLManagedTensorVersioned* py_tensor_managed(PyObject* tensor);

/* The same of what is a dlx.Tensor, NULL when cleared. Another thread may put a new one there
 * (py_cuda_to_own_stream), which keeps this one alive as long as the tensor. Errors: none. */
static inline DLManagedTensorVersioned* py_tensor_inside(const TensorObject* tensor) {
  return __atomic_load_n(&tensor->managed, __ATOMIC_ACQUIRE);
}

/* The readiness event of a tensor, NULL = ready now. Owns: the caller owes it dlx_ready_drop, since
 * another thread may give the tensor a new one. Errors: none. */
dlx_ready* py_tensor_ready(TensorObject* tensor);

/* Owns: takes `made`, also on failure. Errors: NULL with an exception. */
PyObject* py_tensor_wrap(DLManagedTensorVersioned* made);

/* The same of what a function of the core made, if its status is DLX_OK. Errors: NULL with an
 * exception, that of the status. */
PyObject* py_tensor_result(int status, DLManagedTensorVersioned* made);

/* Release a managed tensor whose foreign deleter may run Python; a pending exception is kept. Owns:
 * gives up a count. GIL: needed. */
void py_managed_release(DLManagedTensorVersioned* made);

/* Set the readiness event of a new view to that of its tensor, over whose `base` it was made. */
void py_tensor_follow(TensorObject* view, TensorObject* tensor,
                      const DLManagedTensorVersioned* base);

/* The slots of the type that free it and show the collector what it holds. */
int py_tensor_traverse(PyObject* tensor, visitproc visit, void* arg);
int py_tensor_clear(PyObject* tensor);
void py_tensor_dealloc(PyObject* tensor);

/* ---- object/buffer.c ------------------------------------------------------------------------ */

/* Fill a view of host memory, as the buffer protocol asks. Owns: the view holds the memory by a
 * count until it is released. Errors: -1 with an exception. */
int py_buffer_get(PyObject* tensor, Py_buffer* view, int flags);

/* Owns: gives up the view's count. */
void py_buffer_release(PyObject* tensor, Py_buffer* view);

/* The addresses of an object's buffer, which is held for the length of this call only: a memoryview
 * would take longer than all else. GIL: needed; may run Python. Errors: 0 = it is not row-major, or
 * its elements are no numbers; -1 with an exception that may not be forgotten. */
int py_buffer_bytes(PyObject* object, int64_t* low, int64_t* high);

/* An exchange table that exports the buffer of any object; what it exports is made by dlx. */
extern const DLPackExchangeAPI py_buffer_table;

extern PyMethodDef py_buffer_functions[];

/* ---- object/arrow.c ------------------------------------------------------------------------- */

/* Methods __arrow_c_array__ and __arrow_c_schema__ of dlx.Tensor: fresh capsules over its memory.
 * Owns: new reference. Errors: NULL with an exception. */
PyObject* py_arrow_array(PyObject* tensor, PyObject* const* args, Py_ssize_t nargs,
                         PyObject* names);
PyObject* py_arrow_schema(PyObject* tensor, PyObject* unused);

/* ---- object/dlpack.c ------------------------------------------------------------------------ */

/* Methods __dlpack__ and __dlpack_device__ of dlx.Tensor. Owns: new reference. GIL: needed. Errors:
 * NULL with an exception. */
PyObject* py_tensor_dlpack(PyObject* tensor, PyObject* const* args, Py_ssize_t nargs,
                           PyObject* names);
PyObject* py_tensor_dlpack_device(PyObject* tensor, PyObject* unused);

/* dlx.Tensor's exchange table. */
extern const DLPackExchangeAPI py_tensor_table;

/* ---- object/type.c -------------------------------------------------------------------------- */

/* Create the type and add it to the module. Errors: -1 with an exception. */
int py_tensor_init(PyObject* module);

#endif
