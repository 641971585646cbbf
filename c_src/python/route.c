/* Routes: a table from (exact type, target) to what the fast path needs, read once from an
 * adapter's data by attribute name.
 *
 * A route remembers its type's version tag: CPython gives a type a new one whenever it, or a base
 * of it, is changed, so a type that is patched later misses here and is looked at anew. Types and
 * keys are held, so no address is reused.
 *
 * Without the GIL threads read the table while one of them, under a lock, changes it. A route is
 * published whole, its few fields that change later are atomic, and one that left the table is
 * freed when no thread can be reading it any more. */

#include "route.h"
#include "core/hot.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 256 /* a power of two; far more than pairs in any program */ };

static _Atomic(py_route*) table[SLOTS];
static int in_use; /* as what follows: guarded by the lock, or the GIL */
static py_route* retired;

#ifdef Py_GIL_DISABLED
static PyMutex changing;

static void lock_table(void) {
  PyMutex_Lock(&changing);
}

static void unlock_table(void) {
  PyMutex_Unlock(&changing);
}
#else
static void lock_table(void) {}

static void unlock_table(void) {}
#endif

static size_t slot_of(const void* type, const void* key) {
  uintptr_t mixed = ((uintptr_t)type >> 4) * 31 + ((uintptr_t)key >> 4);
  return (size_t)(mixed ^ mixed >> 8) & (SLOTS - 1);
}

static unsigned tag_of(PyTypeObject* type) {
#ifdef Py_GIL_DISABLED
  return __atomic_load_n(&type->tp_version_tag, __ATOMIC_ACQUIRE);
#elif PY_VERSION_HEX >= 0x030C0000
  return type->tp_version_tag; /* 0 = changed since */
#else
  return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
#endif
}

/* Both types are what they were when the route was made. */
static int is_current(const py_route* r) {
  unsigned tag = atomic_load_explicit(&r->tag, memory_order_relaxed);
  return tag != 0 && tag == tag_of(r->type) &&
         (r->target == NULL || (r->target_tag != 0 && r->target_tag == tag_of(r->target)));
}

/* The type's version, given to it now if it has none. Errors: 0, perhaps with MemoryError. */
static unsigned assign_tag(PyTypeObject* type) {
#if PY_VERSION_HEX >= 0x030C0000
  PyUnstable_Type_AssignVersionTag(type);
#else
  static PyObject* name; /* any: a look-up in the type gives it one, and runs no Python */
  if (name == NULL) name = PyUnicode_InternFromString("__hash__");
  if (name) _PyType_Lookup(type, name);
#endif
  return tag_of(type);
}

DLX_HOT py_route* py_route_find(PyTypeObject* type, PyObject* key) {
  py_route* r; /* the table is never full */
  for (size_t i = slot_of(type, key);
       (r = atomic_load_explicit(&table[i], memory_order_acquire)) != NULL;
       i = (i + 1) & (SLOTS - 1)) {
    if (r->type == type && r->key == key) return is_current(r) ? r : NULL;
  }
  return NULL;
}

/* {name: the same} of keys that are strings; by py_route_init. Nothing is taken out of it, so a
 * borrowed name stays. */
static PyObject* names_of_targets;

int py_route_init(void) {
  names_of_targets = PyDict_New();
  return names_of_targets ? 0 : -1;
}

PyObject* py_route_key(PyObject* to) {
  if (!PyUnicode_CheckExact(to) || PyUnicode_CHECK_INTERNED(to)) return to;
  PyObject* known = PyDict_GetItemWithError(names_of_targets, to);
  return known ? known : to;
}

DLX_HOT PyObject* py_ask(const py_question* q, PyObject* obj) {
  if (Py_TYPE(obj) == q->type) {
    if (q->get) return q->get(obj, q->closure);
    if (q->call) return q->call(obj, NULL);
  }
  return q->is_method ? PyObject_CallMethodNoArgs(obj, q->name) : PyObject_GetAttr(obj, q->name);
}

static void forget_question(py_question* q) {
  Py_CLEAR(q->name);
  Py_CLEAR(q->type);
}

static void forget_switch(py_switch* s) {
  Py_CLEAR(s->owner);
  Py_CLEAR(s->name);
  Py_CLEAR(s->value);
}

static void forget_stream(py_stream_source* s) {
  Py_CLEAR(s->function);
  Py_CLEAR(s->attribute);
}

