#ifndef DLX_PYTHON_H_
#define DLX_PYTHON_H_

/* What the files of python/ share, the lowest first: none calls one that stands after it. cffi
 * never reads this. Everything here wants the GIL unless it says so. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cuda/device.h"
#include "dlx_cuda.h"

/* ---- python/error.c -------------------------------------------------------------------------- */

/* Raise the class that native.py registered for a status, with a PyErr_Format text; a NULL text
 * means the status's own sentence. Errors: always returns NULL with an exception set. */
PyObject* py_raise(int status, const char* format, ...);

/* Whether an exception of a type may be replaced by another, or forgotten: an Exception that is no
 * MemoryError. GIL: needed. Errors: none. */
int py_error_may_go(PyObject* type);

/* Clear the exception that is set, where the Python path raises it again: an Exception, and no
 * MemoryError. Interrupts, exits and the lack of memory go on. Errors: -1 with the exception still
 * set; 0 = none is set now. */
int py_error_forget(void);

/* The exception that is set, which is cleared as by py_error_forget. Owns: new reference. GIL:
 * needed. Errors: NULL with the exception still set. */
PyObject* py_error_take(void);

/* An exception that is set while foreign code may run is put aside and back again. */
typedef struct {
  PyObject *type, *value, *traceback;
} py_pending;

static inline py_pending py_pending_save(void) {
  py_pending p;
  PyErr_Fetch(&p.type, &p.value, &p.traceback);
  return p;
}

static inline void py_pending_restore(py_pending p) {
  if (PyErr_Occurred()) PyErr_WriteUnraisable(NULL);
  PyErr_Restore(p.type, p.value, p.traceback);
}

extern PyMethodDef py_error_functions[];

/* ---- python/tensor.c ------------------------------------------------------------------------- */

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

/* Set the readiness event of a new view to that of its tensor, over whose `base` it was made. */
void py_tensor_follow(TensorObject* view, TensorObject* tensor,
                      const DLManagedTensorVersioned* base);

/* The slots of the type that free it and show the collector what it holds. */
int py_tensor_traverse(PyObject* tensor, visitproc visit, void* arg);
int py_tensor_clear(PyObject* tensor);
void py_tensor_dealloc(PyObject* tensor);

/* ---- python/describe.c ----------------------------------------------------------------------- */

/* One line about the tensor. Owns: new reference. Errors: NULL with an exception. */
PyObject* py_describe_repr(PyObject* tensor);

/* __array__ of dlx.Tensor. Owns: new reference. GIL: needed; runs Python. Errors: NULL with an
 * exception. */
PyObject* py_describe_array(PyObject* tensor, PyObject* const* args, Py_ssize_t nargs,
                            PyObject* names);

/* __reduce_ex__ of dlx.Tensor. Owns: new reference. GIL: needed; runs Python. Errors: NULL with an
 * exception. */
PyObject* py_describe_reduce(PyObject* tensor, PyObject* protocol);

extern PyGetSetDef py_describe_attributes[];
extern PyMethodDef py_describe_functions[];

/* ---- python/buffer.c ------------------------------------------------------------------------- */

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

/* ---- python/capsule.c ------------------------------------------------------------------------ */

/* Wrap a managed tensor in a capsule, versioned or legacy. Owns: takes `made`, also on failure (it
 * is released then). Errors: NULL with an exception. */
PyObject* py_capsule_wrap(DLManagedTensorVersioned* made, int legacy);

/* Take ownership of a fresh capsule's tensor and mark the capsule used; nothing runs between. Owns:
 * the caller owns the result, which owes the foreign deleter. Errors: NULL without an exception: it
 * is no fresh capsule, or a refused one, and nothing has changed. */
DLManagedTensorVersioned* py_capsule_take(PyObject* capsule);

/* Undo that, of a tensor that no other thread has seen, if nobody else holds its memory. Owns: on 1
 * takes `made`, and the capsule owns its tensor again. Errors: 0 = nothing has changed. */
int py_capsule_give_back(PyObject* capsule, DLManagedTensorVersioned* made);

/* Export what an object's __dlpack__(max_version=...) gives: of a type that is known to have that
 * keyword, on the host. Owns: the caller owns *out, which owes the foreign deleter. GIL: needed;
 * runs Python. Errors: -1 with an exception. */
int py_capsule_export(PyObject* obj, DLManagedTensorVersioned** out);

/* Make what it calls with. GIL: needed. Errors: -1 with an exception. */
int py_capsule_init(void);

extern PyMethodDef py_capsule_functions[];

/* ---- python/make.c --------------------------------------------------------------------------- */

/* A device from a pair of int. Errors: -1 with an exception. */
int py_read_device(PyObject* pair, DLDevice* out);

/* A writable copy in fresh host memory, the order of dimensions kept if asked. The GIL is released
 * while bytes move. Owns: the caller owns the result. Errors: NULL with an exception. */
DLManagedTensorVersioned* py_managed_copy(DLManagedTensorVersioned* from, int keep_order);

extern PyMethodDef py_make_functions[];

/* ---- python/within.c ------------------------------------------------------------------------- */

extern PyMethodDef py_within_functions[];

