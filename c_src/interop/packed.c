/* Many tensors in one block of memory, described by packed numbers: dlx.share packs, dlx.attach and
 * pickles check and unpack. */

#include "convert/pairs.h"

#include <string.h>

typedef struct {
  uintptr_t address;
  int64_t size;   /* bytes */
  uint64_t flags; /* added to each tensor's */
  PyObject* owner;
  Py_buffer numbers;
} memory;

/* One tensor. Its shape follows, then its strides unless they are row-major. */
typedef struct {
  int64_t offset; /* bytes */
  uint8_t code, bits;
  uint16_t lanes;
  uint8_t ndim, flags, is_row_major, zero;
} numbers;

/* Owns: the caller releases m->numbers. */
static int read_memory(PyObject* const* args, memory* m) {
  m->address = (uintptr_t)PyLong_AsUnsignedLongLong(args[0]);
  if (!PyErr_Occurred()) m->size = PyLong_AsLongLong(args[1]);
  if (!PyErr_Occurred()) m->flags = PyLong_AsUnsignedLongLong(args[3]);
  if (PyErr_Occurred() || PyObject_GetBuffer(args[2], &m->numbers, PyBUF_SIMPLE) < 0) return -1;
  m->owner = args[4];
  if (m->numbers.len % (Py_ssize_t)sizeof(int64_t) == 0 && m->size >= 0 &&
      (uintptr_t)m->numbers.buf % sizeof(int64_t) == 0)
    return 0;
  PyBuffer_Release(&m->numbers);
  PyErr_SetString(PyExc_ValueError, "expected numbers of 64 bits, and a size");
  return -1;
}

/* Unpack the first tensor from `left` bytes; *used = the bytes it takes. */
static DLManagedTensorVersioned* unpack_tensor(const memory* m, char* at, Py_ssize_t left,
                                               Py_ssize_t* used) {
  numbers n;
  Py_ssize_t row = 0;
  if (left >= (Py_ssize_t)sizeof n) {
    memcpy(&n, at, sizeof n);
    row = n.ndim * (Py_ssize_t)sizeof(int64_t);
    *used = (Py_ssize_t)sizeof n + row * (n.is_row_major ? 1 : 2);
  }
  if (left < (Py_ssize_t)sizeof n || left < *used || n.ndim > DLX_MAX_NDIM || n.is_row_major > 1 ||
      n.zero || n.code == kDLOpaqueHandle ||
      (n.flags & ~DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) || n.offset < 0 || n.offset > m->size)
    return PyErr_Format(PyExc_ValueError, "its numbers do not describe a tensor"), NULL;
  int64_t* shape = (int64_t*)(at + sizeof n);
  DLTensor like = {
      .data = (void*)(m->address + (uintptr_t)n.offset),
      .device = {kDLCPU, 0},
      .ndim = n.ndim,
      .dtype = {n.code, n.bits, n.lanes},
      .shape = shape,
      .strides = n.is_row_major ? NULL : shape + n.ndim,
  };
  uint64_t flags = m->flags | n.flags;
  DLManagedTensorVersioned* made;
  if (py_check(dlx_managed_new(&like, flags, m->owner, py_release_object, &made)) < 0) return NULL;
  int64_t low, high;
  dlx_extent(&made->dl_tensor, flags, &low, &high);
  if (low < -n.offset || high > m->size - n.offset) {
    PyErr_SetString(PyExc_ValueError, "its elements lie outside the memory");
    dlx_managed_own(made, NULL, NULL);
    dlx_managed_release(made);
    return NULL;
  }
  Py_INCREF(m->owner);
  return made;
}

typedef struct {
  DLManagedTensorVersioned** made;
  Py_ssize_t n;
} tensors;

static void drop_all(tensors* all, Py_ssize_t from) {
  py_pending pending = py_pending_save();
  for (Py_ssize_t i = from; i < all->n; i++) dlx_managed_release(all->made[i]);
  PyMem_Free(all->made);
  py_pending_restore(pending);
}

