/* What other objects give out by Arrow's PyCapsule interface. It is moved out of its capsules at
 * once, which marks them as used; from then on the counts of core/arrow.c decide when it is
 * released. Python holds it in a capsule of dlx's own. */

#include "dlx_python.h"
#include "threads.h"

#include "core/arrow.h"

#include <string.h>

static const char k_schema[] = "arrow_schema";
static const char k_array[] = "arrow_array";
static const char k_device_array[] = "arrow_device_array";
static const char k_stream[] = "arrow_array_stream";
static const char k_device_stream[] = "arrow_device_array_stream";
static const char k_data[] = "dlx_arrow"; /* a dlx_arrow; never leaves dlx */

/* A producer's release may run Python. GIL: needed; a pending error is kept. */
static void drop(dlx_arrow* data) {
  py_pending pending = py_pending_save();
  dlx_arrow_drop(data);
  py_pending_restore(pending);
}

/* The pointer in a capsule of a name. Errors: NULL with an exception that says what it is. */
static void* opened(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name)) return PyCapsule_GetPointer(capsule, name);
  const char* found = PyCapsule_CheckExact(capsule) ? PyCapsule_GetName(capsule) : NULL;
  if (PyCapsule_CheckExact(capsule))
    return py_raise(DLX_E_ARROW, "expected a capsule named '%s', found one named '%s'", name,
                    found ? found : "NULL");
  return py_raise(DLX_E_ARROW, "expected a capsule named '%s', found %.200s", name,
                  Py_TYPE(capsule)->tp_name);
}

static PyObject* refuse(int status) {
  if (status == DLX_E_CONSUMED) return py_raise(status, "this Arrow capsule was used before");
  return py_raise(status, NULL);
}

/* Move a pair of capsules. Errors: -1 with an exception. */
static int take_pair(dlx_arrow* data, PyObject* pair, const char* name) {
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
    py_raise(DLX_E_ARROW, "expected a pair of Arrow capsules, found %.200s",
             Py_TYPE(pair)->tp_name);
    return -1;
  }
  PyObject* capsules[] = {PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)};
  struct ArrowSchema* schema = opened(capsules[0], k_schema);
  void* array = schema ? opened(capsules[1], name) : NULL;
  if (array == NULL) return -1;
  int status;
  PY_LOCKED(capsules[0]) /* of several threads one moves it */
  status = dlx_arrow_move_schema(data, schema);
  PY_UNLOCKED()
  if (status == DLX_OK) {
    PY_LOCKED(capsules[1])
    status = name == k_array ? dlx_arrow_move_array(data, array)
                             : dlx_arrow_move_device_array(data, array);
    PY_UNLOCKED()
  }
  return status == DLX_OK ? 0 : (refuse(status), -1);
}

/* Why reading a stream failed. Errors: always returns -1 with an exception. */
static int stream_failed(int status, const char* why) {
  if (status == DLX_E_ARROW)
    py_raise(status, "its Arrow stream failed: %s", why[0] ? why : "it does not say why");
  else
    refuse(status);
  return -1;
}

/* Read a stream to its end, and release it. Errors: -1 with an exception. */
static int read_stream(dlx_arrow* data, struct ArrowDeviceArrayStream* stream) {
  char why[512] = "";
  int status;
  Py_BEGIN_ALLOW_THREADS
    status = dlx_arrow_read(data, stream);
    int may_say = status == DLX_E_ARROW && stream->release && stream->get_last_error;
    const char* said = may_say ? stream->get_last_error(stream) : NULL;
    if (said) snprintf(why, sizeof why, "%s", said);
    if (stream->release) stream->release(stream);
  Py_END_ALLOW_THREADS
  return status == DLX_OK ? 0 : stream_failed(status, why);
}