static void forget_fields(py_fields* f) {
  forget_question(&f->memory);
  forget_question(&f->shape);
  forget_question(&f->strides);
  forget_question(&f->dtype);
  forget_question(&f->device);
  Py_CLEAR(f->address);
  Py_CLEAR(f->dtypes);
  Py_CLEAR(f->known);
}

/* Of a route that nobody uses. GIL: needed, no lock held; may run Python. */
static void route_free(py_route* r) {
  for (int i = 0; i < r->n_guards; i++) {
    forget_question(&r->guards[i].ask);
    forget_question(&r->guards[i].resolve);
  }
  for (int i = 0; i < r->n_switches; i++) forget_switch(&r->switches[i]);
  for (int i = 0; i < r->n_states; i++) forget_switch(&r->states[i]);
  forget_question(&r->detach);
  forget_question(&r->owner);
  forget_question(&r->start);
  forget_question(&r->nbytes);
  forget_question(&r->dtype);
  Py_CLEAR(r->confirmed);
  Py_CLEAR(r->storage);
  if (r->holds_type) Py_CLEAR(r->type);
  Py_CLEAR(r->key);
  Py_CLEAR(r->like);
  Py_CLEAR(r->children);
  Py_CLEAR(r->target);
  Py_CLEAR(r->load);
  Py_CLEAR(r->export);
  Py_CLEAR(r->producer.names);
  Py_CLEAR(r->producer.values);
  Py_CLEAR(r->producer.no_numbers);
  Py_XDECREF(atomic_exchange(&r->producer.dtype, NULL));
  Py_CLEAR(r->producer.token_of);
  Py_CLEAR(r->producer.token);
  forget_fields(&r->fields);
  forget_stream(&r->produces);
  forget_stream(&r->consumes);
  PyMem_Free(r);
}

/* ---- routes that have left the table --------------------------------------------------------- */

#ifdef Py_GIL_DISABLED

/* When a thread began to read routes, for each thread that ever did; 0 = it reads none. Only the
 * thread writes it, so that reading costs no locked operation on memory that others write. A
 * thread that ends leaves its place behind for the next one. */
typedef struct reader {
  _Atomic(uint64_t) since;
  atomic_flag taken;
  struct reader* next;
  char apart[64]; /* of the next one in memory: no two share a cache line */
} reader;

static _Atomic(reader*) readers;
static _Atomic(uint64_t) now = 1; /* counts what has left the table */
static FEW_WORDS reader* mine;
static FEW_WORDS int nested;
static reader nobody;             /* of threads that got no place of their own: no memory */
static atomic_int is_nobody_used; /* then nothing is freed any more */
static pthread_key_t leaving;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void leave_reader(void* left) {
  mine = NULL;
  atomic_flag_clear(&((reader*)left)->taken);
}

/* The other threads are not in the child, and one of them may have held the lock. */
static void after_fork(void) {
  changing = (PyMutex){0};
  for (reader* each = atomic_load(&readers); each; each = each->next) {
    if (each == mine) continue;
    atomic_store(&each->since, 0);
    atomic_flag_clear(&each->taken);
  }
}

static void watch_threads(void) {
  if (pthread_key_create(&leaving, leave_reader) != 0) leaving = (pthread_key_t)-1;
  pthread_atfork(NULL, NULL, after_fork);
}

static reader* take_reader(void) {
  reader* found = atomic_load(&readers);
  while (found && atomic_flag_test_and_set(&found->taken)) found = found->next;
  if (found == NULL) {
    found = calloc(1, sizeof *found);
    if (found == NULL) {
      atomic_store(&is_nobody_used, 1);
      return mine = &nobody;
    }
    atomic_flag_test_and_set(&found->taken);
    found->next = atomic_load(&readers);
    while (!atomic_compare_exchange_weak(&readers, &found->next, found)) continue;
  }
  pthread_once(&once, watch_threads);
  pthread_setspecific(leaving, found); /* if it fails, the place is not used again: no harm */
  return mine = found;
}

DLX_HOT void py_routes_begin(void) {
  if (nested++) return;
  reader* own = mine ? mine : take_reader();
  /* Before the table is read, as `retire` does it the other way: either the thread is seen to
   * read, or it finds the route gone. */
  atomic_store_explicit(&own->since, atomic_load_explicit(&now, memory_order_relaxed),
                        memory_order_relaxed);
  atomic_thread_fence(memory_order_seq_cst);
}

