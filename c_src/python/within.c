/* Arrays over parts of one piece of memory, which numbers describe: dlx.share writes the numbers;
 * dlx.attach, and reading a pickle, check them and make the arrays. */

#include "route.h"

/* What the numbers of all arrays are about. */
typedef struct {
  uintptr_t address;
  int64_t size;   /* bytes */
  uint64_t flags; /* added to those of each tensor */
  PyObject* owner;
} memory;

enum { OFFSET, CODE, BITS, LANES, FLAGS, NDIM, HEAD }; /* numbers before the shape */

/* Make the tensor that the first of `left` numbers describe, and count those it took. Owns: the
 * caller owns the result, which holds the memory's owner. Errors: NULL with an exception. */
static DLManagedTensorVersioned* made_within(const memory* m, const int64_t* n, int64_t left,
                                             int64_t* used) {
  if (left < HEAD || n[NDIM] < 0 || n[NDIM] > DLX_MAX_NDIM || left < HEAD + 2 * n[NDIM] ||
      n[CODE] < 0 || n[CODE] > UINT8_MAX || n[BITS] < 0 || n[BITS] > UINT8_MAX || n[LANES] < 0 ||
      n[LANES] > UINT16_MAX || n[CODE] == kDLOpaqueHandle ||
      (n[FLAGS] & ~(int64_t)DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED) || n[OFFSET] < 0 ||
      n[OFFSET] > m->size) {
    PyErr_SetString(PyExc_ValueError, "its numbers describe no tensor");
    return NULL;
  }
  DLTensor like = {
      .data = (void*)(m->address + (uintptr_t)n[OFFSET]),
      .device = {kDLCPU, 0},
      .ndim = (int32_t)n[NDIM],
      .dtype = {(uint8_t)n[CODE], (uint8_t)n[BITS], (uint16_t)n[LANES]},
      .shape = (int64_t*)n + HEAD,
      .strides = (int64_t*)n + HEAD + n[NDIM],
  };
  uint64_t flags = m->flags | (uint64_t)n[FLAGS];
  int is_plain = dlx_is_plain(&like, 1); /* as nearly all are: it is right */
  int status = is_plain ? DLX_OK : dlx_validate(&like, flags);
  if (status != DLX_OK) return py_raise(status, NULL), NULL;
  int64_t low, high;
  dlx_extent(&like, flags, &low, &high);
  if (low < -n[OFFSET] || high > m->size - n[OFFSET]) {
    PyErr_SetString(PyExc_ValueError, "its elements leave the memory");
    return NULL;
  }
  DLManagedTensorVersioned* made;
  status = is_plain ? dlx_managed_trust(&like, flags, m->owner, py_release_object, &made)
                    : dlx_managed_new(&like, flags, m->owner, py_release_object, &made);
  if (status != DLX_OK) return py_raise(status, NULL), NULL;
  Py_INCREF(m->owner);
  *used = HEAD + 2 * n[NDIM];
  return made;
}

typedef struct {
  DLManagedTensorVersioned** made;
  Py_ssize_t n;
} tensors;

/* Owns: what it had. GIL: needed. A pending exception is kept. */
static void drop_all(tensors* all, Py_ssize_t from) {
  py_pending pending = py_pending_save();
  for (Py_ssize_t i = from; i < all->n; i++) dlx_managed_release(all->made[i]);
  PyMem_Free(all->made);
  py_pending_restore(pending);
}

/* Owns: the caller owns what is in `all`. Errors: -1 with an exception, and nothing is in it. */
static int make_all(const memory* m, const Py_buffer* numbers, tensors* all) {
  int64_t at = 0, used = 0, count = numbers->len / (Py_ssize_t)sizeof(int64_t);
  const int64_t* first = numbers->buf;
  *all = (tensors){NULL, 0};
  if (numbers->len % (Py_ssize_t)sizeof(int64_t) || (uintptr_t)first % sizeof(int64_t) ||
      m->size < 0) {
    PyErr_SetString(PyExc_ValueError, "expected numbers of 64 bits, and a size");
    return -1;
  }
  Py_ssize_t room = 0;
  for (; at < count; at += used) {
    if (all->n == room) {
      room = room ? 2 * room : 64;
      void* wider = PyMem_Realloc(all->made, (size_t)room * sizeof *all->made);
      if (wider == NULL) {
        PyErr_NoMemory();
        break;
      }
      all->made = wider;
    }
    if ((all->made[all->n] = made_within(m, first + at, count - at, &used)) == NULL) break;
    all->n++;
  }
  if (at >= count) return 0;
  drop_all(all, 0);
  return -1;
}

