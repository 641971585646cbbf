/* Arrow data from the PyCapsule interface of other objects: moved out of its capsules at once, and
 * passed to Python in one capsule. */

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
static const char k_data[] = "dlx_arrow"; /* a dlx_arrow; private */

/* The producer's release may run Python. */
static void drop_data(dlx_arrow* data) {
  py_pending pending = py_pending_save();
  dlx_arrow_drop(data);
  py_pending_restore(pending);
}

static void* read_pointer(PyObject* capsule, const char* name) {
  if (PyCapsule_IsValid(capsule, name)) return PyCapsule_GetPointer(capsule, name);
  if (PyCapsule_CheckExact(capsule)) {
    const char* found = PyCapsule_GetName(capsule);
    return py_raise(DLX_E_ARROW, "expected a capsule named '%s', found one named '%s'", name,
                    found ? found : "NULL");
  }
  return py_raise(DLX_E_ARROW, "expected a capsule named '%s', found %.200s", name,
                  Py_TYPE(capsule)->tp_name);
}

static int check_move(int status) {
  if (status != DLX_E_CONSUMED) return py_check(status);
  return py_raise(status, "this Arrow capsule was already used"), -1;
}

static int move_pair(dlx_arrow* data, PyObject* pair, const char* name) {
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
    py_raise(DLX_E_ARROW, "expected a pair of Arrow capsules, found %.200s",
             Py_TYPE(pair)->tp_name);
    return -1;
  }
  PyObject* capsules[] = {PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)};
  struct ArrowSchema* schema = read_pointer(capsules[0], k_schema);
  void* array = schema ? read_pointer(capsules[1], name) : NULL;
  if (array == NULL) return -1;
  int status;
  PY_LOCKED(capsules[0]) /* only one thread moves it */
  status = dlx_arrow_move_schema(data, schema);
  PY_UNLOCKED()
  if (status == DLX_OK) {
    PY_LOCKED(capsules[1])
    status = dlx_arrow_move_array(data, array, name == k_device_array);
    PY_UNLOCKED()
  }
  return check_move(status);
}

static int read_stream(dlx_arrow* data, PyObject* capsule, const char* name) {
  char why[512];
  int status;
  void* held = read_pointer(capsule, name);
  if (held == NULL) return -1;
  dlx_arrow_stream stream = {.is_host = name == k_stream};
  PY_LOCKED(capsule)
  if (stream.is_host) {
    stream.of.host = *(struct ArrowArrayStream*)held;
    ((struct ArrowArrayStream*)held)->release = NULL;
  } else {
    stream.of.device = *(struct ArrowDeviceArrayStream*)held;
    ((struct ArrowDeviceArrayStream*)held)->release = NULL;
  }
  PY_UNLOCKED()
  PY_WITHOUT_GIL(status = dlx_arrow_read(data, &stream, why, sizeof why));
  if (status != DLX_E_ARROW) return check_move(status);
  return py_raise(status, "its Arrow stream failed: %s", why[0] ? why : "no reason given"), -1;
}

/* Move the data that a method returns. Owns: the caller has the only count. */
static dlx_arrow* call_and_move(PyObject* obj, PyObject* method, const char* name) {
  PyObject* result = PyObject_CallMethodNoArgs(obj, method);
  if (result == NULL) return NULL;
  dlx_arrow* data = dlx_arrow_new();
  int is_stream = name == k_stream || name == k_device_stream;
  if (data == NULL) {
    PyErr_NoMemory();
  } else if ((is_stream ? read_stream(data, result, name) : move_pair(data, result, name)) < 0) {
    drop_data(data);
    data = NULL;
  }
  py_drop(result);
  return data;
}

static void destroy_data(PyObject* capsule) {
  drop_data(PyCapsule_GetPointer(capsule, k_data));
}

