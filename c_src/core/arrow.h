#ifndef DLX_ARROW_H_
#define DLX_ARROW_H_

/* Arrow's C data, stream and device interfaces: columns of numbers out of them, tensors into them.
 * No function needs the GIL. What they return in `out` is borrowed, unless Owns says more. */

#include "dlx.h"

/* ---- the structs and guards of Arrow's format documentation ---------------------------------- */

#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE

#define ARROW_FLAG_DICTIONARY_ORDERED 1
#define ARROW_FLAG_NULLABLE 2
#define ARROW_FLAG_MAP_KEYS_SORTED 4

/* A type. Its holder calls release once, a parent its children's; NULL = released or moved. */
struct ArrowSchema {
  const char* format;   /* the type, as text */
  const char* name;     /* of a child; may be NULL */
  const char* metadata; /* pairs of texts, each with its length before it; may be NULL */
  int64_t flags;
  int64_t n_children;
  struct ArrowSchema** children;
  struct ArrowSchema* dictionary; /* the type of what the values index; else NULL */
  void (*release)(struct ArrowSchema*);
  void* private_data; /* of the producer */
};

/* Data of a type: `length` values, the first of them at number `offset` of the buffers. */
struct ArrowArray {
  int64_t length;
  int64_t null_count; /* -1: it was not counted */
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers; /* bitmap of what is not null (NULL: all), then those of the type */
  struct ArrowArray** children;
  struct ArrowArray* dictionary;
  void (*release)(struct ArrowArray*);
  void* private_data;
};

#endif

#ifndef ARROW_C_DEVICE_DATA_INTERFACE
#define ARROW_C_DEVICE_DATA_INTERFACE

/* The same on a device; types of devices have DLPack's numbers. */
struct ArrowDeviceArray {
  struct ArrowArray array;
  int64_t device_id;
  int32_t device_type;
  void* sync_event; /* wait for it before reading the buffers; may be NULL */
  int64_t reserved[3];
};

#endif

#ifndef ARROW_C_STREAM_INTERFACE
#define ARROW_C_STREAM_INTERFACE

/* Arrays of one type, one after another; a released array ends it. Not 0: an error. */
struct ArrowArrayStream {
  int (*get_schema)(struct ArrowArrayStream*, struct ArrowSchema* out);
  int (*get_next)(struct ArrowArrayStream*, struct ArrowArray* out);
  const char* (*get_last_error)(struct ArrowArrayStream*); /* the text lives until the next call */
  void (*release)(struct ArrowArrayStream*);
  void* private_data;
};

#endif

#ifndef ARROW_C_DEVICE_STREAM_INTERFACE
#define ARROW_C_DEVICE_STREAM_INTERFACE

/* The same of arrays on devices of one type. */
struct ArrowDeviceArrayStream {
  int32_t device_type;
  int (*get_schema)(struct ArrowDeviceArrayStream*, struct ArrowSchema* out);
  int (*get_next)(struct ArrowDeviceArrayStream*, struct ArrowDeviceArray* out);
  const char* (*get_last_error)(struct ArrowDeviceArrayStream*);
  void (*release)(struct ArrowDeviceArrayStream*);
  void* private_data;
};

#endif

/* ---- data that another library gave ---------------------------------------------------------- */

/* A type and all its batches of data; reference-counted. */
typedef struct dlx_arrow dlx_arrow;

/* A contradiction, for an error. */
typedef struct {
  const char* what;
  int64_t found;
} dlx_arrow_fault;

/* One column of all batches. */
typedef struct {
  int is_numbers; /* else nothing below is set but `values` */
  int is_packed;  /* bools, eight to a byte */
  DLDataType dtype;
  int32_t ndim;                     /* 1, and one for each level of fixed-size lists */
  int64_t shape[DLX_MAX_NDIM];      /* of all batches together */
  DLDevice device;                  /* of all batches */
  int64_t n_nulls;                  /* at the outermost level that has any */
  int64_t n_chunks;                 /* batches with elements */
  void* data;                       /* of the first chunk: the byte in which its elements begin */
  const struct ArrowSchema* values; /* the innermost type */
} dlx_arrow_column;