/* ---- python/adopt.c -------------------------------------------------------------------------- */

extern PyMethodDef py_adopt_functions[];

/* ---- python/cuda.c --------------------------------------------------------------------------- */

/* Put a managed tensor that shares `tensor`'s device memory behind the consumer's stream, as
 * __dlpack__(stream=...) says: the stream waits for the memory, the memory's release for the
 * stream. Owns: takes `made` and returns it or its like; on failure it is released. Errors: NULL
 * with an exception. */
DLManagedTensorVersioned* py_cuda_export(TensorObject* tensor, DLManagedTensorVersioned* made,
                                         PyObject* stream);

/* Whether there is a driver that can order anything. GIL: needed, released meanwhile. Errors: none.
 */
int py_cuda_can_order(void);

/* A managed tensor over the same memory that is released when the stream is done with it. Owns:
 * takes `made` and `keep` (may be NULL); on failure both are released. Errors: NULL with an
 * exception. */
DLManagedTensorVersioned* py_cuda_put_behind(DLManagedTensorVersioned* made, int32_t device_id,
                                             uint64_t stream, PyObject* keep);

/* A copy of device memory on the host. Owns: the caller owns the result. Errors: NULL with an
 * exception. */
DLManagedTensorVersioned* py_cuda_fetch(TensorObject* tensor);

/* Move the use of a tensor's memory to dlx's own stream of its device, permanently: the stream
 * waits for the memory, and readers of the tensor wait for the stream from now on. Errors: -1 with
 * an exception. */
int py_cuda_to_own_stream(TensorObject* tensor);

/* Let a new tensor be ready when dlx's own stream is; nothing is recorded before somebody waits.
 * Errors: -1 with an exception. */
int py_cuda_ready_here(TensorObject* tensor, int32_t device_id);

/* dlx_cuda_work_stream, the first time without the GIL. Errors: -1 with an exception. */
int py_cuda_work_stream(int32_t device_id, uint64_t* stream);

extern PyMethodDef py_cuda_functions[];

/* ---- python/arrow.c -------------------------------------------------------------------------- */

/* Names that are used in every call. Errors: -1 with an exception. */
int py_arrow_init(void);

/* Exchange tables that export columns of numbers; what they export is made by dlx. The second asks
 * types that have it for __dlpack__ instead. */
extern const DLPackExchangeAPI py_arrow_table, py_arrow_dlpack_table;

extern PyMethodDef py_arrow_functions[];

/* ---- python/arrow_export.c ------------------------------------------------------------------- */

/* Methods __arrow_c_array__ and __arrow_c_schema__ of dlx.Tensor: fresh capsules over its memory.
 * Owns: new reference. Errors: NULL with an exception. */
PyObject* py_arrow_array(PyObject* tensor, PyObject* const* args, Py_ssize_t nargs,
                         PyObject* names);
PyObject* py_arrow_schema(PyObject* tensor, PyObject* unused);

/* ---- python/exchange_import.c ---------------------------------------------------------------- */

/* The table behind a capsule (or, where it may be one, a number) whose major version is ours, newer
 * ones being walked back; NULL for anything else. Owns: borrowed, static. GIL: needed. Errors:
 * none. */
const DLPackExchangeAPI* py_exchange_read(PyObject* attribute, int may_be_number);

/* The table that an exact type carries, under the name of DLPack 1.3 or of 1.2, or NULL. Owns:
 * borrowed, static. GIL: needed. Errors: NULL with what py_error_forget leaves. */
const DLPackExchangeAPI* py_exchange_find(PyTypeObject* type);

/* Export an array by the managed slot of a table that has one. Owns: the caller owns *out, which
 * owes the foreign deleter. GIL: needed; may run Python. Errors: -1 with an exception. */
int py_exchange_managed(const DLPackExchangeAPI* table, PyObject* obj,
                        DLManagedTensorVersioned** out);

extern PyMethodDef py_exchange_functions[];

/* ---- python/exchange_export.c ---------------------------------------------------------------- */

/* dlx.Tensor's exchange table. */
extern const DLPackExchangeAPI py_tensor_table;

/* Publish dlx.Tensor's exchange table on the type. Owns: the type holds the capsule; the table is
 * static. Errors: -1 with an exception. */
int py_table_publish(PyTypeObject* type);

/* ---- python/tensor_type.c -------------------------------------------------------------------- */

/* Create the type and add it to the module. Errors: -1 with an exception. */
int py_tensor_init(PyObject* module);

/* ---- python/fast_path_type.c ----------------------------------------------------------------- */

/* Create the type `FastPathFunction` and add it to the module. Errors: -1 with an exception. */
int py_fast_path_init(PyObject* module);

/* ---- python/view.c --------------------------------------------------------------------------- */

/* Add the type Slots, the base of lazy views, to a module. GIL: needed. Errors: -1 with an
 * exception. */
int py_view_init(PyObject* module);

/* What an element is known by in the scope of a view: its address, or what `identity` says, if that
 * is not None. Owns: new reference. GIL: needed; may run Python. Errors: NULL with an exception. */
PyObject* py_view_name(PyObject* element, PyObject* identity);

#endif