static PyObject* wrap_data(dlx_arrow* data) {
  PyObject* capsule = PyCapsule_New(data, k_data, destroy_data);
  if (capsule == NULL) drop_data(data);
  return capsule;
}

static PyObject* open_with(PyObject* obj, PyObject* method) {
  static const struct {
    const char *method, *name;
  } capsules[] = {{"__arrow_c_array__", k_array},
                  {"__arrow_c_stream__", k_stream},
                  {"__arrow_c_device_stream__", k_device_stream},
                  {"__arrow_c_device_array__", k_device_array}};
  size_t i = 0;
  if (!PyUnicode_Check(method))
    return PyErr_Format(PyExc_TypeError, "expected the name of a method as a str");
  while (i < 4 && PyUnicode_CompareWithASCIIString(method, capsules[i].method) != 0) i++;
  if (i == 4)
    return PyErr_Format(PyExc_ValueError, "%R is not a method of Arrow's PyCapsule interface",
                        method);
  dlx_arrow* data = call_and_move(obj, method, capsules[i].name);
  if (data == NULL) return NULL;
  return wrap_data(data);
}

PY_DOC(arrow_open, "Return a capsule with the data of one of an object's __arrow_c_*__ methods.");
static PyObject* arrow_open(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  return py_check_args("arrow_open", nargs, 2, 2) ? open_with(args[0], args[1]) : NULL;
}

enum { MAX_LEVELS = 256 }; /* of nested types */

/* Read a length and as many bytes at *text; advance *text. */
static PyObject* read_bytes(const char** text) {
  int32_t size;
  memcpy(&size, *text, sizeof size);
  if (size < 0)
    return py_raise(DLX_E_ARROW, "the metadata of an Arrow type has the length %d", (int)size);
  const char* bytes = *text + sizeof size;
  *text = bytes + size;
  return PyBytes_FromStringAndSize(bytes, size);
}

