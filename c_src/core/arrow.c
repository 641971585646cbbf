/* Arrow's structs: import and check. The last holder releases the imported structs. */

#include "arrow.h"

#include "allocate.h"
#include "dtypes.h"
#include "indices.h"

#include <stdio.h>
#include <string.h>

struct dlx_arrow {
  atomic_int_least32_t holders; /* acq_rel when one leaves: the last one sees what others did */
  int64_t n_batches, room;
  struct ArrowSchema schema;
  struct ArrowDeviceArray* batches; /* `first`, or allocated */
  struct ArrowDeviceArray first;
  dlx_arrow* parent; /* whose structs this refers to, or NULL */
};

dlx_arrow* dlx_arrow_new(void) {
  dlx_arrow* data = dlx_allocate(sizeof *data);
  if (data == NULL) return NULL;
  atomic_init(&data->holders, 1);
  data->n_batches = 0;
  data->room = 1;
  data->schema = (struct ArrowSchema){0};
  data->batches = &data->first;
  data->parent = NULL;
  return data;
}

void dlx_arrow_hold(dlx_arrow* data) {
  atomic_fetch_add_explicit(&data->holders, 1, memory_order_relaxed); /* the caller is a holder */
}

void dlx_arrow_drop(void* held) {
  dlx_arrow* data = held;
  if (atomic_fetch_sub_explicit(&data->holders, 1, memory_order_acq_rel) != 1) return;
  for (int64_t i = 0; i < data->n_batches; i++) {
    struct ArrowArray* array = &data->batches[i].array;
    if (array->release) array->release(array);
  }
  if (data->schema.release) data->schema.release(&data->schema);
  if (data->batches != &data->first) free(data->batches);
  if (data->parent) dlx_arrow_drop(data->parent);
  free(data);
}

int dlx_arrow_move_schema(dlx_arrow* data, struct ArrowSchema* schema) {
  if (schema->release == NULL) return DLX_E_CONSUMED;
  data->schema = *schema;
  schema->release = NULL;
  return DLX_OK;
}

/* Errors: NULL = no memory. */
static struct ArrowDeviceArray* next_batch(dlx_arrow* data) {
  if (data->n_batches == data->room) {
    size_t bytes = (size_t)data->room * sizeof *data->batches;
    struct ArrowDeviceArray* larger = dlx_allocate(2 * bytes);
    if (larger == NULL) return NULL;
    memcpy(larger, data->batches, bytes);
    if (data->batches != &data->first) free(data->batches);
    data->batches = larger;
    data->room *= 2;
  }
  return &data->batches[data->n_batches];
}

/* Count the batch of next_batch. On the host, its device id may be -1. */
static void add_batch(dlx_arrow* data) {
  struct ArrowDeviceArray* batch = &data->batches[data->n_batches++];
  if (batch->device_type != kDLCPU) return;
  batch->device_id = 0;
  batch->sync_event = NULL;
}

int dlx_arrow_move_array(dlx_arrow* data, struct ArrowArray* array, int is_on_device) {
  if (array->release == NULL) return DLX_E_CONSUMED;
  struct ArrowDeviceArray* batch = next_batch(data);
  if (batch == NULL) return DLX_E_MEMORY;
  if (is_on_device)
    *batch = *(struct ArrowDeviceArray*)array;
  else
    *batch = (struct ArrowDeviceArray){.array = *array, .device_type = kDLCPU};
  add_batch(data);
  array->release = NULL;
  return DLX_OK;
}

#define HAS(stream, member) \
  ((stream)->is_host ? (stream)->of.host.member != NULL : (stream)->of.device.member != NULL)

