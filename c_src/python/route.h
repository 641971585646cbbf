#ifndef DLX_ROUTE_H_
#define DLX_ROUTE_H_

/* How an exact type reaches a target without Python: what python/route_read.c fills in,
 * python/route.c keeps and python/fast_path.c runs. */

#include "dlx_python.h"
#include "threads.h"

enum { DLX_MAX_QUESTIONS = 12, DLX_MAX_KEYWORDS = 4 /* of __dlpack__ */ };

/* An attribute or method without arguments of one type, with the C function behind it where there
 * is one. */
typedef struct {
  PyObject* name;     /* NULL = no question */
  PyTypeObject* type; /* the C functions below are for this exact type only */
  getter get;
  void* closure;
  PyCFunction call; /* METH_NOARGS */
  int is_method;
} py_question;

/* A question that must be answered false. */
typedef struct {
  py_question ask;
  uint32_t codes;      /* bit n = asked where the dtype code is n; 0: whatever it is, and before
                          anything is borrowed, since borrowing may already change the array */
  int of_owner;        /* asked of the owner, not of the array */
  py_question resolve; /* asked of the array when the answer was true, to make it false for good */
} py_guard;

/* A value in a dict that must be this very object (a switch of the framework that is off), or an
 * attribute of another object that must equal it (what the target takes depends on it). */
typedef struct {
  PyObject *owner, *name, *value;
  uint64_t version; /* of the dict when the switch was last found off; before Python 3.12 */
} py_switch;

/* How a type that no adapter lists is asked for a capsule; all strong. */
typedef struct {
  PyObject *names, *values;   /* tuples: keywords of its __dlpack__; NULL = it is no such type */
  PyObject* no_numbers;       /* no_numbers(dtype): why elements are no numbers, or "" */
  _Atomic(PyObject*) dtype;   /* the last one of which they are; or NULL */
  Py_ssize_t n_modules;       /* in sys.modules, when no adapter listed the type */
  PyObject *token_of, *token; /* abc.get_cache_token, and what it gave then */
} py_producer;

/* How a framework is asked for its current stream on a CUDA device: by a table, whose streams are
 * kept by others, or by function(number of the device), which gives the object that keeps the
 * stream alive and has the handle as an attribute. Strong. Neither: it cannot be asked. */
typedef struct {
  DLPackCurrentWorkStream table;
  PyObject *function, *attribute;
} py_stream_source;

/* Attributes of an array of a type without a table, from which a tensor is made. */
typedef struct {
  py_question memory, shape, strides, dtype, device; /* strides in bytes */
  PyObject*
      address;      /* attribute of what `memory` gives; strong. NULL = there are no such attributes
                     */
  PyObject* dtypes; /* {dtype: code | bits << 8}; strong */
  PyObject* known;  /* the dtype that was last found there; strong, or NULL */
  long key;         /* and what stands there */
} py_fields;

/* What the consumer was last found to take as it is, in one word, which is read and written whole.
 */
typedef struct {
  DLDataType dtype;   /* without bits = nothing yet */
  uint32_t alignment; /* what the consumer wants for it */
} py_plain;

