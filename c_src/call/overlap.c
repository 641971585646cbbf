/* Whether two arrays of host memory have a byte in common, for dlx.shares_memory. */

#include "convert/pairs.h"
#include "function.h"

/* The bytes of an array: low <= address < high. */
typedef struct {
  int64_t low, high;
  int is_run; /* has no gaps */
} byte_range;

static int get_byte_range(const DLTensor* t, uint64_t flags, byte_range* out) {
  if (t->device.device_type != kDLCPU || t->dtype.bits * t->dtype.lanes % 8) return 0;
  dlx_extent(t, flags, &out->low, &out->high);
  out->low += (int64_t)(uintptr_t)t->data;
  out->high += (int64_t)(uintptr_t)t->data;
  out->is_run = (dlx_layout(t) & ~(uint32_t)DLX_LAYOUT_PERMUTED) == 0;
  return 1;
}

static int export_byte_range(const py_pair* pair, PyObject* obj, byte_range* out) {
  py_offer offer = {.made = NULL};
  unsigned options = DLX_COPIES | DLX_SHARES | DLX_DETACHES | DLX_HOST_ONLY;
  if (!py_target_holds(pair->target, options)) return 0;
  pair->source->take(pair->source, pair->target, obj, options, &offer);
  int is_known = offer.made && get_byte_range(&offer.made->dl_tensor, offer.made->flags, out);
  if (offer.made) dlx_managed_release(offer.made);
  return is_known;
}

static int find_byte_range(const py_pair* pair, PyObject* obj, byte_range* out) {
  py_source* s = pair->source;
  if (pair->what == PY_STAYS) {
    DLManagedTensorVersioned* m =
        s->kind.type == &py_tensor_type ? py_tensor_inside((TensorObject*)obj) : NULL;
    return m && get_byte_range(&m->dl_tensor, m->flags, out);
  }
  if (pair->what != PY_CONVERTS) return 0;
  int is_buffer = s->table == &py_buffer_table && py_target_holds(pair->target, 0) &&
                  py_gate_is_open(&s->gate, obj);
  int is_known = is_buffer ? py_buffer_bytes(obj, &out->low, &out->high) : 0;
  if (is_known == 0) return !PyErr_Occurred() && export_byte_range(pair, obj, out);
  out->is_run = 1;
  return is_known > 0;
}

PyObject* py_function_overlap(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  byte_range at[2];
  if (nargs != 2) {
    PyErr_SetString(PyExc_TypeError, "_overlap takes two arrays");
    return NULL;
  }
  int n = 0;
  py_maps_begin();
  for (int is_known = 1; n < 2 && is_known; n += is_known) {
    py_pair pair;
    is_known = py_pair_learn((FastPathObject*)self, Py_TYPE(args[n]), py_name_dlx, &pair);
    if (!is_known) break;
    is_known = find_byte_range(&pair, args[n], &at[n]);
    py_pair_release(&pair);
  }
  py_maps_end();
  if (PyErr_Occurred()) return NULL;
  if (n < 2) Py_RETURN_NONE;
  int is_empty = at[0].low == at[0].high || at[1].low == at[1].high;
  int apart = is_empty || at[0].low >= at[1].high || at[1].low >= at[0].high;
  if (!apart && !(at[0].is_run && at[1].is_run)) Py_RETURN_NONE;
  return PyBool_FromLong(!apart);
}