/* Errors: -1 with an exception. */
static int take_stream(dlx_arrow* data, PyObject* capsule, const char* name) {
  void* held = opened(capsule, name);
  if (held == NULL) return -1;
  struct ArrowArrayStream host; /* `stream` points to it */
  struct ArrowDeviceArrayStream stream;
  PY_LOCKED(capsule) /* as above */
  if (name == k_stream) {
    host = *(struct ArrowArrayStream*)held; /* moved */
    ((struct ArrowArrayStream*)held)->release = NULL;
    stream = dlx_arrow_host_stream(&host);
  } else {
    stream = *(struct ArrowDeviceArrayStream*)held;
    ((struct ArrowDeviceArrayStream*)held)->release = NULL;
  }
  PY_UNLOCKED()
  return read_stream(data, &stream);
}

static PyObject *array_method, *stream_method, *dlpack_method; /* interned, by py_arrow_init */

/* Take all that one method of an object gives. Owns: the caller has the only count. GIL: needed;
 * runs Python. Errors: NULL with an exception. */
static dlx_arrow* take(PyObject* obj, PyObject* method, const char* name) {
  PyObject* given = PyObject_CallMethodNoArgs(obj, method);
  if (given == NULL) return NULL;
  dlx_arrow* data = dlx_arrow_new();
  int failed = -1;
  if (data == NULL) {
    PyErr_NoMemory();
  } else {
    int is_stream = name == k_stream || name == k_device_stream;
    failed = is_stream ? take_stream(data, given, name) : take_pair(data, given, name);
  }
  if (failed && data) {
    drop(data);
    data = NULL;
  }
  py_pending pending = py_pending_save(); /* capsules' destructors may run Python */
  Py_DECREF(given);
  py_pending_restore(pending);
  return data;
}

static void destroy_data(PyObject* capsule) {
  drop(PyCapsule_GetPointer(capsule, k_data));
}

PyDoc_STRVAR(arrow_open_doc,
             "arrow_open(obj, method, /)\n--\n\n"
             "Call one of the methods __arrow_c_array__, __arrow_c_stream__, "
             "__arrow_c_device_array__ and\n"
             "__arrow_c_device_stream__ of an object, and return what it gives, all batches of it, "
             "for the functions below.");

/* Owns: new reference. GIL: needed; runs Python. Errors: NULL with an exception. */
static PyObject* open_by(PyObject* obj, PyObject* method) {
  static const struct {
    const char *method, *name;
  } capsules[] = {{"__arrow_c_array__", k_array},
                  {"__arrow_c_stream__", k_stream},
                  {"__arrow_c_device_stream__", k_device_stream},
                  {"__arrow_c_device_array__", k_device_array}};
  size_t i = 0;
  while (i < 3 && PyUnicode_CompareWithASCIIString(method, capsules[i].method) != 0) i++;
  const char* name = capsules[i].name;
  dlx_arrow* data = take(obj, method, name);
  if (data == NULL) return NULL;
  PyObject* capsule = PyCapsule_New(data, k_data, destroy_data);
  if (capsule == NULL) drop(data);
  return capsule;
}

static PyObject* arrow_open(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs == 2 && PyUnicode_Check(args[1])) return open_by(args[0], args[1]);
  PyErr_SetString(PyExc_TypeError, "arrow_open takes an object and the name of a method");
  return NULL;
}

enum { MAX_LEVELS = 256 }; /* of nested types */

/* Owns: new reference. Errors: NULL with an exception. */
static PyObject* metadata_of(const char* text) {
  PyObject* found = PyDict_New();
  int32_t n = 0, sizes[2];
  if (found == NULL || text == NULL) return found;
  memcpy(&n, text, sizeof n);
  for (text += sizeof n; n > 0; n--) {
    PyObject* pair[2] = {NULL, NULL};
    int ok = 1;
    for (int i = 0; i < 2 && ok; i++) {
      memcpy(&sizes[i], text, sizeof sizes[i]);
      ok = sizes[i] >= 0;
      if (!ok) py_raise(DLX_E_ARROW, "the metadata of a type has a length of %d", (int)sizes[i]);
      pair[i] = ok ? PyBytes_FromStringAndSize(text + sizeof sizes[i], sizes[i]) : NULL;
      ok = pair[i] != NULL;
      if (ok) text += sizeof sizes[i] + (size_t)sizes[i];
    }
    ok = ok && PyDict_SetItem(found, pair[0], pair[1]) == 0;
    Py_XDECREF(pair[0]);
    Py_XDECREF(pair[1]);
    if (!ok) {
      Py_DECREF(found);
      return NULL;
    }
  }
  return found;
}