static int read_batches(dlx_arrow* data, dlx_arrow_stream* stream) {
  struct ArrowArrayStream* host = stream->is_host ? &stream->of.host : NULL;
  struct ArrowDeviceArrayStream* device = &stream->of.device;
  if (!HAS(stream, get_schema) || !HAS(stream, get_next)) return DLX_E_ARROW;
  int failed =
      host ? host->get_schema(host, &data->schema) : device->get_schema(device, &data->schema);
  if (failed) data->schema.release = NULL;
  if (data->schema.release == NULL) return DLX_E_ARROW;
  while (HAS(stream, release) && HAS(stream, get_next)) { /* a producer may clear them */
    struct ArrowDeviceArray* batch = next_batch(data);
    if (batch == NULL) return DLX_E_MEMORY;
    *batch = (struct ArrowDeviceArray){.device_type = host ? kDLCPU : device->device_type};
    failed = host ? host->get_next(host, &batch->array) : device->get_next(device, batch);
    if (failed) return DLX_E_ARROW;
    if (batch->array.release == NULL) return DLX_OK;
    add_batch(data);
  }
  return DLX_E_ARROW; /* released before its end */
}

int dlx_arrow_read(dlx_arrow* data, dlx_arrow_stream* stream, char* message, size_t room) {
  struct ArrowArrayStream* host = stream->is_host ? &stream->of.host : NULL;
  struct ArrowDeviceArrayStream* device = &stream->of.device;
  const char* text = NULL;
  message[0] = '\0';
  if (!HAS(stream, release)) return DLX_E_CONSUMED;
  int status = read_batches(data, stream);
  if (status == DLX_E_ARROW && HAS(stream, release) && HAS(stream, get_last_error))
    text = host ? host->get_last_error(host) : device->get_last_error(device);
  if (text) snprintf(message, room, "%s", text);
  if (HAS(stream, release)) host ? host->release(host) : device->release(device);
  return status;
}

const struct ArrowSchema* dlx_arrow_schema(const dlx_arrow* data) {
  return &data->schema;
}

void* dlx_arrow_event(const dlx_arrow* data) {
  for (int64_t i = 0; i < data->n_batches; i++) {
    if (data->batches[i].array.length && data->batches[i].sync_event)
      return data->batches[i].sync_event;
  }
  return NULL;
}

int dlx_arrow_is_table(const dlx_arrow* data) {
  const struct ArrowSchema* schema = &data->schema;
  return schema->format && strcmp(schema->format, "+s") == 0 && schema->dictionary == NULL;
}

int dlx_arrow_is_extension(const struct ArrowSchema* schema) {
  static const char name[] = "ARROW:extension:name";
  const char* at = schema->metadata;
  int32_t n = 0, size;
  if (at) memcpy(&n, at, sizeof n);
  for (int64_t i = 0; i < 2 * (int64_t)n; i++, at += size) {
    at += sizeof size;
    memcpy(&size, at, sizeof size);
    if (size < 0) return 1;
    if (i % 2 == 0 && size == sizeof name - 1 &&
        memcmp(at + sizeof size, name, sizeof name - 1) == 0)
      return 1;
  }
  return 0;
}

static int fail(dlx_arrow_fault* fault, const char* what, int64_t found) {
  *fault = (dlx_arrow_fault){what, found};
  return DLX_E_ARROW;
}

static const struct {
  char letter;
  DLDataType dtype;
} formats[] = {
#define FORMAT(code, bits, letters, arrow, number) {arrow, {code, bits, 1}},
    DLX_DTYPES(FORMAT)};

enum { FORMATS = sizeof formats / sizeof *formats };

/* Find the dtype of a format; bits = 0 if it is not a number. */
static DLDataType find_dtype(const char* format) {
  for (int i = 0; i < FORMATS && format[0] && format[1] == '\0'; i++) {
    if (format[0] == formats[i].letter) return formats[i].dtype;
  }
  return (DLDataType){0, 0, 1};
}

char dlx_arrow_letter(DLDataType dtype) {
  for (int i = 0; i < FORMATS; i++) {
    if (memcmp(&formats[i].dtype, &dtype, sizeof dtype) == 0) return formats[i].letter;
  }
  return '\0';
}

