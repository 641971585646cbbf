#ifndef DLX_CALL_H_
#define DLX_CALL_H_

/* One call of a function with a fast path, as conversions see it. */

#include "interop/interop.h"

/* A function with a fast path: its type is in call/function.c. */
typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped; /* the Python function: complete on its own */
  PyObject* learn;   /* learn(type, to): adds a pair, if there is one */
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
  DLX_VIEWS = 128,    /* lazy=True: of containers; no conversion is given it */
  DLX_NAMES_DEVICE =
      256,          /* the call says the host: by device=, or by an example that is committed */
  DLX_MOVABLE = 512 /* by an example that is not */
};

/* What is asked about objects of a tree that are neither plain data nor lists, tuples or dicts. */
enum {
  PY_ASK_FAILS = -1, /* an exception is set */
  PY_ASK_LEAVES,     /* Python must convert the tree */
  PY_ASK_PASSES,     /* it passes through */
  PY_ASK_CONVERTS,   /* it is an array */
  PY_ASK_ENTERS,     /* it is a container, *found its rule */
  PY_ASK_KNOWN       /* *found is its result */
};

typedef struct py_visitor {
  /* One of the above. Owns: the walker owns *found. GIL: needed; may run Python. */
  int (*look)(struct py_visitor*, PyObject* obj, PyObject** found);
  /* Is given the result of each array and container; or NULL. Errors: -1 with an exception. */
  int (*note)(struct py_visitor*, PyObject* obj, PyObject* result, int is_container);
  /* The container that stands for one if its children are the results of that one's; or NULL. Owns:
   * borrowed. Errors: NULL, MemoryError may be set. */
  PyObject* (*own)(struct py_visitor*, PyObject* container);
} py_visitor;

typedef struct {
  FastPathObject* function;
  PyObject* to;
  PyObject* tree; /* what the array was found in, or NULL */
  unsigned options;
  PyObject* answers;   /* strong, or NULL; see py_call_leave */
  py_visitor* visitor; /* of a tree; or NULL */
} py_call;

/* ---- convert/answers.c ----------------------------------------------------------------------- */

/* A producer is called once. Where its answer is not taken, or its method raised, that is left to
 * the Python path of the same call: {address: (obj, what it gave or None, what it raised or None)}.
 * GIL: needed. Errors: an exception is set, and nothing is left. */
void py_call_leave(py_call* call, PyObject* obj, PyObject* answer, int is_raised);

/* Call the Python path: producer_answer gives it what was left. Owns: takes call->answers; the
 * result is new. GIL: needed. Errors: those of the function. */
PyObject* py_call_python(py_call* call, PyObject* const* args, size_t nargsf, PyObject* names);

/* Whether the Python path that runs now was left an answer of an object. GIL: needed. Errors: 1
 * with an exception. */
int py_call_has_answer(PyObject* obj);

extern PyMethodDef py_call_functions[];

#endif