static PyObject* type_once(const struct ArrowSchema* schema, int levels, PyObject* known);

/* Owns: new reference. Errors: NULL with an exception. */
static PyObject* type_of(const struct ArrowSchema* schema, int levels, PyObject* known) {
  if (schema == NULL || schema->format == NULL || schema->n_children < 0 ||
      (schema->n_children > 0 && schema->children == NULL))
    return py_raise(DLX_E_ARROW, "an Arrow type has no format string, or not its children");
  if (levels == MAX_LEVELS)
    return py_raise(DLX_E_ARROW, "an Arrow type is nested more than %d levels deep", MAX_LEVELS);
  PyObject* metadata = metadata_of(schema->metadata);
  PyObject* children = metadata ? PyList_New(0) : NULL;
  for (int64_t i = 0; children && i < schema->n_children; i++) {
    PyObject* child = type_once(schema->children[i], levels + 1, known);
    if (child == NULL || PyList_Append(children, child) < 0) Py_CLEAR(children);
    Py_XDECREF(child);
  }
  PyObject* found = NULL;
  if (children) {
    Py_SETREF(children, PyList_AsTuple(children));
    if (children)
      found = Py_BuildValue(
          "(NNOOO)",
          PyUnicode_DecodeUTF8(schema->format, (Py_ssize_t)strlen(schema->format), "replace"),
          PyUnicode_DecodeUTF8(schema->name ? schema->name : "",
                               schema->name ? (Py_ssize_t)strlen(schema->name) : 0, "replace"),
          metadata, schema->dictionary ? Py_True : Py_False, children);
  }
  Py_XDECREF(children);
  Py_XDECREF(metadata);
  return found;
}

/* The same, read once: children that are shared at every level have more paths than can be walked.
 * `known`: {address: type}. Owns: new reference. Errors: NULL with an exception. */
static PyObject* type_once(const struct ArrowSchema* schema, int levels, PyObject* known) {
  PyObject* address = PyLong_FromVoidPtr((void*)schema);
  PyObject* found = address ? Py_XNewRef(PyDict_GetItemWithError(known, address)) : NULL;
  if (found == NULL && !PyErr_Occurred()) {
    found = type_of(schema, levels, known);
    if (found && PyDict_SetItem(known, address, found) < 0) Py_CLEAR(found);
  }
  Py_XDECREF(address);
  return found;
}

static dlx_arrow* data_of(PyObject* capsule) {
  return PyCapsule_GetPointer(capsule, k_data);
}

PyDoc_STRVAR(arrow_schema_doc,
             "arrow_schema(data, /)\n--\n\n"
             "Return the type as (format, name, {key: value} of bytes, has a dictionary, types of "
             "the children).");

static PyObject* arrow_schema(PyObject* module, PyObject* capsule) {
  dlx_arrow* data = data_of(capsule);
  PyObject* known = data ? PyDict_New() : NULL;
  PyObject* found = known ? type_of(dlx_arrow_schema(data), 0, known) : NULL;
  Py_XDECREF(known);
  return found;
}

static PyObject* contradiction(int status, const dlx_arrow_fault* fault) {
  return status == DLX_E_ARROW ? py_raise(status, "its Arrow data contradicts itself: %s %lld",
                                          fault->what, (long long)fault->found)
                               : py_raise(status, NULL);
}

/* The column that arguments (data, number) name. Errors: -1 with an exception. */
static int look(PyObject* const* args, Py_ssize_t nargs, dlx_arrow** data, int64_t* number,
                dlx_arrow_column* column) {
  dlx_arrow_fault fault;
  *data = nargs == 2 ? data_of(args[0]) : NULL;
  if (*data == NULL) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "Arrow data and a number are wanted");
    return -1;
  }
  *number = PyLong_AsLongLong(args[1]);
  if (*number == -1 && PyErr_Occurred()) return -1;
  int status;
  Py_BEGIN_ALLOW_THREADS /* it reads all bitmaps */
    status = dlx_arrow_look(*data, *number, column, &fault);
  Py_END_ALLOW_THREADS
  return status == DLX_OK ? 0 : (contradiction(status, &fault), -1);
}