enum { DLX_ARROW_WHOLE = -1 /* the column of data that is no struct */ };

/* Make one without type and data, take one count more, and give one up; the last one calls every
 * release that is owed. Errors: NULL = no memory. */
dlx_arrow* dlx_arrow_new(void);
void dlx_arrow_hold(dlx_arrow* data);
void dlx_arrow_drop(void* data);

/* Move a type or a batch out of its struct, which is marked as released. With `is_on_device` the
 * array is the head of a struct ArrowDeviceArray. Owns: `data` owes the release. Errors:
 * DLX_E_CONSUMED = it was moved or released before; DLX_E_MEMORY. */
int dlx_arrow_move_schema(dlx_arrow* data, struct ArrowSchema* schema);
int dlx_arrow_move_array(dlx_arrow* data, struct ArrowArray* array, int is_on_device);

/* A stream, moved out of the struct that held it. */
typedef struct {
  int is_host;
  union {
    struct ArrowArrayStream host;
    struct ArrowDeviceArrayStream device;
  } of;
} dlx_arrow_stream;

/* Read a stream to its end into an empty `data`, and release it, unless it did so itself. GIL: must
 * not be held, a producer may wait for threads that want it. Errors: DLX_E_CONSUMED, DLX_E_MEMORY;
 * DLX_E_ARROW = the stream failed, and `why` is its text, or empty. */
int dlx_arrow_read(dlx_arrow* data, dlx_arrow_stream* stream, char* why, size_t room);

/* The type; the first event of a batch with elements, or NULL; 1 for a struct with columns. */
const struct ArrowSchema* dlx_arrow_schema(const dlx_arrow* data);
void* dlx_arrow_event(const dlx_arrow* data);
int dlx_arrow_is_table(const dlx_arrow* data);

/* 1 for an extension type, or if its metadata contradict themselves. */
int dlx_arrow_is_extension(const struct ArrowSchema* schema);

/* Check a column and describe it; memory behind pointers cannot be checked. Errors: DLX_E_ARROW,
 * `fault` says where it contradicts itself. */
int dlx_arrow_look(const dlx_arrow* data, int64_t column, dlx_arrow_column* out,
                   dlx_arrow_fault* fault);

/* A read-only managed tensor over a column of one chunk or none, without nulls and bools. Owns: it
 * holds a count on `data`. Errors: as dlx_managed_new. */
int dlx_arrow_share(dlx_arrow* data, const dlx_arrow_column* column,
                    DLManagedTensorVersioned** out);

/* The numbers that a batch has of a column from dlx_arrow_look: a tensor of one dimension, whose
 * extent is returned (`out->shape` is not set), and its event or NULL. -1 = no such batch. */
int64_t dlx_arrow_chunk(const dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                        int64_t batch, DLTensor* out, void** event);

/* Copy a host column without nulls. Errors: as dlx_managed_empty, DLX_E_DEVICE. */
int dlx_arrow_gather(const dlx_arrow* data, int64_t number, const dlx_arrow_column* column,
                     DLManagedTensorVersioned** out);

/* ---- tensors given out ----------------------------------------------------------------------- */

/* The type of a tensor: its numbers, in a fixed-size list for every dimension but the first. Owns:
 * the caller calls release. Errors: DLX_E_NDIM, DLX_E_DTYPE (none in Arrow), DLX_E_MEMORY. */
int dlx_arrow_give_schema(const DLTensor* tensor, struct ArrowSchema* out);

/* The data of a tensor (one of ours), which holds the memory by a count; bools are packed into a
 * copy. Owns, Errors: as above; DLX_E_DEVICE = not host memory; DLX_E_COPY = not row-major. */
int dlx_arrow_give_array(DLManagedTensorVersioned* made, struct ArrowArray* out);

#endif