typedef struct py_route {
  PyTypeObject* type; /* exact; strong where holds_type */
  int holds_type;
  PyObject* key;    /* the `to` of the call; strong. NotImplemented: what `like` is looked up by */
  PyObject* like;   /* the target that an array of the type stands for as `like`; strong, or NULL */
  int is_host_only; /* its adapter knows no device but the host */
  atomic_uint tag;  /* the type's version: a patched type misses */
  int is_fast_path; /* 0 = known to need Python; 2 = by py_producer_run */
  PyObject* children; /* of a container that becomes a list or dict: children(obj) gives that;
                         strong, or NULL */
  int is_same;        /* the object itself is the result */
  int is_examined;    /* and that only where its table can tell what it is */
  int is_root_only;   /* objects of the type pass through inside a container */
  int is_immutable;   /* arrays of the type are read-only, whatever their export says */
  int users;          /* calls that are running on it; unused without the GIL */
  int is_replaced;    /* it is freed after the last of them */
  uint64_t retired;   /* without the GIL: when it left the table, see python/route.c */
  struct py_route* next_retired;
  PyTypeObject* target; /* of its arrays; strong; NULL = dlx.Tensor */
  unsigned target_tag;
  const DLPackExchangeAPI* exports; /* its borrow slot is used, or its managed slot where it has
                                       none, or `export` where that fails */
  int is_managed;                   /* the managed slot is used, though there is a borrow slot */
  int is_borrowed;                  /* the borrow slot may be used for the length of a call */
  PyObject* export;                 /* export(array): a dlx.Tensor, or None; strong, or NULL */
  PyObject* unblocked; /* unblocked(array): a dlx.Tensor over a copy of what cannot be exported as
                          it is, or None; strong, or NULL */
  py_producer producer;
  py_fields fields;                    /* of arrays on a CUDA device only */
  py_stream_source produces, consumes; /* where the current streams are told */
  atomic_int takes_cuda; /* 1 = arrays in device memory take the fast path; 2 = and both frameworks
                  have been at work on a device before */
  const DLPackExchangeAPI* imports; /* NULL = none is used */
  PyObject* load;                   /* load(dlx.Tensor), where no table is used; strong, or NULL */
  PyObject* load_named;             /* the same where the call names the host; strong, or NULL */
  int n_early, n_guards, n_switches, n_states; /* guards that need no dtype come first */
  py_guard guards[DLX_MAX_QUESTIONS];
  dlx_guard_function quick; /* answers further guards in C; NULL = there is none */
  py_switch switches[DLX_MAX_QUESTIONS];
  py_switch states[DLX_MAX_QUESTIONS]; /* where one has changed, the route is found anew */
  py_question detach;                  /* of the array: one without a graph, where a guard holds */
  py_question owner; /* what keeps the memory alive; no question = the array itself */
  py_question start,
      nbytes;          /* of the owner: the bytes that it really has; no question = `quick` looks */
  py_question dtype;   /* asked where the code and width are those of `confirmed` */
  PyObject* confirmed; /* {code | bits << 8: dtype object that the answer must be}, or NULL */
  PyObject* storage;   /* {code | bits << 8: (the same of the dtype to import it as, what makes the
                          array one of the real dtype)}, or NULL */
  _Atomic DLDataType direct; /* the one that was last found to be imported as it is; without bits =
                                none */
  int is_narrow; /* the target takes more than `accepts`: what is not accepted is left to Python */
  unsigned leaves; /* options of a call that are left to Python */
  dlx_capabilities accepts;
  _Atomic py_plain plain;
  PyObject* copy;  /* copy(array) of one that is in its framework already; strong, or NULL */
  PyObject* ready; /* ready(array): whether borrowing that one neither waits for it nor changes it;
                      strong, or NULL: it never does */
} py_route;

/* ---- python/route_read.c --------------------------------------------------------------------- */

/* Fill in a route from a Route of dlx/_engine/fast_path.py. Owns: references in `r`. GIL: needed;
 * may run Python. Errors: -1 with an exception; what is in `r` is to be forgotten. */
int py_route_read(PyObject* route, py_route* r);

/* Owns: gives up the references that py_route_read took. GIL: needed; may run Python. */
void py_route_forget(py_route* r);

/* ---- python/route.c -------------------------------------------------------------------------- */

/* The route for an exact type and target, or NULL. Owns: borrowed, between py_routes_begin and
 * py_routes_end; callers that run Python meanwhile hold it by py_route_enter and py_route_leave.
 * GIL: needed. Errors: none. */
py_route* py_route_find(PyTypeObject* type, PyObject* key);

/* The key of the routes to a target: of strings that are equal, the one that is interned, where a
 * route has it. Owns: borrowed. GIL: needed. Errors: none, the target itself. */