/* Parse the n of "+w:n". Errors: -1. */
static int64_t parse_list_size(const char* format) {
  int64_t size = 0;
  if (strncmp(format, "+w:", 3) != 0 || format[3] == '\0') return -1;
  for (const char* digit = format + 3; *digit; digit++) {
    if (*digit < '0' || *digit > '9' || __builtin_mul_overflow(size, 10, &size) ||
        __builtin_add_overflow(size, *digit - '0', &size))
      return -1;
  }
  return size;
}

static int read_type(const struct ArrowSchema* schema, dlx_arrow_column* out,
                     dlx_arrow_fault* fault) {
  out->ndim = 1;
  out->is_numbers = out->is_offsets = 0;
  for (;; schema = schema->children[0]) {
    if (schema->format == NULL) return fail(fault, "a type has no format string", 0);
    out->values = schema;
    if (schema->n_children < 0 || (schema->n_children > 0 && schema->children == NULL))
      return fail(fault, "a type has no children, but a count of", schema->n_children);
    if (schema->dictionary) return DLX_OK;
    int64_t size = parse_list_size(schema->format);
    if (size < 0) break;
    if (schema->n_children != 1 || schema->children[0] == NULL)
      return fail(fault, "a fixed-size list has one child, found", schema->n_children);
    if (out->ndim == DLX_MAX_NDIM) return fail(fault, "its lists are too deep, levels", out->ndim);
    out->shape[out->ndim++] = size;
  }
  if (strncmp(schema->format, "+w", 2) == 0)
    return fail(fault, "the size of a fixed-size list is not a number", 0);
  out->dtype = find_dtype(schema->format);
  out->is_numbers = out->dtype.bits != 0;
  out->is_packed = out->dtype.code == kDLBool;
  return DLX_OK;
}

static int64_t count_zeros(const uint8_t* bits, int64_t start, int64_t count) {
  int64_t ones = 0, i = start, end = start + count;
  for (; i < end && i % 8; i++) ones += bits[i / 8] >> i % 8 & 1;
  for (; end - i >= 64; i += 64) {
    uint64_t word;
    memcpy(&word, bits + i / 8, sizeof word);
    ones += __builtin_popcountll(word);
  }
  for (; i < end; i++) ones += bits[i / 8] >> i % 8 & 1;
  return count - ones;
}

/* A range of values of an array; `start` is an index into its buffers. */
typedef struct {
  const struct ArrowArray* array;
  int64_t start, count, n_nulls;
  const uint8_t* valid; /* the bitmap with the nulls, if any, */
  int64_t first;        /* and the bit of the first value */
} span;

/* Descend to an array and check it: `count` of its values, starting at `from`. */
static int enter(span* at, const struct ArrowSchema* schema, const struct ArrowArray* array,
                 int64_t from, int64_t count, int64_t n_buffers, int on_host,
                 dlx_arrow_fault* fault) {
  int64_t end;
  if (array == NULL) return fail(fault, "a child is missing", 0);
  if (array->length < 0) return fail(fault, "its length is below 0, found", array->length);
  if (array->offset < 0) return fail(fault, "its offset is below 0, found", array->offset);
  if (__builtin_add_overflow(array->offset, array->length, &end))
    return fail(fault, "its offset and length do not fit 63 bits, offset", array->offset);
  if (array->null_count < -1 || array->null_count > array->length)
    return fail(fault, "its null count is above its length or below -1, found", array->null_count);
  if (__builtin_add_overflow(from, count, &end) || end > array->length)
    return fail(fault, "a child has fewer values than its parent needs, found", array->length);
  if (array->n_children != schema->n_children)
    return fail(fault, "type and data have different numbers of children, the data",
                array->n_children);
  if (array->n_children && array->children == NULL)
    return fail(fault, "it has no children, but a count of", array->n_children);
  if (array->dictionary) return fail(fault, "it has a dictionary, but its type does not", 0);
  if (array->n_buffers != n_buffers)
    return fail(fault, "its number of buffers does not match its type, found", array->n_buffers);
  if (array->buffers == NULL)
    return fail(fault, "it has no buffers, but a count of", array->n_buffers);
  at->array = array;
  at->start = array->offset + from;
  at->count = count;
  const uint8_t* valid = array->buffers[0];
  if (array->null_count > 0 && valid == NULL)
    return fail(fault, "it has no validity bitmap, but a null count of", array->null_count);
  if (array->null_count == 0 || valid == NULL || count == 0) return DLX_OK;
  if (!on_host && array->null_count < 0)
    return fail(fault, "the host cannot read its bitmap, and its null count is", array->null_count);
  if (at->n_nulls == 0) { /* nulls below a null do not count */
    at->n_nulls = on_host ? count_zeros(valid, at->start, count) : array->null_count;
    at->valid = valid;
    at->first = at->start;
  }
  return DLX_OK;
}