/* Owns: the caller calls drop_all. */
static int unpack_all(const memory* m, tensors* all) {
  char* first = m->numbers.buf;
  Py_ssize_t at = 0, used = 0, bytes = m->numbers.len;
  *all = (tensors){PyMem_Malloc((size_t)bytes / sizeof(numbers) * sizeof *all->made), 0};
  if (all->made == NULL) return PyErr_NoMemory(), -1;
  for (; at < bytes; at += used) {
    DLManagedTensorVersioned* made = unpack_tensor(m, first + at, bytes - at, &used);
    if (made == NULL) break;
    all->made[all->n++] = made;
  }
  if (at >= bytes) return 0;
  drop_all(all, 0);
  return -1;
}

/* Owns: takes both, returns the list. Errors: NULL if it fails or `array` is NULL. */
static PyObject* append_new(PyObject* list, PyObject* array) {
  if (array == NULL || PyList_Append(list, array) < 0) Py_CLEAR(list);
  Py_XDECREF(array);
  return list;
}

PY_DOC(tensors_unpack,
       "Return a list of dlx.Tensor in `size` bytes that `owner` keeps alive, as packed in the "
       "buffer `numbers`. Raise ValueError for invalid numbers or tensors outside the memory.");
static PyObject* tensors_unpack(PyObject* module, PyObject* const* args, Py_ssize_t n) {
  memory m;
  tensors all;
  if (!py_check_args("tensors_unpack", n, 5, 5) || read_memory(args, &m) < 0) return NULL;
  int failed = unpack_all(&m, &all);
  PyBuffer_Release(&m.numbers);
  if (failed) return NULL;
  PyObject* list = PyList_New(0);
  Py_ssize_t i = 0;
  while (list && i < all.n) list = append_new(list, py_tensor_wrap(all.made[i++]));
  drop_all(&all, i);
  return list;
}

/* Hand all tensors to a target. Owns: takes the tensors. Errors: NULL, without an exception if the
 * target cannot share one of them. */
static PyObject* convert_all(const py_call* call, const py_pair* pair, tensors* all) {
  py_target* target = pair->target;
  py_offer offer = {.state = PY_TAKEN};
  Py_ssize_t i = 0;
  if (py_target_holds(target, 0)) {
    while (i < all->n && py_offer_checks(pair->source, target, all->made[i], 0, &offer) &&
           offer.state == PY_TAKEN)
      i++;
  }
  PyObject* list = i < all->n || PyErr_Occurred() ? NULL : PyList_New(0);
  i = 0;
  while (list && i < all->n)
    list = append_new(list, target->hand_over(call, target, all->made[i++], Py_None));
  drop_all(all, i);
  if (list == NULL && PyErr_Occurred()) py_error_forget();
  return list;
}

PY_DOC(arrays_unpack,
       "Unpack like tensors_unpack, and return a list of the target's arrays. Return None if the "
       "Python path must convert them or find the error.");
static PyObject* arrays_unpack(PyObject* module, PyObject* const* args, Py_ssize_t n) {
  memory m;
  tensors all;
  if (!py_check_args("arrays_unpack", n, 7, 7) || read_memory(args, &m) < 0) return NULL;
  PyObject* list = NULL;
  py_call call = {.function = (FastPathObject*)args[5], .to = args[6]};
  py_maps_begin();
  py_pair pair;
  if (py_pair_learn(call.function, &py_tensor_type, call.to, &pair)) {
    if (pair.what == PY_CONVERTS && unpack_all(&m, &all) == 0)
      list = convert_all(&call, &pair, &all);
    py_pair_release(&pair);
  }
  py_maps_end();
  PyBuffer_Release(&m.numbers);
  if (list || PyErr_Occurred()) return list;
  Py_RETURN_NONE;
}

/* Owns: the result is borrowed. */
static const DLManagedTensorVersioned* get_tensor(PyObject* list, Py_ssize_t i) {
  PyObject* tensor = PyList_GET_ITEM(list, i);
  if (Py_IS_TYPE(tensor, &py_tensor_type)) return py_tensor_managed(tensor);
  PyErr_SetString(PyExc_TypeError, "expected a list of dlx.Tensor");
  return NULL;
}

PY_DOC(tensors_extents,
       "Return a list of (first, end, is_dense) of the addresses of each tensor's elements.");
