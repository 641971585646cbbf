/* What other objects give out by Arrow's PyCapsule interface: moved out of its capsules at once,
 * and held by Python in a capsule of dlx's own. */

#include "interop.h"
#include "base/threads.h"

#include "core/allocate.h"
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

static void* pointer_of(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name)) return PyCapsule_GetPointer(capsule, name);
  if (PyCapsule_CheckExact(capsule)) {
    const char* found = PyCapsule_GetName(capsule);
    return py_raise(DLX_E_ARROW, "expected a capsule named '%s', found one named '%s'", name,
                    found ? found : "NULL");
  }
  return py_raise(DLX_E_ARROW, "expected a capsule named '%s', found %.200s", name,
                  Py_TYPE(capsule)->tp_name);
}

/* 0 for DLX_OK. */
static int check_moved(int status) {
  if (status != DLX_E_CONSUMED) return py_check(status);
  return py_raise(status, "this Arrow capsule was used before"), -1;
}

/* Move a pair of capsules. */
static int take_pair(dlx_arrow* data, PyObject* pair, const char* name) {
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
    py_raise(DLX_E_ARROW, "expected a pair of Arrow capsules, found %.200s",
             Py_TYPE(pair)->tp_name);
    return -1;
  }
  PyObject* capsules[] = {PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)};
  struct ArrowSchema* schema = pointer_of(capsules[0], k_schema);
  void* array = schema ? pointer_of(capsules[1], name) : NULL;
  if (array == NULL) return -1;
  int status;
  PY_LOCKED(capsules[0]) /* of several threads one moves it */
  status = dlx_arrow_move_schema(data, schema);
  PY_UNLOCKED()
  if (status == DLX_OK) {
    PY_LOCKED(capsules[1])
    status = dlx_arrow_move_array(data, array, name == k_device_array);
    PY_UNLOCKED()
  }
  return check_moved(status);
}

/* Move a stream, read it to its end and release it. */
static int take_stream(dlx_arrow* data, PyObject* capsule, const char* name) {
  char why[512];
  int status;
  void* held = pointer_of(capsule, name);
  if (held == NULL) return -1;
  dlx_arrow_stream stream = {.is_host = name == k_stream};
  PY_LOCKED(capsule) /* as above */
  if (stream.is_host) {
    stream.of.host = *(struct ArrowArrayStream*)held;
    ((struct ArrowArrayStream*)held)->release = NULL;
  } else {
    stream.of.device = *(struct ArrowDeviceArrayStream*)held;
    ((struct ArrowDeviceArrayStream*)held)->release = NULL;
  }
  PY_UNLOCKED()
  PY_WITHOUT_GIL(status = dlx_arrow_read(data, &stream, why, sizeof why));
  if (status != DLX_E_ARROW) return check_moved(status);
  return py_raise(status, "its Arrow stream failed: %s", why[0] ? why : "it does not say why"), -1;
}

/* Take all that one method of an object gives. Owns: the caller has the only count. */
static dlx_arrow* take(PyObject* obj, PyObject* method, const char* name) {
  PyObject* given = PyObject_CallMethodNoArgs(obj, method);
  if (given == NULL) return NULL;
  dlx_arrow* data = dlx_arrow_new();
  int is_stream = name == k_stream || name == k_device_stream;
  if (data == NULL) {
    PyErr_NoMemory();
  } else if ((is_stream ? take_stream(data, given, name) : take_pair(data, given, name)) < 0) {
    drop(data);
    data = NULL;
  }
  py_drop(given);
  return data;
}

static void destroy_data(PyObject* capsule) {
  drop(PyCapsule_GetPointer(capsule, k_data));
}

static PyObject* open_by(PyObject* obj, PyObject* method) {
  static const struct {
    const char *method, *name;
  } capsules[] = {{"__arrow_c_array__", k_array},
                  {"__arrow_c_stream__", k_stream},
                  {"__arrow_c_device_stream__", k_device_stream},
                  {"__arrow_c_device_array__", k_device_array}};
  size_t i = 0;
  if (!PyUnicode_Check(method)) return PyErr_Format(PyExc_TypeError, "a method's name is a str");
  while (i < 4 && PyUnicode_CompareWithASCIIString(method, capsules[i].method) != 0) i++;
  if (i == 4) return PyErr_Format(PyExc_ValueError, "Arrow has no method %R", method);
  dlx_arrow* data = take(obj, method, capsules[i].name);
  if (data == NULL) return NULL;
  PyObject* capsule = PyCapsule_New(data, k_data, destroy_data);
  if (capsule == NULL) drop(data);
  return capsule;
}

PY_DOC(arrow_open, "Return all that one of an object's __arrow_c_*__ methods gives.");
static PyObject* arrow_open(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  return py_args("arrow_open", nargs, 2, 2) ? open_by(args[0], args[1]) : NULL;
}