PyDoc_STRVAR(
    arrow_column_doc,
    "arrow_column(data, number, /)\n--\n\n"
    "Return (dtype or None, shape, device, nulls, chunks, whether bools are packed, address) "
    "of a column, or\n"
    "of the whole (-1). Where it has no dtype only the first extent is known.");

static PyObject* arrow_column(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  dlx_arrow* data;
  dlx_arrow_column column;
  int64_t number;
  if (look(args, nargs, &data, &number, &column) < 0) return NULL;
  int32_t ndim = column.is_numbers ? column.ndim : 1;
  PyObject* shape = PyTuple_New(ndim);
  for (int32_t i = 0; shape && i < ndim; i++) {
    PyObject* extent = PyLong_FromLongLong(column.shape[i]);
    if (extent == NULL) {
      Py_CLEAR(shape);
    } else {
      PyTuple_SET_ITEM(shape, i, extent);
    }
  }
  PyObject* dtype = !column.is_numbers ? Py_NewRef(Py_None)
                                       : Py_BuildValue("(iii)", column.dtype.code,
                                                       column.dtype.bits, column.dtype.lanes);
  return Py_BuildValue(
      "(NN(ii)LLON)", dtype, shape, (int)column.device.device_type, (int)column.device.device_id,
      (long long)column.n_nulls, (long long)column.n_chunks,
      column.is_numbers && column.is_packed ? Py_True : Py_False, PyLong_FromVoidPtr(column.data));
}

/* Errors: always returns NULL with an exception. */
static PyObject* no_waiting(DLDevice device) {
  return py_raise(DLX_E_STREAM,
                  "it is ready at an event of device (%d, %d), for which dlx cannot wait",
                  device.device_type, device.device_id);
}

/* Make readers wait for the event that device memory came with. Errors: -1 with an exception. */
static int follow_event(dlx_arrow* data, TensorObject* tensor) {
  void* event = dlx_arrow_event(data);
  if (event == NULL) return 0;
  DLDevice device = tensor->managed->dl_tensor.device;
  if (device.device_type != kDLCUDA) {
    no_waiting(device);
    return -1;
  }
  int status = dlx_cuda_wait_event(device.device_id, *(void**)event);
  if (status == DLX_OK) return py_cuda_ready_here(tensor, device.device_id);
  py_raise(status, NULL);
  return -1;
}

PyDoc_STRVAR(arrow_share_doc,
             "arrow_share(data, number, /)\n--\n\n"
             "Make a dlx.Tensor, read-only, over a column of numbers in one chunk, without nulls.");

static PyObject* arrow_share(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  dlx_arrow* data;
  dlx_arrow_column column;
  int64_t number;
  if (look(args, nargs, &data, &number, &column) < 0) return NULL;
  if (!column.is_numbers || column.n_nulls || column.is_packed || column.n_chunks > 1)
    return py_raise(DLX_E_COPY, NULL);
  DLManagedTensorVersioned* made;
  int status = dlx_arrow_share(data, &column, &made);
  if (status != DLX_OK) return py_raise(status, NULL);
  PyObject* tensor = py_tensor_wrap(made);
  if (tensor && follow_event(data, (TensorObject*)tensor) < 0) Py_CLEAR(tensor);
  return tensor;
}

/* Copy chunks of a CUDA device into memory there, on dlx's own stream, which waits for the event of
 * each. Owns: on success the chunks are kept until the device is done; the caller owns `out`. GIL:
 * not needed. Errors: as dlx_cuda_empty, dlx_cuda_transfer. */