DLX_HOT void py_routes_end(void) {
  if (--nested) return;
  atomic_store_explicit(&mine->since, 0, memory_order_release);
}

/* A route that is in the table no more. GIL: needed, the lock held. */
static void retire(py_route* r) {
  atomic_thread_fence(memory_order_seq_cst);
  r->retired = atomic_fetch_add(&now, 1) + 1;
  r->next_retired = retired;
  retired = r;
}

/* Free what no thread reads any more. GIL: needed, no lock held; may run Python. */
static void free_retired(void) {
  py_route *r, *unused = NULL;
  lock_table();
  uint64_t oldest = atomic_load(&is_nobody_used) ? 0 : UINT64_MAX;
  for (reader* each = atomic_load(&readers); each; each = each->next) {
    uint64_t since = atomic_load(&each->since);
    if (since && since < oldest) oldest = since;
  }
  for (py_route** place = &retired; (r = *place) != NULL;) {
    if (r->retired <= oldest) {
      *place = r->next_retired;
      r->next_retired = unused;
      unused = r;
    } else {
      place = &r->next_retired;
    }
  }
  unlock_table();
  while ((r = unused) != NULL) {
    unused = r->next_retired;
    route_free(r);
  }
}

#else

static void retire(py_route* r) {
  r->next_retired = retired;
  retired = r;
}

/* Free what no call runs on; the others are freed when their last call ends. GIL: needed; may run
 * Python. */
static void free_retired(void) {
  while (retired) {
    py_route* r = retired;
    retired = r->next_retired;
    if (r->users)
      r->is_replaced = 1;
    else
      route_free(r);
  }
}

DLX_HOT void py_route_leave(py_route* r) {
  if (--r->users == 0 && r->is_replaced) {
    py_pending pending = py_pending_save();
    route_free(r);
    py_pending_restore(pending);
  }
}
#endif

/* GIL: needed, the lock held. */
static void retire_all(void) {
  for (size_t i = 0; i < SLOTS; i++) {
    py_route* r = atomic_exchange(&table[i], NULL);
    if (r) retire(r);
  }
  in_use = 0;
}

/* ---- a route read from an adapter's data ----------------------------------------------------- */

/* A Question of dlx/_engine/fast_path.py, or None. Owns: references in `q`. Errors: -1 with an
 * exception. */
static int read_question(PyObject* asked, py_question* q) {
  PyObject *name, *type, *descriptor;
  if (asked == Py_None) return 0;
  if (!PyArg_ParseTuple(asked, "UO!Op:Question", &name, &PyType_Type, &type, &descriptor,
                        &q->is_method))
    return -1;
  q->name = Py_NewRef(name);
  q->type = (PyTypeObject*)Py_NewRef(type);
  if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type) && !q->is_method) {
    const PyGetSetDef* def = ((PyGetSetDescrObject*)descriptor)->d_getset;
    q->get = def->get;
    q->closure = def->closure;
  } else if (Py_IS_TYPE(descriptor, &PyMethodDescr_Type) && q->is_method) {
    const PyMethodDef* def = ((PyMethodDescrObject*)descriptor)->d_method;
    if (def->ml_flags == METH_NOARGS) q->call = def->ml_meth;
  }
  return 0;
}

static int is_early(const py_guard* guard) {
  return guard->codes == 0 && !guard->of_owner;
}

/* A getter: whether an object has an attribute, and it is not None. Owns: new reference. GIL:
 * needed; may run Python. Errors: NULL with an exception. */
static PyObject* is_given(PyObject* obj, void* name) {
  PyObject* value;
  if (py_optional(obj, name, &value) < 0) return NULL;
  int given = value && value != Py_None;
  Py_XDECREF(value);
  return PyBool_FromLong(given);
}

/* Errors: -1 with an exception. */
static int read_guards(PyObject* guards, py_route* r) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guards); i++) {
    PyObject *ask, *resolve;
    py_guard read = {.codes = 0};
    int is_optional;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(guards, i), "OIpOp:Guard", &ask, &read.codes,
                          &read.of_owner, &resolve, &is_optional))
      return -1;
    py_guard* slot = &r->guards[r->n_guards++];
    if (is_early(&read)) { /* among the early ones */
      *slot = r->guards[r->n_early];
      slot = &r->guards[r->n_early++];
    }
    *slot = read;
    if (read.codes == 0) slot->codes = UINT32_MAX;
    if (read_question(ask, &slot->ask) < 0 || read_question(resolve, &slot->resolve) < 0) return -1;
    if (is_optional) {
      slot->ask.get = is_given;
      slot->ask.closure = slot->ask.name;
    }
  }
  return 0;
}