enum { MAX_LEVELS = 256 }; /* of nested types */

/* Read the bytes at *text behind their length, and move *text behind them. */
static PyObject* read_bytes(const char** text) {
  int32_t size;
  memcpy(&size, *text, sizeof size);
  if (size < 0)
    return py_raise(DLX_E_ARROW, "the metadata of a type has a length of %d", (int)size);
  const char* bytes = *text + sizeof size;
  *text = bytes + size;
  return PyBytes_FromStringAndSize(bytes, size);
}

static PyObject* metadata_of(const char* text) {
  PyObject* found = PyDict_New();
  int32_t n = 0;
  if (found == NULL || text == NULL) return found;
  memcpy(&n, text, sizeof n);
  for (text += sizeof n; found && n > 0; n--) {
    PyObject* key = read_bytes(&text);
    PyObject* value = key ? read_bytes(&text) : NULL;
    if (value == NULL || PyDict_SetItem(found, key, value) < 0) Py_CLEAR(found);
    Py_XDECREF(key);
    Py_XDECREF(value);
  }
  return found;
}

static PyObject* decode(const char* text) {
  return PyUnicode_DecodeUTF8(text ? text : "", text ? (Py_ssize_t)strlen(text) : 0, "replace");
}

static PyObject* type_once(const struct ArrowSchema* schema, int levels, PyObject* known);

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
  PyObject *found = NULL, *tuple = children ? PyList_AsTuple(children) : NULL;
  if (tuple)
    found = Py_BuildValue("(NNOOO)", decode(schema->format), decode(schema->name), metadata,
                          schema->dictionary ? Py_True : Py_False, tuple);
  Py_XDECREF(tuple);
  Py_XDECREF(children);
  Py_XDECREF(metadata);
  return found;
}

/* The same, once for each address in `known`: shared children have too many paths. */
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

PY_DOC(arrow_schema, "Return (format, name, metadata, has a dictionary, types of the children).");
static PyObject* arrow_schema(PyObject* module, PyObject* capsule) {
  dlx_arrow* data = data_of(capsule);
  PyObject* known = data ? PyDict_New() : NULL;
  PyObject* found = known ? type_of(dlx_arrow_schema(data), 0, known) : NULL;
  Py_XDECREF(known);
  return found;
}

/* ---- columns --------------------------------------------------------------------------------- */

/* A column by its number, or DLX_ARROW_WHOLE. */
typedef struct {
  dlx_arrow* data;
  int64_t number;
  dlx_arrow_column found;
} column;

static int look(column* c) {
  dlx_arrow_fault fault;
  int status;
  PY_WITHOUT_GIL(
      status = dlx_arrow_look(c->data, c->number, &c->found, &fault)); /* it reads all bitmaps */
  if (status != DLX_E_ARROW) return py_check(status);
  return py_raise(status, "its Arrow data contradicts itself: %s %lld", fault.what,
                  (long long)fault.found),
         -1;
}

/* Look at the column that arguments name. */
static int named_column(PyObject* data, PyObject* number, column* c) {
  if ((c->data = data_of(data)) == NULL) return -1;
  c->number = PyLong_AsLongLong(number);
  if (c->number == -1 && PyErr_Occurred()) return -1;
  return look(c);
}

PY_DOC(arrow_column,
       "Return (dtype or None, shape, device, nulls, chunks, are bools packed, address) of a "
       "column or the whole (-1); without a dtype the shape is the first extent.");
static PyObject* arrow_column(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  column c;
  if (!py_args("arrow_column", nargs, 2, 2) || named_column(args[0], args[1], &c) < 0) return NULL;
  const dlx_arrow_column* found = &c.found;
  PyObject* dtype = !found->is_numbers ? Py_NewRef(Py_None)
                                       : Py_BuildValue("(iii)", found->dtype.code,
                                                       found->dtype.bits, found->dtype.lanes);
  return Py_BuildValue(
      "(NN(ii)LLON)", dtype, py_tuple_of(found->shape, found->is_numbers ? found->ndim : 1),
      (int)found->device.device_type, (int)found->device.device_id, (long long)found->n_nulls,
      (long long)found->n_chunks, found->is_numbers && found->is_packed ? Py_True : Py_False,
      PyLong_FromVoidPtr(found->data));
}

static int is_numbers(const dlx_arrow_column* found) {
  return found->is_numbers && !found->n_nulls;
}

/* Whether a column can be shared. */
static int is_in_one(const dlx_arrow_column* found) {
  return is_numbers(found) && !found->is_packed && found->n_chunks < 2;
}

static int is_gathered_on_device(const dlx_arrow_column* found) {
  return found->device.device_type == kDLCUDA && !found->is_packed;
}