static int gather_on_device(dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                            DLManagedTensorVersioned** out) {
  int32_t device_id = column->device.device_id;
  uint64_t stream;
  void* use = NULL;
  DLTensor like = {.data = column->data,
                   .device = column->device,
                   .ndim = column->ndim,
                   .dtype = column->dtype,
                   .shape = (int64_t*)column->shape};
  int status = dlx_cuda_empty(&like, 0, 0, device_id, out);
  if (status != DLX_OK) return status;
  status = dlx_cuda_work_stream(device_id, &stream);
  if (status == DLX_OK)
    status = dlx_use_new(device_id, stream, data, dlx_arrow_drop, NULL, NULL, &use);
  if (status == DLX_OK) dlx_arrow_hold(data);
  char* to = (*out)->dl_tensor.data;
  for (int64_t i = 0; i < dlx_arrow_batches(data) && status == DLX_OK; i++) {
    DLTensor chunk;
    void* event;
    int64_t count = dlx_arrow_chunk(data, number, column, i, &chunk, &event);
    if (count == 0) continue;
    if (event) status = dlx_cuda_wait_event(device_id, *(void**)event);
    chunk.shape = &count;
    DLTensor place = chunk;
    place.data = to;
    if (status == DLX_OK) status = dlx_cuda_transfer(&chunk, &place, 0, stream, 0);
    to += count * (column->dtype.bits / 8);
  }
  if (use) dlx_use_release(use);
  if (status != DLX_OK) dlx_managed_release(*out);
  return status;
}

PyDoc_STRVAR(
    arrow_gather_doc,
    "arrow_gather(data, number, /)\n--\n\n"
    "Copy a column without nulls into a new dlx.Tensor on its device: chunks joined, bools of the "
    "host a byte each.");

static PyObject* arrow_gather(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  dlx_arrow* data;
  dlx_arrow_column column;
  int64_t number;
  if (look(args, nargs, &data, &number, &column) < 0) return NULL;
  if (!column.is_numbers || column.n_nulls) return py_raise(DLX_E_DTYPE, NULL);
  int is_cuda = column.device.device_type == kDLCUDA && !column.is_packed;
  if (!is_cuda && dlx_arrow_event(data)) return no_waiting(column.device);
  DLManagedTensorVersioned* made;
  int status;
  Py_BEGIN_ALLOW_THREADS
    status = is_cuda ? gather_on_device(data, number, &column, &made)
                     : dlx_arrow_gather(data, number, &column, &made);
  Py_END_ALLOW_THREADS
  if (status != DLX_OK) return py_raise(status, NULL);
  PyObject* tensor = py_tensor_wrap(made);
  if (tensor && is_cuda && py_cuda_ready_here((TensorObject*)tensor, column.device.device_id) < 0)
    Py_CLEAR(tensor);
  return tensor;
}

/* Take what __arrow_c_stream__ gives, or __arrow_c_array__ where there is none: a stream shows the
 * chunks that __arrow_c_array__ of some libraries joins silently. Owns, GIL, Errors: as `take`. */
static dlx_arrow* take_host(PyObject* obj) {
  int has_stream = _PyType_Lookup(Py_TYPE(obj), stream_method) != NULL;
  return has_stream ? take(obj, stream_method, k_stream) : take(obj, array_method, k_array);
}

/* Numbers without nulls, or fixed-size lists of such, none of an extension type. */
static int is_plain(const struct ArrowSchema* schema, const dlx_arrow_column* column) {
  if (!column->is_numbers || column->n_nulls) return 0;
  for (;; schema = schema->children[0]) {
    if (dlx_arrow_is_extension(schema)) return 0;
    if (schema == column->values) return 1;
  }
}

static int is_in_one(const dlx_arrow_column* column) {
  return !column->is_packed && column->n_chunks < 2;
}

/* Export what take_host takes, where that is plain numbers that can be shared as they are. Owns:
 * the caller owns *out. GIL: needed; runs Python. Errors: -1 with an exception. */
static int export(void* obj, DLManagedTensorVersioned** out) {
  dlx_arrow* data = take_host(obj);
  if (data == NULL) return -1;
  dlx_arrow_column column;
  dlx_arrow_fault fault;
  int status = dlx_arrow_look(data, DLX_ARROW_WHOLE, &column, &fault);
  if (status == DLX_OK)
    status = is_plain(dlx_arrow_schema(data), &column) && is_in_one(&column)
                 ? dlx_arrow_share(data, &column, out)
                 : DLX_E_COPY;
  drop(data);
  if (status == DLX_OK) return 0;
  contradiction(status, &fault);
  return -1;
}