static int find_values(const dlx_arrow* data, const struct ArrowDeviceArray* batch, int64_t column,
                       const dlx_arrow_column* type, span* at, dlx_arrow_fault* fault) {
  const struct ArrowSchema* schema = &data->schema;
  const struct ArrowArray* array = &batch->array;
  int on_host = dlx_host_readable(batch->device_type);
  int64_t from = 0, count = array->length, last;
  int status;
  at->n_nulls = 0;
  if (column != DLX_ARROW_WHOLE) {
    status = enter(at, schema, array, 0, count, 1, on_host, fault);
    if (status != DLX_OK) return status;
    schema = schema->children[column];
    array = array->children[column];
    from = at->start;
  }
  for (int32_t i = 1; i < type->ndim; i++) {
    status = enter(at, schema, array, from, count, 1, on_host, fault);
    if (status != DLX_OK) return status;
    if (__builtin_mul_overflow(at->start, type->shape[i], &from) ||
        __builtin_mul_overflow(at->count, type->shape[i], &count))
      return fail(fault, "its number of values does not fit 63 bits, lists", at->count);
    schema = schema->children[0];
    array = array->children[0];
  }
  status = enter(at, schema, array, from, count, 2, on_host, fault);
  if (status != DLX_OK) return status;
  if (__builtin_add_overflow(at->start, at->count, &last) ||
      __builtin_mul_overflow(last, type->dtype.bits / 8, &last))
    return fail(fault, "its bytes do not fit 63 bits, values", at->count);
  if (at->count && at->array->buffers[1] == NULL)
    return fail(fault, "it has values but no memory, values", at->count);
  return DLX_OK;
}

int dlx_arrow_describe(const dlx_arrow* data, int64_t column, dlx_arrow_column* out,
                       dlx_arrow_fault* fault) {
  const struct ArrowSchema* schema = &data->schema;
  if (column != DLX_ARROW_WHOLE) {
    if (column < 0 || column >= schema->n_children || schema->children == NULL ||
        schema->children[column] == NULL)
      return fail(fault, "it has no column", column);
    schema = schema->children[column];
  }
  int status = read_type(schema, out, fault);
  if (status != DLX_OK) return status;
  out->shape[0] = out->n_nulls = out->n_chunks = 0;
  out->device = (DLDevice){kDLCPU, 0};
  out->data = NULL;
  for (int64_t i = 0; i < data->n_batches; i++) {
    const struct ArrowDeviceArray* batch = &data->batches[i];
    span at;
    if (batch->device_id < INT32_MIN || batch->device_id > INT32_MAX)
      return fail(fault, "it has an invalid device id,", batch->device_id);
    DLDevice device = {batch->device_type, (int32_t)batch->device_id};
    if (i && (device.device_type != out->device.device_type ||
              device.device_id != out->device.device_id))
      return fail(fault, "its batches are on several devices, one of type", device.device_type);
    out->device = device;
    int64_t rows = batch->array.length;
    if (out->is_numbers) {
      status = find_values(data, batch, column, out, &at, fault);
      if (status != DLX_OK) return status;
      if (__builtin_add_overflow(out->n_nulls, at.n_nulls, &out->n_nulls))
        return fail(fault, "its nulls do not fit 63 bits, found", at.n_nulls);
    }
    if (rows < 0 || __builtin_add_overflow(out->shape[0], rows, &out->shape[0]))
      return fail(fault, "its length is below 0, or the sum exceeds 63 bits, found", rows);
    if (!out->is_numbers || at.count == 0) continue;
    if (out->n_chunks++ == 0) {
      int64_t skipped = out->is_packed ? at.start / 8 : at.start * (out->dtype.bits / 8);
      out->data = (char*)at.array->buffers[1] + skipped;
    }
  }
  return DLX_OK;
}