static PyObject* read_metadata(const char* text) {
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

static PyObject* decode_text(const char* text) {
  return PyUnicode_DecodeUTF8(text ? text : "", text ? (Py_ssize_t)strlen(text) : 0, "replace");
}

static PyObject* describe_type_once(const struct ArrowSchema* schema, int levels, PyObject* known);

static PyObject* describe_type(const struct ArrowSchema* schema, int levels, PyObject* known) {
  if (schema == NULL || schema->format == NULL || schema->n_children < 0 ||
      (schema->n_children > 0 && schema->children == NULL))
    return py_raise(DLX_E_ARROW, "an Arrow type lacks its format string or its children");
  if (levels == MAX_LEVELS)
    return py_raise(DLX_E_ARROW, "an Arrow type has more than %d levels", MAX_LEVELS);
  PyObject* metadata = read_metadata(schema->metadata);
  PyObject* children = metadata ? PyList_New(0) : NULL;
  for (int64_t i = 0; children && i < schema->n_children; i++) {
    PyObject* child = describe_type_once(schema->children[i], levels + 1, known);
    if (child == NULL || PyList_Append(children, child) < 0) Py_CLEAR(children);
    Py_XDECREF(child);
  }
  PyObject *found = NULL, *tuple = children ? PyList_AsTuple(children) : NULL;
  if (tuple)
    found = Py_BuildValue("(NNOOO)", decode_text(schema->format), decode_text(schema->name),
                          metadata, schema->dictionary ? Py_True : Py_False, tuple);
  Py_XDECREF(tuple);
  Py_XDECREF(children);
  Py_XDECREF(metadata);
  return found;
}

/* Each schema once: if children are shared, the number of paths to them can be exponential. */
static PyObject* describe_type_once(const struct ArrowSchema* schema, int levels, PyObject* known) {
  PyObject* address = PyLong_FromVoidPtr((void*)schema);
  PyObject* found = address ? Py_XNewRef(PyDict_GetItemWithError(known, address)) : NULL;
  if (found == NULL && !PyErr_Occurred()) {
    found = describe_type(schema, levels, known);
    if (found && PyDict_SetItem(known, address, found) < 0) Py_CLEAR(found);
  }
  Py_XDECREF(address);
  return found;
}

static dlx_arrow* get_data(PyObject* capsule) {
  return PyCapsule_GetPointer(capsule, k_data);
}

PY_DOC(arrow_schema, "Return (format, name, metadata, has_dictionary, schemas of the children).");
static PyObject* arrow_schema(PyObject* module, PyObject* capsule) {
  dlx_arrow* data = get_data(capsule);
  PyObject* known = data ? PyDict_New() : NULL;
  PyObject* found = known ? describe_type(dlx_arrow_schema(data), 0, known) : NULL;
  Py_XDECREF(known);
  return found;
}

/* ---- columns --------------------------------------------------------------------------------- */

typedef struct {
  dlx_arrow* data;
  int64_t number; /* or DLX_ARROW_WHOLE */
  dlx_arrow_column found;
} column;

static int check_data(int status, const dlx_arrow_fault* fault) {
  if (status != DLX_E_ARROW) return py_check(status);
  return py_raise(status, "its Arrow data is inconsistent: %s %lld", fault->what,
                  (long long)fault->found),
         -1;
}

static int inspect(column* c) {
  dlx_arrow_fault fault;
  int status;
  PY_WITHOUT_GIL(
      status = dlx_arrow_describe(c->data, c->number, &c->found, &fault)); /* reads all bitmaps */
  return check_data(status, &fault);
}

static int find_column(PyObject* data, PyObject* number, column* c) {
  if ((c->data = get_data(data)) == NULL) return -1;
  c->number = PyLong_AsLongLong(number);
  if (c->number == -1 && PyErr_Occurred()) return -1;
  return inspect(c);
}

PY_DOC(arrow_column,
       "Return (dtype, shape, device, nulls, chunks, are_bools_packed, address) of a column, or of "
       "the whole array (-1). If dtype is None, shape has only the first extent.");
static PyObject* arrow_column(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  column c;
  if (!py_check_args("arrow_column", nargs, 2, 2) || find_column(args[0], args[1], &c) < 0)
    return NULL;
  const dlx_arrow_column* found = &c.found;
  PyObject* dtype = !found->is_numbers ? Py_NewRef(Py_None)
                                       : Py_BuildValue("(iii)", found->dtype.code,
                                                       found->dtype.bits, found->dtype.lanes);
  return Py_BuildValue(
      "(NN(ii)LLON)", dtype, py_new_tuple(found->shape, found->is_numbers ? found->ndim : 1),
      (int)found->device.device_type, (int)found->device.device_id, (long long)found->n_nulls,
      (long long)found->n_chunks, found->is_numbers && found->is_packed ? Py_True : Py_False,
      PyLong_FromVoidPtr(found->data));
}

static int find_chunk(const column* c, int64_t i, const char** start, const char** end,
                      void** event) {
  return dlx_arrow_chunk(c->data, c->number, &c->found, i, start, end, event);
}

PY_DOC(arrow_extents,
       "Return (start, end), the addresses of the values, for each chunk of a column of numbers.");
static PyObject* arrow_extents(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  column c;
  const char *start, *end;
  void* event;
  if (!py_check_args("arrow_extents", nargs, 2, 2) || find_column(args[0], args[1], &c) < 0)
    return NULL;
  PyObject* extents = PyList_New(0);
  if (!c.found.is_numbers) return extents;
  for (int64_t i = 0; extents && find_chunk(&c, i, &start, &end, &event); i++) {
    PyObject* pair = Py_BuildValue("(KK)", (unsigned long long)(uintptr_t)start,
                                   (unsigned long long)(uintptr_t)end);
    if (pair == NULL || PyList_Append(extents, pair) < 0) Py_CLEAR(extents);
    Py_XDECREF(pair);
  }
  return extents;
}

static int is_numbers(const dlx_arrow_column* found) {
  return found->is_numbers && !found->n_nulls;
}

static int is_shareable(const dlx_arrow_column* found) {
  return is_numbers(found) && !found->is_packed && found->n_chunks < 2;
}

static int gathers_on_device(const dlx_arrow_column* found) {
  return found->device.device_type == kDLCUDA && !found->is_packed;
}

/* Join chunks on their CUDA device, on dlx's stream, which waits for the event of each chunk.
 * Errors: as dlx_cuda_empty, dlx_cuda_transfer. */
static int gather_on_device(const column* c, DLManagedTensorVersioned** out) {
  int32_t device_id = c->found.device.device_id;
  uint64_t stream;
  void* use = NULL;
  DLTensor like = {
      .ndim = c->found.ndim, .dtype = c->found.dtype, .shape = (int64_t*)c->found.shape};
  int status = dlx_cuda_empty(&like, 0, 0, device_id, 0, out);
  if (status != DLX_OK) return status;
  status = dlx_cuda_work_stream(device_id, &stream);
  if (status == DLX_OK)
    status = dlx_use_new(device_id, stream, c->data, dlx_arrow_drop, NULL, NULL, &use);
  if (status == DLX_OK) dlx_arrow_hold(c->data);
  char* to = (*out)->dl_tensor.data;
  const char *start, *end;
  void* event;
  for (int64_t i = 0; status == DLX_OK && find_chunk(c, i, &start, &end, &event); i++) {
    if (start == end) continue;
    int64_t count = (end - start) / (c->found.dtype.bits / 8);
    DLTensor chunk = {.data = (void*)start,
                      .device = c->found.device,
                      .ndim = 1,
                      .dtype = c->found.dtype,
                      .shape = &count};
    DLTensor place = chunk;
    place.data = to;
    if (event) status = dlx_cuda_wait_event(device_id, *(void**)event);
    if (status == DLX_OK) status = dlx_cuda_transfer(&chunk, &place, 0, stream, 0);
    to += end - start;
  }
  if (use) dlx_use_release(use);
  if (status != DLX_OK) dlx_managed_release(*out);
  return status;
}

/* Share or copy a column of numbers. Errors: DLX_E_COPY = it cannot be shared; DLX_E_DTYPE; as
 * dlx_arrow_gather. */
static int new_managed(const column* c, int copies, DLManagedTensorVersioned** out) {
  int status;
  if (!copies)
    return is_shareable(&c->found) ? dlx_arrow_share(c->data, &c->found, out) : DLX_E_COPY;
  if (!is_numbers(&c->found)) return DLX_E_DTYPE;
  PY_WITHOUT_GIL(status = gathers_on_device(&c->found)
                              ? gather_on_device(c, out)
                              : dlx_arrow_gather(c->data, c->number, &c->found, out));
  return status;
}

static PyObject* new_tensor(const column* c, int copies) {
  DLManagedTensorVersioned* made;
  int status = new_managed(c, copies, &made);
  return py_tensor_result(status, made);
}

PY_DOC(arrow_tensor,
       "Return a column of numbers without nulls as a dlx.Tensor: share its only chunk read-only, "
       "or copy it on its device.");
static PyObject* arrow_tensor(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  column c;
  if (!py_check_args("arrow_tensor", nargs, 3, 3) || find_column(args[0], args[1], &c) < 0)
    return NULL;
  int copies = args[2] == Py_True;
  int may_wait = copies ? gathers_on_device(&c.found) : c.found.device.device_type == kDLCUDA;
  if (is_numbers(&c.found) && !may_wait && dlx_arrow_event(c.data))
    return py_raise(DLX_E_STREAM, "dlx cannot wait for its event on device (%d, %d)",
                    c.found.device.device_type, c.found.device.device_id);
  PyObject* tensor = new_tensor(&c, copies);
  if (tensor == NULL) return NULL;
  void* event = copies ? NULL : dlx_arrow_event(c.data);
  int32_t device_id = c.found.device.device_id;
  if ((event && py_check(dlx_cuda_wait_event(device_id, *(void**)event)) < 0) ||
      ((event || (copies && may_wait)) &&
       py_cuda_set_ready((TensorObject*)tensor, device_id, 0, NULL) < 0))
    Py_CLEAR(tensor);
  return tensor;
}

PY_DOC(arrow_lists,
       "Return (data of the values, dlx.Tensor of the offsets, chunks, first row that is null or "
       "-1) of a host column of lists of varying length. With several chunks, the offsets are "
       "joined in a copy if `joins`, else None; those of one chunk may not begin with 0.");
static PyObject* arrow_lists(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  dlx_arrow_lists lists;
  dlx_arrow_fault fault;
  column c;
  int status;
  if (!py_check_args("arrow_lists", nargs, 3, 3) || find_column(args[0], args[1], &c) < 0)
    return NULL;
  PY_WITHOUT_GIL(status = dlx_arrow_split(c.data, c.number, &lists, &fault));
  if (check_data(status, &fault) < 0) return NULL;
  PyObject* values = wrap_data(lists.values);
  if (values == NULL) return NULL;
  c.found = lists.offsets;
  int64_t n_chunks = c.found.n_chunks;
  int is_unread = n_chunks > 1 && args[2] != Py_True;
  PyObject* offsets = is_unread ? Py_NewRef(Py_None) : new_tensor(&c, n_chunks != 1);
  if (offsets == NULL) return Py_DECREF(values), NULL;
  return Py_BuildValue("(NNLL)", values, offsets, (long long)n_chunks, (long long)lists.null_row);
}

/* ---- for the fast path: numbers on the host -------------------------------------------------- */

/* Whether a column has numbers, or lists of them, on the host, and no extension type. */
static int is_host_numbers(const column* c) {
  const struct ArrowSchema* schema = dlx_arrow_schema(c->data);
  if (c->number != DLX_ARROW_WHOLE) schema = schema->children[c->number];
  if (!is_numbers(&c->found) || c->found.device.device_type != kDLCPU) return 0;
  for (;; schema = schema->children[0]) {
    if (dlx_arrow_is_extension(schema)) return 0;
    if (schema == c->found.values) return 1;
  }
}

/* Read the whole object. The stream is preferred: some libraries copy chunks together for
 * __arrow_c_array__. Owns: the caller owns c->data. */
static int open_whole(PyObject* obj, column* c) {
  int has_stream = _PyType_Lookup(Py_TYPE(obj), py_name_arrow_stream) != NULL;
  c->number = DLX_ARROW_WHOLE;
  c->data = has_stream ? call_and_move(obj, py_name_arrow_stream, k_stream)
                       : call_and_move(obj, py_name_arrow_array, k_array);
  if (c->data == NULL) return -1;
  int failed = inspect(c);
  if (failed) drop_data(c->data);
  return failed;
}

/* A slot of an exchange table. Owns: the caller owns *out. */
static int export_shareable(void* obj, DLManagedTensorVersioned** out) {
  column c;
  if (open_whole(obj, &c) < 0) return -1;
  int status = is_host_numbers(&c) ? new_managed(&c, 0, out) : DLX_E_COPY;
  drop_data(c.data);
  return py_check(status);
}

/* __dlpack__ takes a third of the time of two Arrow capsules. */
static int export_by_dlpack(void* obj, DLManagedTensorVersioned** out) {
  if (_PyType_Lookup(Py_TYPE((PyObject*)obj), py_name_dlpack) == NULL)
    return export_shareable(obj, out);
  if (py_capsule_export(obj, out) < 0) return -1;
  (*out)->flags |= DLPACK_FLAG_BITMASK_READ_ONLY; /* Arrow's memory always is */
  return 0;
}

PY_DOC(arrow_exchange,
       "arrow_exchange(by_dlpack=False, /)\n--\n\n"
       "Return an exchange table that exports numbers on the host by __arrow_c_stream__ or\n"
       "__arrow_c_array__. With by_dlpack, types with __dlpack__(max_version=) export by that.");
static PyObject* arrow_exchange(PyObject* module, PyObject* args) {
  static const DLPackExchangeAPI tables[] = {
      {.header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
       .managed_tensor_from_py_object_no_sync = export_shareable},
      {.header = {.version = {DLX_DLPACK_MAJOR, DLX_DLPACK_MINOR}},
       .managed_tensor_from_py_object_no_sync = export_by_dlpack}};
  int by_dlpack = 0;
  if (!PyArg_ParseTuple(args, "|p:arrow_exchange", &by_dlpack)) return NULL;
  return PyCapsule_New((void*)&tables[by_dlpack], "dlpack_exchange_api", NULL);
}

PY_DOC(arrow_join,
       "arrow_join(obj, /)\n--\n\n"
       "Copy numbers on the host that cannot be shared: join chunks, unpack bools to a byte each.\n"
       "Return a dlx.Tensor, or None if the numbers can be shared or are unsupported.");
static PyObject* arrow_join(PyObject* module, PyObject* obj) {
  column c;
  if (open_whole(obj, &c) < 0) return NULL;
  PyObject* joined =
      is_host_numbers(&c) && !is_shareable(&c.found) ? new_tensor(&c, 1) : Py_NewRef(Py_None);
  drop_data(c.data);
  return joined;
}

/* Store the columns of a host table in a dict. `joins`: copy the columns that cannot be shared,
 * after all columns have been checked. Errors: 0 = the Python path finds the reason. */
static int fill_columns(dlx_arrow* data, PyObject* columns, int joins) {
  const struct ArrowSchema* schema = dlx_arrow_schema(data);
  if (!dlx_arrow_is_table(data) || dlx_arrow_is_extension(schema) || dlx_arrow_event(data))
    return 0;
  for (int is_last = 0; is_last < 2; is_last++) { /* the second pass copies */
    for (int64_t i = 0; i < schema->n_children; i++) {
      column c = {.data = data, .number = i};
      if (inspect(&c) < 0 || !is_host_numbers(&c)) return 0;
      int copies = !is_shareable(&c.found);
      if (copies && !joins) return 0;
      if (is_last && !copies) continue;
      PyObject* value = copies && !is_last ? Py_NewRef(Py_None) : new_tensor(&c, copies);
      PyObject* name = value ? decode_text(schema->children[i]->name) : NULL;
      int failed = name == NULL || PyDict_SetItem(columns, name, value) < 0;
      Py_XDECREF(name);
      Py_XDECREF(value);
      if (failed || PyDict_GET_SIZE(columns) <= i) return 0; /* a duplicate name */
    }
  }
  return 1;
}

PY_DOC(arrow_columns,
       "Open an object's data like arrow_open; without a method, it is data. Return ({name: "
       "dlx.Tensor}, data) for a host table of numbers without nulls, (None, data) for other data, "
       "(None, error) if opening failed. With joins, columns may be copied.");
static PyObject* arrow_columns(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (!py_check_args("arrow_columns", nargs, 3, 3)) return NULL;
  PyObject* answer = Py_IsNone(args[0]) ? Py_NewRef(args[1]) : open_with(args[1], args[0]);
  PyObject* columns = NULL;
  if (answer == NULL) {
    if ((answer = py_error_take()) == NULL) return NULL;
  } else if ((columns = PyDict_New()) != NULL &&
             !fill_columns(get_data(answer), columns, args[2] == Py_True)) {
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
    PY_VARARGS(arrow_exchange), PY_ONE(arrow_join),
    PY_FASTCALL(arrow_columns), PY_FASTCALL(arrow_lists),
    PY_FASTCALL(arrow_extents), PY_END,
};