/* The same, by __dlpack__ where the type has that: a third of the work of two Arrow capsules. Owns,
 * GIL, Errors: as `export`. */
static int export_by_dlpack(void* obj, DLManagedTensorVersioned** out) {
  if (_PyType_Lookup(Py_TYPE((PyObject*)obj), dlpack_method) == NULL) return export(obj, out);
  if (py_capsule_export(obj, out) < 0) return -1;
  (*out)->flags |= DLPACK_FLAG_BITMASK_READ_ONLY; /* as all memory of Arrow is */
  return 0;
}

const DLPackExchangeAPI py_arrow_table = {
    .header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
    .managed_tensor_from_py_object_no_sync = export,
};
const DLPackExchangeAPI py_arrow_dlpack_table = {
    .header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
    .managed_tensor_from_py_object_no_sync = export_by_dlpack,
};

PyDoc_STRVAR(arrow_exchange_doc,
             "arrow_exchange(by_dlpack=False, /)\n--\n\n"
             "Return an exchange table that exports numbers of the host from any object with "
             "__arrow_c_array__ or\n"
             "__arrow_c_stream__, and does nothing else; by_dlpack: with __dlpack__(max_version=), "
             "where its type has that.");

static PyObject* arrow_exchange(PyObject* module, PyObject* args) {
  int by_dlpack = 0;
  if (!PyArg_ParseTuple(args, "|p:arrow_exchange", &by_dlpack)) return NULL;
  const DLPackExchangeAPI* table = by_dlpack ? &py_arrow_dlpack_table : &py_arrow_table;
  return PyCapsule_New((void*)table, "dlpack_exchange_api", NULL);
}

PyDoc_STRVAR(arrow_joined_doc,
             "arrow_joined(obj, /)\n--\n\n"
             "Copy plain numbers of the host that cannot be shared as they are into a new "
             "dlx.Tensor: chunks joined,\nbools a byte each. None for all else.");

static PyObject* arrow_joined(PyObject* module, PyObject* obj) {
  dlx_arrow* data = take_host(obj);
  if (data == NULL) return NULL;
  dlx_arrow_column column;
  dlx_arrow_fault fault;
  DLManagedTensorVersioned* made = NULL;
  int status;
  Py_BEGIN_ALLOW_THREADS
    status = dlx_arrow_look(data, DLX_ARROW_WHOLE, &column, &fault);
    if (status == DLX_OK && is_plain(dlx_arrow_schema(data), &column) && !is_in_one(&column) &&
        column.device.device_type == kDLCPU)
      status = dlx_arrow_gather(data, DLX_ARROW_WHOLE, &column, &made);
  Py_END_ALLOW_THREADS
  drop(data);
  if (status != DLX_OK) return contradiction(status, &fault);
  if (made == NULL) Py_RETURN_NONE;
  return py_tensor_wrap(made);
}

/* A column of a table of the host: a tensor that shares it, or None where it must be joined;
 * `joins`: a tensor of the joined copy. Owns: new reference. GIL: needed, released meanwhile.
 * Errors: NULL = the Python path says why, unless an exception is set. */
static PyObject* column_of(dlx_arrow* data, int64_t number, int joins) {
  dlx_arrow_column column;
  dlx_arrow_fault fault;
  DLManagedTensorVersioned* made = NULL;
  int is_known;
  Py_BEGIN_ALLOW_THREADS /* it reads all bitmaps */
    is_known = dlx_arrow_look(data, number, &column, &fault) == DLX_OK &&
               column.device.device_type == kDLCPU &&
               is_plain(dlx_arrow_schema(data)->children[number], &column);
    if (is_known && is_in_one(&column))
      is_known = dlx_arrow_share(data, &column, &made) == DLX_OK;
    else if (is_known && joins)
      is_known = dlx_arrow_gather(data, number, &column, &made) == DLX_OK;
  Py_END_ALLOW_THREADS
  if (made) return py_tensor_wrap(made);
  return is_known ? Py_NewRef(Py_None) : NULL;
}