static DLTensor describe_column(const dlx_arrow_column* column) {
  return (DLTensor){.data = column->data,
                    .device = column->device,
                    .ndim = column->ndim,
                    .dtype = column->dtype,
                    .shape = (int64_t*)column->shape};
}

int dlx_arrow_share(dlx_arrow* data, const dlx_arrow_column* column,
                    DLManagedTensorVersioned** out) {
  DLTensor like = describe_column(column);
  int status = dlx_managed_new(&like, DLPACK_FLAG_BITMASK_READ_ONLY, data, dlx_arrow_drop, out);
  if (status == DLX_OK) dlx_arrow_hold(data);
  return status;
}

int dlx_arrow_chunk(const dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                    int64_t batch, const char** start, const char** end, void** event) {
  span at;
  dlx_arrow_fault fault;
  int64_t bits = column->is_packed ? 1 : column->dtype.bits;
  if (batch >= data->n_batches) return 0;
  *start = *end = NULL;
  *event = data->batches[batch].sync_event;
  if (find_values(data, &data->batches[batch], number, column, &at, &fault) == DLX_OK && at.count) {
    *start = (const char*)at.array->buffers[1] + at.start * bits / 8;
    *end = (const char*)at.array->buffers[1] + ((at.start + at.count) * bits + 7) / 8;
  }
  return 1;
}

/* Add the offsets of a chunk as int64, after the last one of the chunks before. Return the end. */
static int64_t* add_offsets(const void* from, int bits, int64_t count, int64_t* to) {
  int64_t shift = *to - dlx_index_at(from, bits, 0);
  for (int64_t k = 1; k <= count; k++) *++to = dlx_index_at(from, bits, k) + shift;
  return to;
}

int dlx_arrow_gather(const dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                     DLManagedTensorVersioned** out) {
  DLTensor like = describe_column(column);
  if (column->is_offsets) like.dtype.bits = 64;
  if (!dlx_host_readable(column->device.device_type)) return DLX_E_DEVICE;
  int status = dlx_managed_empty(&like, 0, 0, out);
  if (status != DLX_OK) return status;
  uint8_t* to = (*out)->dl_tensor.data;
  if (column->is_offsets) *(int64_t*)to = 0;
  for (int64_t i = 0; i < data->n_batches && status == DLX_OK; i++) {
    span at;
    dlx_arrow_fault fault;
    status = find_values(data, &data->batches[i], number, column, &at, &fault);
    if (status != DLX_OK || at.count == 0) continue;
    const uint8_t* from = at.array->buffers[1];
    int64_t item = column->dtype.bits / 8;
    if (column->is_packed) {
      for (int64_t k = at.start; k < at.start + at.count; k++) *to++ = from[k / 8] >> k % 8 & 1;
    } else if (column->is_offsets) {
      to = (void*)add_offsets(from + at.start * item, column->dtype.bits, at.count, (void*)to);
    } else {
      memcpy(to, from + at.start * item, (size_t)(at.count * item));
      to += at.count * item;
    }
  }
  if (status != DLX_OK) dlx_managed_release(*out);
  return status;
}

