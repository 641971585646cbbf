#ifndef DLX_TENSOR_H_
#define DLX_TENSOR_H_

/* dlx.Tensor. Functions need the GIL, and return NULL or -1 with an exception, unless they say
 * otherwise. */

#include "base/error.h"

#include <stdatomic.h>

/* ---- object/tensor.c ------------------------------------------------------------------------- */

/* dlx.Tensor holds a managed tensor of dlx. `managed` is NULL after the fast path consumed it, or
 * the collector cleared the object. */
typedef struct {
  PyObject_HEAD DLManagedTensorVersioned* managed;
  PyObject* weakrefs;
  dlx_ready* ready;     /* device memory: when it is readable; NULL = now */
  int is_ordered;       /* device memory for one consumer, whose stream is already synchronized */
  int is_on_own_stream; /* device memory in use on dlx's own stream, see py_cuda_to_own_stream */
} TensorObject;

/* Static, like all types with many short-lived objects: objects of heap types count references to
 * their type, which threads would contend for. */
extern PyTypeObject py_tensor_type;

/* dlx_release for a Python object: takes the GIL on any thread, keeps a pending exception, and
 * leaks the object if the interpreter is gone. GIL: not needed. */
void py_release_object(void* object);

/* Allocate a dlx.Tensor before anything is consumed. Owns: new reference. */
TensorObject* py_tensor_alloc(void);

/* Get the managed tensor. Errors: also NULL if it is cleared, or not a dlx.Tensor. */
DLManagedTensorVersioned* py_tensor_managed(PyObject* tensor);

/* Get the managed tensor of a dlx.Tensor; NULL = cleared. If another thread replaces it
 * (py_cuda_to_own_stream), the new one keeps it alive as long as the tensor. Errors: none. */
static inline DLManagedTensorVersioned* py_tensor_inside(const TensorObject* tensor) {
  /* acquire, release in swap_memory: the struct is initialized */
  return atomic_load_explicit((_Atomic(DLManagedTensorVersioned*)*)&tensor->managed,
                              memory_order_acquire);
}

/* Get the readiness event; NULL = ready now. Owns: the caller calls dlx_ready_drop, since another
 * thread may replace the event. Errors: none. */
dlx_ready* py_tensor_ready(TensorObject* tensor);

/* Owns: takes `made`, even on failure. */
PyObject* py_tensor_wrap(DLManagedTensorVersioned* made);

PyObject* py_tensor_result(int status, DLManagedTensorVersioned* made);

/* Release a managed tensor whose deleter may run Python; keeps a pending exception. Owns: gives up
 * one count. */
void py_managed_release(DLManagedTensorVersioned* made);

/* Copy the readiness event of a tensor to a new view over the tensor's `base`. */
void py_tensor_follow(TensorObject* view, TensorObject* tensor,
                      const DLManagedTensorVersioned* base);

int py_tensor_traverse(PyObject* tensor, visitproc visit, void* arg);
int py_tensor_clear(PyObject* tensor);
void py_tensor_dealloc(PyObject* tensor);

/* ---- object/buffer.c ------------------------------------------------------------------------- */

/* Fill a buffer view of host memory. Owns: the view holds the memory. */
int py_buffer_get(PyObject* tensor, Py_buffer* view, int flags);

void py_buffer_release(PyObject* tensor, Py_buffer* view);

/* Get the addresses of an object's buffer, and release it; creating a memoryview takes longer than
 * everything else. May run Python. Errors: 0 = not row-major, or not numbers; -1 with an exception
 * that py_error_may_go keeps. */
int py_buffer_bytes(PyObject* object, int64_t* low, int64_t* high);

/* Exchange table that exports the buffer of any object, as managed tensors of dlx. */
extern const DLPackExchangeAPI py_buffer_table;

extern PyMethodDef py_buffer_functions[];

/* ---- object/arrow.c -------------------------------------------------------------------------- */

PyObject* py_arrow_array(PyObject* tensor, PyObject* const* args, Py_ssize_t nargs,
                         PyObject* names);
PyObject* py_arrow_schema(PyObject* tensor, PyObject* unused);

/* ---- object/dlpack.c ------------------------------------------------------------------------- */

PyObject* py_tensor_dlpack(PyObject* tensor, PyObject* const* args, Py_ssize_t nargs,
                           PyObject* names);
PyObject* py_tensor_dlpack_device(PyObject* tensor, PyObject* unused);

extern const DLPackExchangeAPI py_tensor_table;

/* ---- object/type.c --------------------------------------------------------------------------- */

int py_tensor_init(PyObject* module);

#endif