static PyObject* tensors_extents(PyObject* module, PyObject* tensors) {
  if (!PyList_CheckExact(tensors)) return PyErr_Format(PyExc_TypeError, "expected a list");
  PyObject* found = PyList_New(0);
  for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(tensors); i++) {
    const DLManagedTensorVersioned* managed = get_tensor(tensors, i);
    if (managed == NULL) return Py_DECREF(found), NULL;
    const DLTensor* t = &managed->dl_tensor;
    int64_t low, high, address = (int64_t)((uintptr_t)t->data + t->byte_offset);
    dlx_extent(t, managed->flags, &low, &high);
    uint32_t gaps = DLX_LAYOUT_GAPS | DLX_LAYOUT_NEGATIVE | DLX_LAYOUT_ZERO;
    PyObject* dense = dlx_layout(t) & gaps ? Py_False : Py_True;
    found = append_new(found, Py_BuildValue("(LLO)", address + low, address + high, dense));
  }
  return found;
}

/* Read strides from a tuple, or from the tensor for None. Return whether they are row-major. */
static int read_strides(PyObject* value, const DLTensor* t, int64_t* strides) {
  int64_t compact[DLX_MAX_NDIM];
  size_t bytes = (size_t)t->ndim * sizeof *strides;
  if (value == Py_None) {
    memcpy(strides, t->strides, bytes);
  } else if (PyTuple_Check(value) && PyTuple_GET_SIZE(value) == t->ndim) {
    for (int32_t i = 0; i < t->ndim; i++)
      strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(value, i));
  } else {
    PyErr_SetString(PyExc_ValueError, "expected None or a stride for each dimension");
  }
  if (PyErr_Occurred()) return -1;
  dlx_compact_strides(t->ndim, t->shape, compact);
  return memcmp(strides, compact, bytes) == 0;
}

PY_DOC(tensors_pack,
       "Return bytes for tensors_unpack. An item of `strides` is a tuple, or None: the tensor's.");
static PyObject* tensors_pack(PyObject* module, PyObject* args) {
  PyObject *tensors, *offsets, *strides;
  if (!PyArg_ParseTuple(args, "O!O!O!:tensors_pack", &PyList_Type, &tensors, &PyList_Type, &offsets,
                        &PyList_Type, &strides))
    return NULL;
  Py_ssize_t count = PyList_GET_SIZE(tensors), room = 0, used = 0;
  if (PyList_GET_SIZE(offsets) != count || PyList_GET_SIZE(strides) != count)
    return PyErr_Format(PyExc_ValueError, "expected an offset and strides for each tensor");
  for (Py_ssize_t i = 0; i < count; i++) {
    const DLManagedTensorVersioned* managed = get_tensor(tensors, i);
    if (managed == NULL) return NULL;
    room += (Py_ssize_t)sizeof(numbers) + 2 * managed->dl_tensor.ndim * (Py_ssize_t)sizeof(int64_t);
  }
  PyObject* made = PyBytes_FromStringAndSize(NULL, room);
  for (Py_ssize_t i = 0; made && i < count; i++) {
    const DLManagedTensorVersioned* managed = get_tensor(tensors, i);
    if (managed == NULL) return Py_DECREF(made), NULL;
    const DLTensor* t = &managed->dl_tensor;
    int64_t own[DLX_MAX_NDIM];
    int is_row_major = read_strides(PyList_GET_ITEM(strides, i), t, own);
    numbers n = {.offset = PyLong_AsLongLong(PyList_GET_ITEM(offsets, i)),
                 .code = t->dtype.code,
                 .bits = t->dtype.bits,
                 .lanes = t->dtype.lanes,
                 .ndim = (uint8_t)t->ndim,
                 .flags = managed->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED,
                 .is_row_major = is_row_major == 1};
    if (PyErr_Occurred()) return Py_DECREF(made), NULL;
    char* to = PyBytes_AS_STRING(made) + used;
    size_t row = (size_t)t->ndim * sizeof(int64_t);
    memcpy(to, &n, sizeof n);
    memcpy(to + sizeof n, t->shape, row);
    if (!is_row_major) memcpy(to + sizeof n + row, own, row);
    used += (Py_ssize_t)(sizeof n + row * (2 - n.is_row_major));
  }
  if (made) _PyBytes_Resize(&made, used);
  return made;
}

PyMethodDef py_packed_functions[] = {
    PY_FASTCALL(tensors_unpack),
    PY_FASTCALL(arrays_unpack),
    PY_ONE(tensors_extents),
    PY_VARARGS(tensors_pack),
    PY_END,
};