PyObject* py_route_key(PyObject* to);

/* Routes that a thread finds between these two stay, also where another thread replaces them. They
 * may be nested. GIL: needed; none runs Python. With a GIL they are nothing, and calls hold a route
 * by the two below. */
#ifdef Py_GIL_DISABLED
void py_routes_begin(void);
void py_routes_end(void);

static inline void py_route_enter(py_route* route) {
  (void)route;
}

static inline void py_route_leave(py_route* route) {
  (void)route;
}
#else
static inline void py_routes_begin(void) {}

static inline void py_routes_end(void) {}

static inline void py_route_enter(py_route* route) {
  route->users++;
}

/* Free a route that was replaced while calls ran on it. GIL: needed; may run Python. A pending
 * exception is kept. */
void py_route_drop(py_route* route);

/* GIL: needed; may run Python. A pending exception is kept. */
static inline void py_route_leave(py_route* route) {
  if (--route->users == 0 && route->is_replaced) py_route_drop(route);
}
#endif

/* The next call finds the route anew. */
static inline void py_route_stale(py_route* route) {
  atomic_store_explicit(&route->tag, 0, memory_order_relaxed);
}

/* Answer a question. Owns: new reference. GIL: needed. Errors: NULL with an exception. */
PyObject* py_ask(const py_question* question, PyObject* obj);

/* An attribute that need not be there: NULL then. Owns: new reference. GIL: needed; may run Python.
 * Errors: -1 with an exception. */
static inline int py_optional(PyObject* obj, PyObject* name, PyObject** out) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyObject_GetOptionalAttr(obj, name, out);
#else
  return _PyObject_LookupAttr(obj, name, out);
#endif
}

/* Make what the table needs. GIL: needed. Errors: -1 with an exception. */
int py_route_init(void);

extern PyMethodDef py_route_functions[];

/* ---- python/fast_path.c ---------------------------------------------------------------------- */

/* A function with a fast path: its type is in python/fast_path_type.c. */
typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped; /* the Python function: complete on its own */
  PyObject* learn;   /* learn(type, to): adds a route, if there is one */
  PyObject* failed;  /* failed(obj, to, cause, tree=None): the error for a consumer that failed */
  PyObject* to;      /* the target where calls name none, and trees are none; NULL = they name it */
  PyObject* view;    /* view(obj, to): a lazy view, or None where Python must be asked; or NULL */
  PyObject* dict;    /* __name__, __doc__, __wrapped__, ... */
  PyObject* weakrefs;
} FastPathObject;

/* The options of a call that the fast path supports; 0 = none, or their defaults. */
enum {
  DLX_COPIES = 1,         /* copy=True: memory is only read here, nobody keeps it */
  DLX_SHARES = 2,         /* copy=False: no copy resolves anything */
  DLX_KEEPS_READONLY = 4, /* readonly="error" */
  DLX_EXAMINES = 8,   /* detach=True, or a device: what is in the target may not stay as it is */
  DLX_DETACHES = 16,  /* detach=True: an array that requires gradients is exported without them */
  DLX_HOST_ONLY = 32, /* arrays in device memory are left to Python */
  DLX_UNMARKS = 64,   /* readonly="share": a consumer that cannot say read-only writes to it */
  DLX_VIEWS = 128,    /* lazy=True: of containers; no function that takes options is given it */
  DLX_NAMES_DEVICE = 256 /* device= says the host */
};

/* Among the incompatibilities that a copy resolves: the array is in device memory, which is handed
 * over by python/fast_path_cuda.c. */
#define DLX_ON_DEVICE ((uint32_t)1 << 31)
/* With nothing borrowed: the array cannot be exported as it is; py_fast_path_unblocked may. */
#define DLX_BLOCKED ((uint32_t)1 << 30)

/* The route for an exact type and target, learnt now if it must be. Owns: borrowed, see
 * py_route_find. GIL: needed; may run Python. Errors: NULL = ask Python, unless an exception is
 * set, which then ends the call: an interrupt, an exit, or MemoryError. */