/* Owns: takes both; the result is the list. Errors: NULL with an exception, as `array` is then. */
static PyObject* with(PyObject* list, PyObject* array) {
  if (array == NULL || PyList_Append(list, array) < 0) Py_CLEAR(list);
  Py_XDECREF(array);
  return list;
}

PyDoc_STRVAR(
    tensors_within_doc,
    "tensors_within(address, size, numbers, flags, owner, /)\n--\n\n"
    "Make a list of dlx.Tensor over parts of `size` bytes that `owner` keeps alive.\n\n"
    "numbers is a buffer of int64, for each tensor: offset, code, bits, lanes, flags, ndim, "
    "shape\n(ndim,), strides (ndim,). Nothing in it is believed: a tensor that leaves the "
    "bytes, or is none,\nis a ValueError, or what dlx_validate finds. `flags` are added to "
    "each one's.");

static PyObject* tensors_within(PyObject* module, PyObject* args) {
  unsigned long long address, flags;
  long long size;
  Py_buffer numbers;
  memory m;
  if (!PyArg_ParseTuple(args, "KLy*KO:tensors_within", &address, &size, &numbers, &flags, &m.owner))
    return NULL;
  m.address = (uintptr_t)address, m.size = size, m.flags = flags;
  tensors all;
  int failed = make_all(&m, &numbers, &all);
  PyBuffer_Release(&numbers);
  if (failed) return NULL;
  PyObject* list = PyList_New(0);
  Py_ssize_t i = 0;
  while (list && i < all.n) list = with(list, py_tensor_wrap(all.made[i++]));
  drop_all(&all, i);
  return list;
}

/* Hand all tensors to the target of a route. Owns: the result is new; `all` has nothing more.
 * Errors: NULL with an exception; NULL without one: the target does not take them as they are. */
static PyObject* hand_over_all(PyObject* callable, py_route* route, PyObject* to, tensors* all) {
  uint32_t resolvable = 0;
  Py_ssize_t i = 0;
  if (py_fast_path_holds(route)) {
    while (i < all->n && py_fast_path_takes(route, all->made[i], 0, &resolvable) && !resolvable)
      i++;
  }
  PyObject* list = i < all->n || PyErr_Occurred() ? NULL : PyList_New(0);
  i = 0;
  while (list && i < all->n)
    list = with(list, py_fast_path_hand_over(callable, route, all->made[i++], Py_None, to, NULL));
  drop_all(all, i);
  if (list == NULL && PyErr_Occurred()) py_error_forget();
  return list;
}

PyDoc_STRVAR(
    arrays_within_doc,
    "arrays_within(address, size, numbers, flags, owner, fast_path, to, /)\n--\n\n"
    "Make a list of the target's arrays of what `tensors_within` takes, without a dlx.Tensor in\n"
    "between. None where Python must do it, or say what fails: the target does not take each as it "
    "is.");

static PyObject* arrays_within(PyObject* module, PyObject* args) {
  unsigned long long address, flags;
  long long size;
  Py_buffer numbers;
  memory m;
  PyObject *callable, *to;
  if (!PyArg_ParseTuple(args, "KLy*KOOO:arrays_within", &address, &size, &numbers, &flags, &m.owner,
                        &callable, &to))
    return NULL;
  m.address = (uintptr_t)address, m.size = size, m.flags = flags;
  PyObject* list = NULL;
  tensors all;
  py_routes_begin();
  py_route* route = py_fast_path_route(callable, &py_tensor_type, to);
  if (route && route->is_fast_path == 1 && !route->is_same) {
    py_route_enter(route);
    if (make_all(&m, &numbers, &all) == 0) list = hand_over_all(callable, route, to, &all);
    py_route_leave(route);
  }
  py_routes_end();
  PyBuffer_Release(&numbers);
  if (list || PyErr_Occurred()) return list;
  Py_RETURN_NONE;
}

/* The struct of a tensor in a list, borrowed. Errors: NULL with an exception. */
static const DLManagedTensorVersioned* listed(PyObject* list, Py_ssize_t i) {
  PyObject* tensor = PyList_GET_ITEM(list, i);
  if (Py_IS_TYPE(tensor, &py_tensor_type)) return py_tensor_managed(tensor);
  PyErr_SetString(PyExc_TypeError, "expected a list of dlx.Tensor");
  return NULL;
}