/* ---- lists of varying length ----------------------------------------------------------------- */

/* Add the values of the rows of a batch, and describe its offsets. */
static int add_values(const dlx_arrow* data, int64_t i, const span* at, dlx_arrow_lists* out,
                      dlx_arrow_fault* fault) {
  dlx_arrow_column* offsets = &out->offsets;
  int bits = offsets->dtype.bits;
  int64_t extent = at->count + 1, row = 0, end;
  DLTensor all = {.ndim = 1, .dtype = offsets->dtype, .shape = &extent};
  all.data = (char*)at->array->buffers[1] + at->start * (bits / 8);
  int64_t bad = dlx_find_descent(&all), first = dlx_index_at(all.data, bits, 0);
  if (bad >= 0) return fail(fault, "an offset is less than the one before it, number", bad);
  if (first < 0) return fail(fault, "its first offset is below 0, found", first);
  const struct ArrowArray* child = at->array->n_children == 1 ? at->array->children[0] : NULL;
  int64_t last = dlx_index_at(all.data, bits, at->count);
  if (child == NULL || child->length < last || child->offset < 0 ||
      __builtin_add_overflow(child->offset, last, &end))
    return fail(fault, "a list has no values up to its last offset,", last);
  if (at->n_nulls && out->null_row < 0) {
    while (at->valid[(at->first + row) / 8] >> (at->first + row) % 8 & 1) row++;
    out->null_row = offsets->shape[0] - 1 + row;
  }
  if (offsets->n_chunks++ == 0) offsets->data = all.data;
  offsets->shape[0] += at->count;
  struct ArrowDeviceArray* batch = next_batch(out->values);
  if (batch == NULL) return DLX_E_MEMORY;
  *batch = data->batches[i];
  batch->array = *child;
  batch->array.offset += first;
  batch->array.length = last - first;
  if (child->null_count > 0) batch->array.null_count = -1; /* of another range */
  batch->array.release = NULL;                             /* the parent's */
  add_batch(out->values);
  return DLX_OK;
}

int dlx_arrow_split(dlx_arrow* data, int64_t column, dlx_arrow_lists* out, dlx_arrow_fault* fault) {
  const struct ArrowSchema* schema = &data->schema;
  if (column != DLX_ARROW_WHOLE) schema = schema->children[column];
  if (schema->n_children != 1 || schema->children == NULL || schema->children[0] == NULL)
    return fail(fault, "a list has one child, found", schema->n_children);
  dlx_arrow_column offsets = {.is_numbers = 1, .is_offsets = 1, .ndim = 1, .shape = {1}};
  offsets.dtype = (DLDataType){kDLInt, schema->format[1] == 'L' ? 64 : 32, 1};
  offsets.device.device_type = kDLCPU;
  *out = (dlx_arrow_lists){.values = dlx_arrow_new(), .offsets = offsets, .null_row = -1};
  if (out->values == NULL) return DLX_E_MEMORY;
  out->values->schema = *schema->children[0];
  out->values->schema.release = NULL; /* the parent's */
  out->values->parent = data;
  dlx_arrow_hold(data);
  int status = DLX_OK;
  for (int64_t i = 0; i < data->n_batches && status == DLX_OK; i++) {
    const struct ArrowDeviceArray* batch = &data->batches[i];
    span at = {0};
    status = dlx_host_readable(batch->device_type)
                 ? find_values(data, batch, column, &out->offsets, &at, fault)
                 : DLX_E_DEVICE;
    if (status == DLX_OK && at.count) status = add_values(data, i, &at, out, fault);
  }
  if (status == DLX_OK) return DLX_OK;
  dlx_arrow_drop(out->values);
  out->values = NULL;
  return status;
}