py_route* py_fast_path_route(PyObject* callable, PyTypeObject* type, PyObject* to);

/* A managed tensor over an array: examined, exported and checked. With DLX_COPIES it need not be
 * protected from a later resize. `resolvable`: the incompatibilities that a copy resolves; the
 * caller makes that copy; or DLX_ON_DEVICE, or DLX_BLOCKED. Owns: the caller owns the result, which
 * owns the array or its storage. GIL: needed; may run Python. Errors: NULL, as py_fast_path_route.
 */
DLManagedTensorVersioned* py_fast_path_borrow(py_route* route, PyObject* obj, unsigned options,
                                              uint32_t* resolvable);

/* The same after DLX_BLOCKED, of a copy that its adapter makes, where that resolves what blocks the
 * export. In a tree it is called last. Owns, GIL, Errors: as py_fast_path_borrow. */
DLManagedTensorVersioned* py_fast_path_unblocked(py_route* route, PyObject* obj, unsigned options,
                                                 uint32_t* resolvable);

/* Whether the target takes what it took when the route was found; else the next call finds it anew.
 * GIL: needed; may run Python. Errors: 0 = ask Python, unless an exception is set. */
int py_fast_path_holds(py_route* route);

/* Whether the consumer takes an exported tensor, as py_fast_path_borrow says of its options. One
 * that is taken is no longer marked as copied where the call says nothing about copies. */
int py_fast_path_takes(py_route* route, DLManagedTensorVersioned* made, unsigned options,
                       uint32_t* resolvable);

/* Whether no switch is on and no early guard holds of an array. GIL: needed; may run Python.
 * Errors: 0 = ask Python, unless an exception is set. */
int py_fast_path_is_clear(py_route* route, PyObject* obj);

/* The same, and that the target takes what it took when the route was found: all that can be said
 * before an array is exported. */
int py_fast_path_is_open(py_route* route, PyObject* obj);

/* Borrow an array for the length of a call: examined and checked as by py_fast_path_borrow with
 * DLX_COPIES | DLX_SHARES, and nothing is allocated. Owns: nothing; *out is good until Python code
 * runs or something else is borrowed. GIL: needed; may run Python. Errors: 0 = ask Python, unless
 * an exception is set. */
int py_fast_path_look(py_route* route, PyObject* obj, DLTensor* out);

/* A borrowed tensor as it is handed over, where something is `resolvable` or the options want a
 * copy: mostly a copy, in the order of dimensions that the consumer takes. Owns: takes `made`; the
 * caller owns the result. GIL: needed, released meanwhile. Errors: NULL, as py_fast_path_route. */
DLManagedTensorVersioned* py_fast_path_resolve(const py_route* route,
                                               DLManagedTensorVersioned* made, unsigned options,
                                               uint32_t resolvable);

/* Hand a managed tensor to the consumer. `tree` is what the array was found in, or NULL; of the
 * options only DLX_NAMES_DEVICE counts. Owns:
 * takes `made`. GIL: needed. Errors: NULL with what `failed` gives. */
PyObject* py_fast_path_hand_over(PyObject* callable, py_route* route,
                                 DLManagedTensorVersioned* made, PyObject* obj, PyObject* to,
                                 PyObject* tree, unsigned options);

/* Convert one array by its route, which is not one that is_same. Owns: the result is new.
 * GIL: needed; may run Python. Errors: NULL, as py_fast_path_route. */
PyObject* py_fast_path_run(PyObject* callable, py_route* route, PyObject* obj, PyObject* to,
                           unsigned options);

/* ---- python/fast_path_same.c ----------------------------------------------------------------- */

/* The result for an array that is in the target framework already, by a route that is_same; with
 * DLX_COPIES what is then given to py_fast_path_copied. Owns: new reference. GIL: needed; may run
 * Python. Errors: NULL, as py_fast_path_route. */