/* Errors: -1 with an exception. */
static int read_switches(PyObject* switches, py_switch* out, int* n) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(switches); i++) {
    PyObject *owner, *name, *value;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(switches, i), "OUO:Switch", &owner, &name, &value))
      return -1;
    out[(*n)++] = (py_switch){Py_NewRef(owner), Py_NewRef(name), Py_NewRef(value)};
  }
  return 0;
}

/* A Producer of dlx/_engine/fast_path.py, or None. Owns: references in `p`. Errors: -1 with an
 * exception. */
static int read_producer(PyObject* producer, py_producer* p) {
  PyObject *names, *values, *no_numbers, *token_of, *token;
  if (producer == Py_None) return 0;
  if (!PyArg_ParseTuple(producer, "O!O!OnOO:Producer", &PyTuple_Type, &names, &PyTuple_Type,
                        &values, &no_numbers, &p->n_modules, &token_of, &token))
    return -1;
  if (PyTuple_GET_SIZE(names) > DLX_MAX_KEYWORDS ||
      PyTuple_GET_SIZE(names) != PyTuple_GET_SIZE(values)) {
    PyErr_SetString(PyExc_ValueError, "a producer has a value for each keyword, and few of them");
    return -1;
  }
  p->names = Py_NewRef(names);
  p->values = Py_NewRef(values);
  p->no_numbers = Py_NewRef(no_numbers);
  p->token_of = Py_NewRef(token_of);
  p->token = Py_NewRef(token);
  return 0;
}

/* A Fields of dlx/_engine/fast_path.py, or None. Owns: references in `f`. Errors: -1 with an
 * exception. */
static int read_fields_of(PyObject* fields, py_fields* f) {
  PyObject *asked[5], *address, *dtypes;
  py_question* questions[] = {&f->memory, &f->shape, &f->strides, &f->dtype, &f->device};
  if (fields == Py_None) return 0;
  if (!PyArg_ParseTuple(fields, "OOOOOUO!:Fields", &asked[0], &asked[1], &asked[2], &asked[3],
                        &asked[4], &address, &PyDict_Type, &dtypes))
    return -1;
  f->address = Py_NewRef(address);
  f->dtypes = Py_NewRef(dtypes);
  for (int i = 0; i < 5; i++) {
    if (read_question(asked[i], questions[i]) < 0) return -1;
  }
  return 0;
}

/* Who tells the current stream: True, the table; (function, attribute); None, nobody. Owns:
 * references in `s`. Errors: -1 with an exception. */
static int read_stream(PyObject* told, const DLPackExchangeAPI* table, py_stream_source* s) {
  PyObject *function, *attribute;
  if (told == Py_True && table) s->table = table->current_work_stream;
  if (told == Py_True || told == Py_None) return 0;
  if (!PyArg_ParseTuple(told, "OU:stream", &function, &attribute)) return -1;
  s->function = Py_NewRef(function);
  s->attribute = Py_NewRef(attribute);
  return 0;
}

static int is_told(const py_stream_source* s) {
  return s->table || s->function;
}

/* The table in a capsule, or that of the type where `table` is None. Errors: NULL, perhaps with an
 * exception, see py_exchange_find. */
static const DLPackExchangeAPI* read_table(PyObject* table, PyObject* type) {
  return table == Py_None ? py_exchange_find((PyTypeObject*)type) : py_exchange_read(table, 0);
}

