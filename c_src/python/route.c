/* Routes: a table from (exact type, target) to what the fast path needs.
 *
 * A route remembers its type's version tag: CPython gives a type a new one whenever it, or a base
 * of it, is changed, so a type that is patched later misses here and is looked at anew. Types and
 * keys are held, so no address is reused.
 *
 * Without the GIL threads read the table while one of them, under a lock, changes it. A route is
 * published whole, its few fields that change later are atomic, and one that left the table is
 * freed when no thread can be reading it any more. */

#include "route.h"
#include "core/thread_state.h"

#include <pthread.h>

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

/* In the child: another thread, which is not there, may have held it. */
static void after_fork(void) {
  changing = (PyMutex){0};
}

static void watch_forks(void) {
  pthread_atfork(NULL, NULL, after_fork);
}
#else
static void lock_table(void) {}

static void unlock_table(void) {}

static void watch_forks(void) {}
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

py_route* py_route_find(PyTypeObject* type, PyObject* key) {
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
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch_forks);
  names_of_targets = PyDict_New();
  return names_of_targets ? 0 : -1;
}

PyObject* py_route_key(PyObject* to) {
  if (!PyUnicode_CheckExact(to) || PyUnicode_CHECK_INTERNED(to)) return to;
  PyObject* known = PyDict_GetItemWithError(names_of_targets, to);
  return known ? known : to;
}

PyObject* py_ask(const py_question* q, PyObject* obj) {
  if (Py_TYPE(obj) == q->type) {
    if (q->get) return q->get(obj, q->closure);
    if (q->call) return q->call(obj, NULL);
  }
  return q->is_method ? PyObject_CallMethodNoArgs(obj, q->name) : PyObject_GetAttr(obj, q->name);
}

/* Of a route that nobody uses. GIL: needed, no lock held; may run Python. */
static void route_free(py_route* r) {
  py_route_forget(r);
  if (r->holds_type) Py_CLEAR(r->type);
  Py_CLEAR(r->key);
  PyMem_Free(r);
}

/* ---- routes that have left the table --------------------------------------------------------- */

#ifdef Py_GIL_DISABLED

static _Atomic(uint64_t) now = 1;    /* counts what has left the table */
static atomic_int is_anyone_unknown; /* a thread read without a state: nothing is freed any more */

void py_routes_begin(void) {
  dlx_thread_state* own = dlx_state_of_thread();
  if (own == NULL) {
    atomic_store(&is_anyone_unknown, 1);
    return;
  }
  if (own->nested++) return;
  /* Before the table is read, as `retire` does it the other way: either the thread is seen to
   * read, or it finds the route gone. */
  atomic_store_explicit(&own->since, atomic_load_explicit(&now, memory_order_relaxed),
                        memory_order_relaxed);
  atomic_thread_fence(memory_order_seq_cst);
}

void py_routes_end(void) {
  dlx_thread_state* own = dlx_own_state;
  if (own == NULL || own->nested == 0 || --own->nested) return;
  atomic_store_explicit(&own->since, 0, memory_order_release);
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
  uint64_t oldest = atomic_load(&is_anyone_unknown) ? 0 : UINT64_MAX;
  for (dlx_thread_state* each = atomic_load(&dlx_thread_states); each; each = each->next) {
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

void py_route_drop(py_route* r) {
  py_pending pending = py_pending_save();
  route_free(r);
  py_pending_restore(pending);
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
  if (args[2] != Py_None && py_route_read(args[2], r) < 0) goto failed;
  r->tag = assign_tag(r->type);
  if (r->target) r->target_tag = assign_tag(r->target);
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