/* Copy chunks of a CUDA device into memory there, on dlx's own stream, which waits for the event of
 * each; they live until the device is done. Errors: as dlx_cuda_empty, dlx_cuda_transfer. */
static int gather_on_device(const column* c, DLManagedTensorVersioned** out) {
  int32_t device_id = c->found.device.device_id;
  uint64_t stream;
  void* use = NULL;
  DLTensor like = {
      .ndim = c->found.ndim, .dtype = c->found.dtype, .shape = (int64_t*)c->found.shape};
  int status = dlx_cuda_empty(&like, 0, 0, device_id, out);
  if (status != DLX_OK) return status;
  status = dlx_cuda_work_stream(device_id, &stream);
  if (status == DLX_OK)
    status = dlx_use_new(device_id, stream, c->data, dlx_arrow_drop, NULL, NULL, &use);
  if (status == DLX_OK) dlx_arrow_hold(c->data);
  char* to = (*out)->dl_tensor.data;
  int64_t count;
  DLTensor chunk;
  void* event;
  for (int64_t i = 0; status == DLX_OK; i++) {
    count = dlx_arrow_chunk(c->data, c->number, &c->found, i, &chunk, &event);
    if (count < 0) break;
    if (count == 0) continue;
    if (event) status = dlx_cuda_wait_event(device_id, *(void**)event);
    chunk.shape = &count;
    DLTensor place = chunk;
    place.data = to;
    if (status == DLX_OK) status = dlx_cuda_transfer(&chunk, &place, 0, stream, 0);
    to += count * (c->found.dtype.bits / 8);
  }
  if (use) dlx_use_release(use);
  if (status != DLX_OK) dlx_managed_release(*out);
  return status;
}

/* Make a managed tensor of a column of numbers: over its memory, or of a copy. Errors: DLX_E_DTYPE,
 * DLX_E_COPY = it cannot be shared; as dlx_arrow_gather. */
static int make(const column* c, int copies, DLManagedTensorVersioned** out) {
  int status;
  if (!copies) return is_in_one(&c->found) ? dlx_arrow_share(c->data, &c->found, out) : DLX_E_COPY;
  if (!is_numbers(&c->found)) return DLX_E_DTYPE;
  PY_WITHOUT_GIL(status = is_gathered_on_device(&c->found)
                              ? gather_on_device(c, out)
                              : dlx_arrow_gather(c->data, c->number, &c->found, out));
  return status;
}

/* The same as a dlx.Tensor. */
static PyObject* make_tensor(const column* c, int copies) {
  DLManagedTensorVersioned* made;
  int status = make(c, copies, &made);
  return py_tensor_result(status, made);
}

PY_DOC(arrow_tensor,
       "Make a dlx.Tensor of a column of numbers without nulls: over its only chunk, read-only, "
       "or of a copy on its device.");
static PyObject* arrow_tensor(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  column c;
  if (!py_args("arrow_tensor", nargs, 3, 3) || named_column(args[0], args[1], &c) < 0) return NULL;
  int copies = args[2] == Py_True;
  int may_wait = copies ? is_gathered_on_device(&c.found) : c.found.device.device_type == kDLCUDA;
  if (is_numbers(&c.found) && !may_wait && dlx_arrow_event(c.data))
    return py_raise(DLX_E_STREAM,
                    "it is ready at an event of device (%d, %d), for which dlx cannot wait",
                    c.found.device.device_type, c.found.device.device_id);
  PyObject* tensor = make_tensor(&c, copies);
  if (tensor == NULL) return NULL;
  /* Readers of device memory wait for its event, or for the copy. */
  void* event = copies ? NULL : dlx_arrow_event(c.data);
  int32_t device_id = c.found.device.device_id;
  if ((event && py_check(dlx_cuda_wait_event(device_id, *(void**)event)) < 0) ||
      ((event || (copies && may_wait)) && py_cuda_ready_here((TensorObject*)tensor, device_id) < 0))
    Py_CLEAR(tensor);
  return tensor;
}

/* ---- for the fast path: numbers of the host; all else is left to Python ---------------------- */

/* Whether a column is numbers, or lists of them, on the host, and no level an extension type. */
static int is_plain(const column* c) {
  const struct ArrowSchema* schema = dlx_arrow_schema(c->data);
  if (c->number != DLX_ARROW_WHOLE) schema = schema->children[c->number];
  if (!is_numbers(&c->found) || c->found.device.device_type != kDLCPU) return 0;
  for (;; schema = schema->children[0]) {
    if (dlx_arrow_is_extension(schema)) return 0;
    if (schema == c->found.values) return 1;
  }
}

/* Look at all that __arrow_c_stream__ gives, or else __arrow_c_array__, which joins chunks silently
 * in some libraries. Owns: the caller owns c->data. */