PyDoc_STRVAR(tensors_extents_doc,
             "tensors_extents(tensors, /)\n--\n\n"
             "Return a list of (first, end, dense): the addresses of each tensor's elements, and "
             "whether\nthey fill what is between, in whatever order of dimensions.");

static PyObject* tensors_extents(PyObject* module, PyObject* tensors) {
  if (!PyList_CheckExact(tensors)) return PyErr_Format(PyExc_TypeError, "expected a list");
  PyObject* found = PyList_New(0);
  for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(tensors); i++) {
    const DLManagedTensorVersioned* managed = listed(tensors, i);
    if (managed == NULL) return Py_DECREF(found), NULL;
    const DLTensor* t = &managed->dl_tensor;
    int64_t low, high, address = (int64_t)((uintptr_t)t->data + t->byte_offset);
    dlx_extent(t, managed->flags, &low, &high);
    uint32_t gaps = DLX_LAYOUT_GAPS | DLX_LAYOUT_NEGATIVE | DLX_LAYOUT_ZERO;
    PyObject* dense = dlx_layout(t) & gaps ? Py_False : Py_True;
    found = with(found, Py_BuildValue("(LLO)", address + low, address + high, dense));
  }
  return found;
}

PyDoc_STRVAR(
    tensors_numbers_doc,
    "tensors_numbers(tensors, offsets, strides, /)\n--\n\n"
    "Return the numbers that `tensors_within` makes tensors of, as bytes. offsets (n,) and "
    "strides\n(n,) are lists; where strides are None, they are the tensor's own.");

static PyObject* tensors_numbers(PyObject* module, PyObject* args) {
  PyObject *tensors, *offsets, *strides;
  if (!PyArg_ParseTuple(args, "O!O!O!:tensors_numbers", &PyList_Type, &tensors, &PyList_Type,
                        &offsets, &PyList_Type, &strides))
    return NULL;
  Py_ssize_t n = PyList_GET_SIZE(tensors), room = 0;
  if (PyList_GET_SIZE(offsets) != n || PyList_GET_SIZE(strides) != n)
    return PyErr_Format(PyExc_ValueError, "expected an offset and strides for each tensor");
  for (Py_ssize_t i = 0; i < n; i++) {
    const DLManagedTensorVersioned* managed = listed(tensors, i);
    if (managed == NULL) return NULL;
    room += HEAD + 2 * managed->dl_tensor.ndim;
  }
  PyObject* made = PyBytes_FromStringAndSize(NULL, room * (Py_ssize_t)sizeof(int64_t));
  int64_t* to = made ? (int64_t*)PyBytes_AS_STRING(made) : NULL;
  for (Py_ssize_t i = 0; made && i < n; i++) {
    const DLManagedTensorVersioned* managed = listed(tensors, i);
    if (managed == NULL) return Py_DECREF(made), NULL;
    const DLTensor* t = &managed->dl_tensor;
    PyObject* other = PyList_GET_ITEM(strides, i);
    to[OFFSET] = PyLong_AsLongLong(PyList_GET_ITEM(offsets, i));
    to[CODE] = t->dtype.code, to[BITS] = t->dtype.bits, to[LANES] = t->dtype.lanes;
    to[FLAGS] = (int64_t)(managed->flags & DLPACK_FLAG_BITMASK_IS_SUBBYTE_TYPE_PADDED);
    to[NDIM] = t->ndim;
    to += HEAD;
    for (int32_t k = 0; k < t->ndim; k++) {
      to[k] = t->shape[k];
      if (other == Py_None)
        to[t->ndim + k] = t->strides[k];
      else if (PyTuple_Check(other) && PyTuple_GET_SIZE(other) == t->ndim)
        to[t->ndim + k] = PyLong_AsLongLong(PyTuple_GET_ITEM(other, k));
      else
        PyErr_SetString(PyExc_ValueError, "expected None, or a stride for each dimension");
    }
    to += 2 * t->ndim;
    if (PyErr_Occurred()) Py_CLEAR(made);
  }
  return made;
}

PyMethodDef py_within_functions[] = {
    {"tensors_within", tensors_within, METH_VARARGS, tensors_within_doc},
    {"arrays_within", arrays_within, METH_VARARGS, arrays_within_doc},
    {"tensors_extents", tensors_extents, METH_O, tensors_extents_doc},
    {"tensors_numbers", tensors_numbers, METH_VARARGS, tensors_numbers_doc},
    {NULL, NULL, 0, NULL},
};