PyObject* py_fast_path_same(py_route* route, PyObject* obj, unsigned options);

/* The copy that the framework makes of it. Owns: takes `same`; new reference. GIL: needed; runs
 * Python. Errors: NULL, as py_fast_path_route. */
PyObject* py_fast_path_copied(const py_route* route, PyObject* same);

/* Both, for a call with one array. Owns, GIL, Errors: as py_fast_path_same. */
PyObject* py_fast_path_run_same(py_route* route, PyObject* obj, unsigned options);

/* The target that an array stands for as `like`, where it is on the host. Owns: new reference.
 * GIL: needed; may run Python. Errors: NULL, as py_fast_path_route. */
PyObject* py_fast_path_like(PyObject* callable, PyObject* like);

/* ---- python/exchange_any.c ------------------------------------------------------------------- */

/* The exchange table for any array, in a capsule: `callable` is the fast path, `python_path` what
 * makes a dlx.Tensor of other objects. Owns: new reference; keeps what it is given. GIL: needed.
 * Errors: NULL with an exception. */
PyObject* py_exchange_any(PyObject* callable, PyObject* to, PyObject* python_path);

/* ---- python/fast_path_producer.c ------------------------------------------------------------- */

/* The same as py_fast_path_borrow for a type without an adapter: its __dlpack__ is called, once.
 * Owns: the caller owns the result and *capsule, from which it was taken. GIL: needed; runs Python.
 * Errors: NULL, as py_fast_path_route; what __dlpack__ answered is left to the Python path. */
DLManagedTensorVersioned* py_producer_borrow(py_route* route, PyObject* obj, unsigned options,
                                             uint32_t* resolvable, PyObject** capsule);

/* py_fast_path_run for such a type. Owns, GIL, Errors: as there. */
PyObject* py_producer_run(PyObject* callable, py_route* route, PyObject* obj, PyObject* to,
                          unsigned options);

/* Leave to py_producer_python what an object's method gave, or raised; one of them is NULL.
 * Errors: an exception is set, and nothing is left. */
void py_producer_leave(PyObject* obj, PyObject* given, PyObject* raised);

/* Set aside what was left, while something is released that may run Python and convert, and put it
 * back. Owns: the caller owns it in between. GIL: needed. */
PyObject* py_producer_aside(void);
void py_producer_back(PyObject* answers);

/* Call the Python path: it gets what was left to it by producer_answer. Owns: the result is new.
 * Errors: those of the function. */
PyObject* py_producer_python(PyObject* function, PyObject* const* args, size_t nargsf,
                             PyObject* names);

/* Make the strings that it needs. GIL: needed. Errors: -1 with an exception. */
int py_producer_init(void);

extern PyMethodDef py_producer_functions[];

/* ---- python/fast_path_cuda.c ----------------------------------------------------------------- */

/* The streams of producer and consumer, for the arrays of one route on one device. */
typedef struct {
  const py_route* route;
  int32_t device;
  uint64_t from, to;             /* 0: each array tells itself; whoever reads the result waits */
  PyObject *from_keep, *to_keep; /* what keeps them alive; strong, or NULL */
  dlx_ready* ready;              /* what is on `from`, where nobody is known who waits for it */
  int is_ordered;
} py_stream_pair;

/* Those of one call: more than a program has frameworks and devices at work in one. */
enum { DLX_MAX_STREAM_PAIRS = 8 };
typedef struct {
  int n, n_waited;
  py_stream_pair at[DLX_MAX_STREAM_PAIRS];
  struct {
    dlx_ready* ready;
    int32_t device;
    uint64_t stream;              /* of that device: 1 and 2 are streams of each */
  } waited[DLX_MAX_STREAM_PAIRS]; /* which stream waits already for what; each holds a count */
} py_stream_pairs;

/* Whether an array of a route may be in such device memory, with these options. GIL: needed. */
int py_cuda_may_share(const py_route* route, const DLTensor* tensor, unsigned options);