/* Put the columns of a table into a dict, by their names; nothing is copied before all are known.
 * Errors: 0 = the Python path says why, unless an exception is set. */
static int fill_columns(dlx_arrow* data, PyObject* columns, int joins) {
  const struct ArrowSchema* schema = dlx_arrow_schema(data);
  Py_ssize_t n_blocked = 0, position = 0;
  if (!dlx_arrow_is_table(data) || dlx_arrow_is_extension(schema) || dlx_arrow_event(data))
    return 0;
  for (int64_t i = 0; i < schema->n_children; i++) {
    PyObject* value = column_of(data, i, 0);
    const char* text = value ? schema->children[i]->name : NULL;
    if (text == NULL) text = "";
    PyObject* name = value ? PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace") : NULL;
    n_blocked += value == Py_None;
    int failed = name == NULL || PyDict_SetItem(columns, name, value) < 0;
    Py_XDECREF(name);
    Py_XDECREF(value);
    if (failed || PyDict_GET_SIZE(columns) <= i || (n_blocked && !joins)) return 0; /* or twice */
  }
  PyObject *name, *value;
  for (int64_t i = 0; n_blocked && PyDict_Next(columns, &position, &name, &value); i++) {
    if (value != Py_None) continue;
    PyObject* joined = column_of(data, i, 1);
    int failed = joined == NULL || PyDict_SetItem(columns, name, joined) < 0;
    Py_XDECREF(joined);
    if (failed) return 0;
  }
  return 1;
}

PyDoc_STRVAR(
    arrow_columns_doc,
    "arrow_columns(method, obj, joins, /)\n--\n\n"
    "Return ({name: dlx.Tensor}, data) of what arrow_open(obj, method) gives, where that is a "
    "table of the host\nwhose columns are numbers without nulls; else (None, data), or (None, what "
    "the method raised). joins:\nchunks may be joined and bools unpacked, by a copy.");

static PyObject* arrow_columns(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !PyUnicode_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "arrow_columns takes a method's name, an object and a bool");
    return NULL;
  }
  PyObject *answer = open_by(args[1], args[0]), *columns = NULL;
  if (answer == NULL) {
    if ((answer = py_error_take()) == NULL) return NULL;
  } else if ((columns = PyDict_New()) != NULL &&
             !fill_columns(data_of(answer), columns, args[2] == Py_True)) {
    Py_CLEAR(columns);
  }
  PyObject* found = PyErr_Occurred() && py_error_forget() < 0
                        ? NULL
                        : PyTuple_Pack(2, columns ? columns : Py_None, answer);
  Py_XDECREF(columns);
  Py_DECREF(answer);
  return found;
}

int py_arrow_init(void) {
  array_method = PyUnicode_InternFromString("__arrow_c_array__");
  stream_method = PyUnicode_InternFromString("__arrow_c_stream__");
  dlpack_method = PyUnicode_InternFromString("__dlpack__");
  return array_method && stream_method && dlpack_method ? 0 : -1;
}

PyMethodDef py_arrow_functions[] = {
    {"arrow_open", (PyCFunction)(void (*)(void))arrow_open, METH_FASTCALL, arrow_open_doc},
    {"arrow_schema", arrow_schema, METH_O, arrow_schema_doc},
    {"arrow_column", (PyCFunction)(void (*)(void))arrow_column, METH_FASTCALL, arrow_column_doc},
    {"arrow_share", (PyCFunction)(void (*)(void))arrow_share, METH_FASTCALL, arrow_share_doc},
    {"arrow_gather", (PyCFunction)(void (*)(void))arrow_gather, METH_FASTCALL, arrow_gather_doc},
    {"arrow_exchange", arrow_exchange, METH_VARARGS, arrow_exchange_doc},
    {"arrow_joined", arrow_joined, METH_O, arrow_joined_doc},
    {"arrow_columns", (PyCFunction)(void (*)(void))arrow_columns, METH_FASTCALL, arrow_columns_doc},
    {NULL, NULL, 0, NULL},
};
