#ifndef DLX_CALL_H_
#define DLX_CALL_H_

/* One call of a function with a fast path.
 *
 * Unless noted otherwise, functions of c_src/convert and c_src/call need the GIL and may run
 * Python, results are new references, -1 means an exception, and NULL or 0 means "fallback":
 * without an exception, the Python path repeats the call; with an exception, the call ends. Only
 * exceptions that py_error_forget does not clear are left: interrupts, exits, MemoryError. */

#include "interop/interop.h"

/* A function with a fast path; call/function.c defines its type. */
typedef struct {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* wrapped; /* the Python function: complete without the fast path */
  PyObject* learn;   /* learn(type, to): adds a pair, if possible */
  PyObject* failed;  /* failed(obj, to, cause, tree=None): the error of a failed consumer */
  PyObject* to;      /* the target if calls do not name one, and trees are rejected; or NULL */
  PyObject* view;    /* view(obj, to): a lazy view, or None = fallback; or NULL */
  PyObject* dict;    /* __name__, __doc__, __wrapped__, ... */
  PyObject* weakrefs;
} FastPathObject;

/* The options of a call that the fast path supports; 0 = defaults. */
enum {
  DLX_COPIES = 1,         /* copy=True: the memory is not kept after the call */
  DLX_SHARES = 2,         /* copy=False */
  DLX_KEEPS_READONLY = 4, /* readonly="error" */
  DLX_EXAMINES = 8,       /* detach=True, or a device: arrays of the target may have to change */
  DLX_DETACHES = 16,      /* detach=True: export arrays with gradients without them */
  DLX_HOST_ONLY = 32,     /* leave arrays in device memory to Python */
  DLX_UNMARKS = 64,       /* readonly="share": the consumer gets read-only memory as writable */
  DLX_VIEWS = 128,        /* lazy=True, for containers; removed before a conversion */
  DLX_NAMES_DEVICE = 256, /* the host is named by device=, or by a committed example */
  DLX_MOVABLE = 512,      /* by an example that is not committed */
  DLX_MOVES = 1024        /* `device` names another device than the host */
};

/* What to do with an object of a tree. Only asked for objects other than lists, tuples, dicts and
 * plain data. */
enum {
  PY_ASK_FAILS = -1, /* an exception is set */
  PY_ASK_LEAVES,     /* fallback */
  PY_ASK_PASSES,     /* it passes through unchanged */
  PY_ASK_CONVERTS,   /* it is an array */
  PY_ASK_ENTERS,     /* it is a container with the rule *found */
  PY_ASK_KNOWN       /* *found is its result */
};

typedef struct py_visitor {
  /* Return one of the above. Owns: the walker owns *found. */
  int (*classify)(struct py_visitor*, PyObject* obj, PyObject** found);
  /* Note the result of an array or container; or NULL. */
  int (*note)(struct py_visitor*, PyObject* obj, PyObject* result, int is_container);
  /* Find the container to return for one if the results of its children are that container's
   * children; or NULL. Owns: borrowed. Errors: NULL; MemoryError may be set. */
  PyObject* (*find_own)(struct py_visitor*, PyObject* container);
} py_visitor;

typedef struct {
  FastPathObject* function;
  PyObject* to;
  PyObject* tree; /* the tree that contains the array, or NULL */
  unsigned options;
  PyObject* device;    /* with DLX_MOVES; borrowed from the arguments */
  PyObject* responses; /* strong, or NULL; see py_call_keep_response */
  py_visitor* visitor; /* for a tree; or NULL */
} py_call;

/* ---- convert/responses.c --------------------------------------------------------------------- */

/* A producer is called once: if the fast path cannot use its response, it keeps it for the Python
 * path of the same call, as {address: (obj, result or None, exception or None)}. Errors: an
 * exception is set, and no responses are kept. */
void py_call_keep_response(py_call* call, PyObject* obj, PyObject* answer, int is_raised);

/* Call the Python path, which reads kept responses by producer_response. Owns: takes
 * call->responses. Errors: the function's. */
PyObject* py_call_python(py_call* call, PyObject* const* args, size_t nargsf, PyObject* names);

/* Whether the current Python path has a response of an object. Errors: 1 with an exception. */
int py_call_has_response(PyObject* obj);

extern PyMethodDef py_call_functions[];

#endif