/* Make a tensor of an array by the attributes of its route. Owns: the caller owns the result, which
 * owns the array's memory. GIL: needed; runs Python. Errors: NULL with an exception, or without
 * one: ask Python. */
DLManagedTensorVersioned* py_cuda_read_fields(py_route* route, PyObject* obj);

/* Ask for the streams of an array that was borrowed, and make the consumer's wait: once for all
 * arrays of a call that are on them. Nothing was ordered where this fails, or nothing that the
 * Python path would not order. Owns: the pairs own what they note. GIL: needed, released while
 * the driver is called; may run Python. Errors: 0 = ask Python, unless an exception is set. */
int py_cuda_order(py_stream_pairs* all, py_route* route, const DLManagedTensorVersioned* made,
                  PyObject* obj);

/* What is handed over of an array after py_cuda_order of the same pairs: it is released when
 * the consumer's stream is done. *ready: when a dlx.Tensor may be read that is made of it, or NULL.
 * Owns: takes `made`; the caller owns the result; *ready is borrowed from the pairs. GIL:
 * needed. Errors: NULL with an exception. */
DLManagedTensorVersioned* py_cuda_behind(py_stream_pairs* all, py_route* route,
                                         DLManagedTensorVersioned* made, dlx_ready** ready);

/* Owns: gives up what the pairs own. GIL: needed; may run Python. A pending exception stays. */
void py_cuda_clear(py_stream_pairs* all);

/* Hand over an array in device memory. Owns, GIL, Errors: as py_fast_path_hand_over, which this
 * calls (it is in python/fast_path.c). */
PyObject* py_fast_path_hand_over_cuda(py_stream_pairs* all, PyObject* callable, py_route* route,
                                      DLManagedTensorVersioned* made, PyObject* obj, PyObject* to,
                                      PyObject* tree);

extern PyMethodDef py_stream_functions[];

/* ---- python/fast_path_tree.c ----------------------------------------------------------------- */

/* Whether objects of an exact type are trees that py_tree_run knows. */
int py_tree_takes(PyTypeObject* type);

/* Whether they are data that passes through and may stand anywhere. */
int py_tree_passes(PyTypeObject* type);

/* Convert a list, tuple or dict, or a container that has a rule. GIL: needed; may run Python.
 * Errors: NULL with an exception; NULL without one = ask Python, nothing was handed over. */
PyObject* py_tree_run(PyObject* callable, PyObject* root, PyObject* to, unsigned options);

/* What is asked about objects that are neither plain data nor lists, tuples or dicts. */
enum {
  PY_FAILS = -1, /* an exception is set */
  PY_LEAVE,      /* Python must convert the tree */
  PY_PASSES,     /* it passes through */
  PY_CONVERTS,   /* it is an array */
  PY_ENTERS,     /* it is a container, *found its rule */
  PY_KNOWN       /* *found is its result */
};

typedef struct py_visitor {
  /* One of the above. Owns: the walker owns *found. GIL: needed; may run Python. */
  int (*look)(struct py_visitor*, PyObject* obj, PyObject** found);
  /* Is told the result of each array and container; or NULL. Errors: -1 with an exception. */
  int (*note)(struct py_visitor*, PyObject* obj, PyObject* result, int is_container);
  /* The container that stands for one if its children are the results of that one's; or NULL. Owns:
   * borrowed. Errors: NULL, MemoryError may be set. */
  PyObject* (*own)(struct py_visitor*, PyObject* container);
} py_visitor;

/* py_tree_run with a visitor; of a tree without arrays, too. */
PyObject* py_tree_visit(PyObject* callable, PyObject* root, PyObject* to, unsigned options,
                        py_visitor* visitor);

extern PyMethodDef py_tree_functions[];

/* ---- call/arguments.c ------------------------------------------------------------------------ */

/* Add its functions to a module. GIL: needed. Errors: -1 with an exception. */
int py_arguments_init(PyObject* module);

#endif