enum {
  LIKE,
  IS_HOST_ONLY,
  CHILDREN,
  IS_SAME,
  IS_ROOT_ONLY,
  IS_IMMUTABLE,
  EXPORTS,
  IS_MANAGED,
  IS_BORROWED,
  EXPORT,
  PRODUCER,
  FIELDS_OF,
  PRODUCES_ON,
  CONSUMES_ON,
  TARGET,
  IMPORTS,
  LOAD,
  GUARDS,
  QUICK,
  SWITCHES,
  STATES,
  DETACH,
  OWNER,
  START,
  NBYTES,
  DTYPE,
  CONFIRMED,
  STORAGE,
  IS_NARROW,
  ALWAYS_COPIES,
  ACCEPTS,
  FIELDS
};
static const char* const names[FIELDS] = {
    "like",        "is_host_only", "children",    "is_same", "is_root_only", "is_immutable",
    "exports",     "is_managed",   "is_borrowed", "export",  "producer",     "fields",
    "produces_on", "consumes_on",  "target",      "imports", "load",         "guards",
    "quick",       "switches",     "states",      "detach",  "owner",        "start",
    "nbytes",      "dtype",        "confirmed",   "storage", "is_narrow",    "always_copies",
    "accepts"};

/* From the fields of a Route of dlx/_engine/fast_path.py. Owns: references in `r`. Errors: -1 with
 * an exception. */
static int read_fields(PyObject* const* field, py_route* r) {
  PyObject *guards = field[GUARDS], *switches = field[SWITCHES], *states = field[STATES],
           *target = field[TARGET];
  if (!PyTuple_Check(guards) || !PyTuple_Check(switches) || !PyTuple_Check(states) ||
      (target != Py_None && !PyType_Check(target))) {
    PyErr_SetString(PyExc_TypeError, "a route has tuples of guards and switches, and a type");
    return -1;
  }
  if (PyTuple_GET_SIZE(guards) > DLX_MAX_QUESTIONS ||
      PyTuple_GET_SIZE(switches) > DLX_MAX_QUESTIONS ||
      PyTuple_GET_SIZE(states) > DLX_MAX_QUESTIONS) {
    PyErr_SetString(PyExc_ValueError, "too many guards for the fast path");
    return -1;
  }
  if (read_guards(guards, r) < 0 || read_switches(switches, r->switches, &r->n_switches) < 0 ||
      read_switches(states, r->states, &r->n_states) < 0 ||
      read_question(field[DETACH], &r->detach) < 0 || read_question(field[OWNER], &r->owner) < 0 ||
      read_question(field[START], &r->start) < 0 || read_question(field[NBYTES], &r->nbytes) < 0 ||
      read_question(field[DTYPE], &r->dtype) < 0 ||
      read_producer(field[PRODUCER], &r->producer) < 0)
    return -1;
  if (field[LIKE] != Py_None) r->like = Py_NewRef(field[LIKE]);
  if (field[CHILDREN] != Py_None) r->children = Py_NewRef(field[CHILDREN]);
  r->is_host_only = field[IS_HOST_ONLY] == Py_True;
  r->is_same = field[IS_SAME] == Py_True;
  r->is_root_only = field[IS_ROOT_ONLY] == Py_True;
  r->is_narrow = field[IS_NARROW] == Py_True;
  if (r->is_narrow) r->leaves = DLX_COPIES;
  if (field[ALWAYS_COPIES] == Py_True) r->leaves = DLX_COPIES | DLX_SHARES;
  r->is_managed = field[IS_MANAGED] == Py_True;
  r->is_borrowed = field[IS_BORROWED] == Py_True;
  r->is_immutable = field[IS_IMMUTABLE] == Py_True;
  if (field[EXPORT] != Py_None) r->export = Py_NewRef(field[EXPORT]);
  if (field[QUICK] != Py_None) {
    r->quick = (dlx_guard_function)PyCapsule_GetPointer(field[QUICK], "dlx_guard_function");
    if (r->quick == NULL) return -1;
  }
  if (field[CONFIRMED] != Py_None) r->confirmed = Py_NewRef(field[CONFIRMED]);
  if (field[STORAGE] != Py_None) r->storage = Py_NewRef(field[STORAGE]);
  const dlx_capabilities* capabilities = PyLong_AsVoidPtr(field[ACCEPTS]);
  if (capabilities) r->accepts = *capabilities;
  if (PyErr_Occurred()) return -1;
  int is_own = r->type == py_tensor_type;
  if (!is_own) r->exports = read_table(field[EXPORTS], (PyObject*)r->type);
  if (PyErr_Occurred()) return -1;
  if (target != Py_None && field[IMPORTS] != Py_False)
    r->imports = read_table(field[IMPORTS], target);
  if (PyErr_Occurred()) return -1;
  if (r->imports && r->imports->managed_tensor_to_py_object_no_sync == NULL) r->imports = NULL;
  if (r->imports == NULL && field[LOAD] != Py_None) r->load = Py_NewRef(field[LOAD]);
  if (target != Py_None) {
    r->target = (PyTypeObject*)Py_NewRef(target);
    r->target_tag = assign_tag(r->target);
  }
  if (read_fields_of(field[FIELDS_OF], &r->fields) < 0 ||
      read_stream(field[PRODUCES_ON], r->exports, &r->produces) < 0 ||
      read_stream(field[CONSUMES_ON], r->imports, &r->consumes) < 0)
    return -1;
  r->crosses = (is_own || is_told(&r->produces)) && (target == Py_None || is_told(&r->consumes));
  int borrows = r->exports && r->exports->dltensor_from_py_object_no_sync;
  int manages = r->exports && r->exports->managed_tensor_from_py_object_no_sync;
  if (!borrows) r->is_managed = 1;
  int can_export =
      is_own || borrows || manages || r->export || r->producer.names || r->fields.address;
  int can_import = target == Py_None || r->imports || r->load;
  r->is_fast_path =
      r->like == NULL && r->children == NULL && (r->is_same || (can_export && can_import));
  if (r->is_fast_path && r->producer.names) r->is_fast_path = 2;
  return 0;
}