static int take_whole(PyObject* obj, column* c) {
  int has_stream = _PyType_Lookup(Py_TYPE(obj), py_name_arrow_stream) != NULL;
  c->number = DLX_ARROW_WHOLE;
  c->data = has_stream ? take(obj, py_name_arrow_stream, k_stream)
                       : take(obj, py_name_arrow_array, k_array);
  if (c->data == NULL) return -1;
  int failed = look(c);
  if (failed) drop(c->data);
  return failed;
}

/* Export plain numbers that can be shared. Owns: the caller owns *out. */
static int export(void* obj, DLManagedTensorVersioned** out) {
  column c;
  if (take_whole(obj, &c) < 0) return -1;
  int status = is_plain(&c) ? make(&c, 0, out) : DLX_E_COPY;
  drop(c.data);
  return py_check(status);
}

/* The same by __dlpack__ if the type has that: a third of the work of two Arrow capsules. */
static int export_by_dlpack(void* obj, DLManagedTensorVersioned** out) {
  if (_PyType_Lookup(Py_TYPE((PyObject*)obj), py_name_dlpack) == NULL) return export(obj, out);
  if (py_capsule_export(obj, out) < 0) return -1;
  (*out)->flags |= DLPACK_FLAG_BITMASK_READ_ONLY; /* as all memory of Arrow is */
  return 0;
}

PY_DOC(
    arrow_exchange,
    "arrow_exchange(by_dlpack=False, /)\n--\n\n"
    "Return an exchange table that only exports: numbers on the host, by an object's\n"
    "__arrow_c_array__ or __arrow_c_stream__; by_dlpack: by __dlpack__(max_version=) if its type\n"
    "has that.");
static PyObject* arrow_exchange(PyObject* module, PyObject* args) {
  static const DLPackExchangeAPI tables[] = {
      {.header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
       .managed_tensor_from_py_object_no_sync = export},
      {.header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
       .managed_tensor_from_py_object_no_sync = export_by_dlpack}};
  int by_dlpack = 0;
  if (!PyArg_ParseTuple(args, "|p:arrow_exchange", &by_dlpack)) return NULL;
  return PyCapsule_New((void*)&tables[by_dlpack], "dlpack_exchange_api", NULL);
}

PY_DOC(
    arrow_joined,
    "arrow_joined(obj, /)\n--\n\n"
    "Copy plain numbers on the host that cannot be shared unchanged into a new dlx.Tensor: chunks\n"
    "are joined, and bools take a byte each. Return None for anything else.");
static PyObject* arrow_joined(PyObject* module, PyObject* obj) {
  column c;
  if (take_whole(obj, &c) < 0) return NULL;
  PyObject* joined = is_plain(&c) && !is_in_one(&c.found) ? make_tensor(&c, 1) : Py_NewRef(Py_None);
  drop(c.data);
  return joined;
}

/* Put the columns of a host table into a dict by their names; nothing is copied before all are
 * known. `joins`: columns that cannot be shared are copied. Errors: 0, and Python says why. */
static int fill_columns(dlx_arrow* data, PyObject* columns, int joins) {
  const struct ArrowSchema* schema = dlx_arrow_schema(data);
  if (!dlx_arrow_is_table(data) || dlx_arrow_is_extension(schema) || dlx_arrow_event(data))
    return 0;
  for (int is_last = 0; is_last < 2; is_last++) { /* those that are shared first */
    for (int64_t i = 0; i < schema->n_children; i++) {
      column c = {.data = data, .number = i};
      if (look(&c) < 0 || !is_plain(&c)) return 0;
      int copies = !is_in_one(&c.found);
      if (copies && !joins) return 0;
      if (is_last && !copies) continue;
      PyObject* value = copies && !is_last ? Py_NewRef(Py_None) : make_tensor(&c, copies);
      PyObject* name = value ? decode(schema->children[i]->name) : NULL;
      int failed = name == NULL || PyDict_SetItem(columns, name, value) < 0;
      Py_XDECREF(name);
      Py_XDECREF(value);
      if (failed || PyDict_GET_SIZE(columns) <= i) return 0; /* or a name is there twice */
    }
  }
  return 1;
}

PY_DOC(arrow_columns,
       "Return ({name: dlx.Tensor}, data) of what arrow_open(obj, method) gives if that is a host "
       "table of numbers without nulls; else (None, data), or (None, the error). joins: columns "
       "may be copied.");
static PyObject* arrow_columns(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_args("arrow_columns", nargs, 3, 3)) return NULL;
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

PyMethodDef py_arrow_functions[] = {
    PY_FASTCALL(arrow_open),    PY_ONE(arrow_schema),
    PY_FASTCALL(arrow_column),  PY_FASTCALL(arrow_tensor),
    PY_VARARGS(arrow_exchange), PY_ONE(arrow_joined),
    PY_FASTCALL(arrow_columns), PY_END,
};