/* Errors: -1 with an exception. */
static int read_route(PyObject* route, py_route* r) {
  PyObject* field[FIELDS] = {NULL};
  int n = 0, failed;
  while (n < FIELDS && (field[n] = PyObject_GetAttrString(route, names[n])) != NULL) n++;
  failed = n < FIELDS || read_fields(field, r) < 0;
  while (n > 0) Py_DECREF(field[--n]);
  return failed ? -1 : 0;
}

PyDoc_STRVAR(
    route_add_doc,
    "route_add(type, key, route, /)\n--\n\n"
    "Add a dlx._engine.fast_path.Route to the fast path; None: this pair takes the Python "
    "path. Return\nwhether the fast path can run it. What it cannot run is remembered until "
    "the type changes or the\nroutes are cleared.");

static PyObject* route_add(PyObject* module, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !PyType_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "route_add takes a type, a target, and a Route or None");
    return NULL;
  }
  py_route* r = PyMem_Calloc(1, sizeof *r);
  if (r == NULL) return PyErr_NoMemory();
  r->type = (PyTypeObject*)Py_NewRef(args[0]);
  r->holds_type = 1;
  r->key = Py_NewRef(args[1]);
  if (PyUnicode_CheckExact(r->key) && PyDict_SetDefault(names_of_targets, r->key, r->key) == NULL)
    goto failed;
  if (args[2] != Py_None && read_route(args[2], r) < 0) goto failed;
  r->tag = assign_tag(r->type);
  if (PyErr_Occurred()) goto failed;

  int is_fast_path = r->is_fast_path;
  /* That a type has no route, or is a producer of a program's own, must not keep it alive. Should
   * another type come to lie at its address, its version differs; at worst Python is asked. */
  r->holds_type = is_fast_path && r->producer.names == NULL;
  if (!r->holds_type) Py_DECREF(args[0]);
  lock_table();
  if (in_use > SLOTS * 3 / 4) retire_all(); /* many short-lived types: clear the table */
  size_t i = slot_of(r->type, r->key);
  py_route* old;
  while ((old = table[i]) != NULL && !(old->type == r->type && old->key == r->key))
    i = (i + 1) & (SLOTS - 1);
  atomic_store_explicit(&table[i], r, memory_order_seq_cst);
  if (old)
    retire(old);
  else
    in_use++;
  unlock_table();
  free_retired();
  return PyBool_FromLong(is_fast_path);

failed:
  route_free(r);
  return NULL;
}

PyDoc_STRVAR(routes_clear_doc,
             "routes_clear()\n--\n\n"
             "Forget every route: the adapters have changed.");

static PyObject* routes_clear(PyObject* module, PyObject* unused) {
  lock_table();
  retire_all();
  unlock_table();
  free_retired();
  Py_RETURN_NONE;
}

PyMethodDef py_route_functions[] = {
    {"route_add", (PyCFunction)(void (*)(void))route_add, METH_FASTCALL, route_add_doc},
    {"routes_clear", routes_clear, METH_NOARGS, routes_clear_doc},
    {NULL, NULL, 0, NULL},
};
