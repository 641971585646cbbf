/* The recording driver of fake_cuda.c with cuda.h 13.0's rules for memory of several processes: IPC
 * handles of memory and events, and allocations with descriptors. It wraps that driver, and only
 * knows where the bytes of a block are.
 *
 * Each block is a memory file, which other processes open as dlx opens its segments. Another
 * process's writes are work on a stream that does not exist here: reading opened memory without
 * waiting for an event that was opened later is a race. Freeing memory, and destroying events, that
 * another process has open are misuses. */

#define _GNU_SOURCE

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILES = 4096, PAGE = 4096 };

static struct {
  char* bytes; /* fake_cuda.c's bytes of a block */
  size_t size;
  int fd; /* the memory file that contains them */
} files[FILES];

static int file_of(const void* bytes) {
  int i = 0;
  while (i < FILES && files[i].bytes != bytes) i++;
  return i;
}

static void* file_alloc(size_t alignment, size_t n) {
  (void)alignment;
  int i = file_of(NULL), fd = memfd_create("fake_cuda", 0);
  n = (n + PAGE - 1) / PAGE * PAGE;
  if (i == FILES || fd < 0 || ftruncate(fd, (off_t)n) != 0) abort();
  files[i].bytes = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  files[i].size = n;
  files[i].fd = fd;
  return files[i].bytes;
}

static void file_free(void* bytes) {
  int i = bytes ? file_of(bytes) : FILES;
  if (i == FILES) {
    free(bytes);
    return;
  }
  munmap(bytes, files[i].size);
  close(files[i].fd);
  files[i].bytes = NULL;
}

#define aligned_alloc file_alloc
#define free file_free
#define cuDeviceGetAttribute base_attribute
#define cuPointerGetAttribute base_pointer
#define cuEventCreate base_event
#define cuEventDestroy_v2 base_event_destroy
#define cuMemAllocAsync base_alloc_async
#define cuMemAllocFromPoolAsync base_alloc_from_pool
#define cuMemFree_v2 base_free
#define fake_free base_fake_free
#define fake_reset base_reset
#include "fake_cuda.c"
#undef aligned_alloc
#undef free
#undef cuDeviceGetAttribute
#undef cuPointerGetAttribute
#undef cuEventCreate
#undef cuEventDestroy_v2
#undef cuMemAllocAsync
#undef cuMemAllocFromPoolAsync
#undef cuMemFree_v2
#undef fake_free
#undef fake_reset

/* ---- known blocks ---------------------------------------------------------------------------- */

enum { MANY = 1024, POOLED = 1, OPENED = 2, ADDRESSES = 4, MAPPED_HERE = 8, USABLE = 16 };

static struct {
  uint64_t address;
  int what;
  int lock; /* the file of an opened block, locked so that its owner can detect it */
} known[MANY];

static struct {
  void* event;
  int fd;     /* locked by processes that opened it */
  int opened; /* opened here, from another process */
} shared_events[MANY];

static struct {
  int used, fd, counts, maps;
} allocations[MANY];

static int has_ipc = 1, has_descriptors = 1;
static uint64_t abroad[DEVICES];

static int know(uint64_t address) {
  int i = 0;
  while (i < MANY - 1 && known[i].address && known[i].address != address) i++;
  return i;
}

static uint64_t base_of(uint64_t address, size_t* size, int* fd) {
  block* b = find_block((void*)(uintptr_t)address);
  if (b == NULL || !b->alive || b->held == NULL) return 0;
  if (size) *size = (size_t)(b->high - b->low);
  if (fd) *fd = files[file_of(b->held)].fd;
  return (uint64_t)(uintptr_t)b->low;
}

/* Open another process's file; -1 = it is gone. */
static int open_file(int process, int fd) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, fd);
  return open(path, O_RDWR | O_CLOEXEC);
}

/* A call from one entry point to another. */
#define INNER(call) (inner++, status_of = (call), inner--, status_of)
static __thread int status_of;

/* Create a block over the bytes of a file. */
static uint64_t block_over(int fd, size_t size) {
  uint64_t address;
  if (INNER(cuMemAlloc_v2(&address, size)) != 0) return 0;
  char* bytes = bytes_of((void*)(uintptr_t)address);
  int i = file_of(bytes);
  mmap(bytes, files[i].size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  dup3(fd, files[i].fd, O_CLOEXEC);
  return address;
}

/* Another process has just written to an opened block. */
static void written_abroad(uint64_t address, size_t size) {
  int device = find_block((void*)(uintptr_t)address)->device;
  if (abroad[device] == 0) abroad[device] = fake_stream(device, 0);
  fake_kernel(device, abroad[device], address, size, 1);
}

#define CONTEXT_OR(code_) \
  if (fake_current() < 0) LEAVE(code_)

void fake_reset(int devices) {
  for (int i = 0; i < MANY; i++) {
    if (known[i].lock > 0) close(known[i].lock);
    if (shared_events[i].fd > 0) close(shared_events[i].fd);
    if (allocations[i].used) close(allocations[i].fd);
  }
  memset(known, 0, sizeof known);
  memset(shared_events, 0, sizeof shared_events);
  memset(allocations, 0, sizeof allocations);
  memset(abroad, 0, sizeof abroad);
  has_ipc = has_descriptors = 1;
  base_reset(devices);
}

void fake_set_sharing(int by_handle, int by_descriptor) {
  has_ipc = by_handle;
  has_descriptors = by_descriptor;
}

/* Allocations that are neither released nor unmapped. */
long fake_allocations(void) {
  long n = 0;
  for (int i = 0; i < MANY; i++) n += allocations[i].used != 0;
  return n;
}

/* Blocks of other processes that are open here. */
long fake_opened(void) {
  long n = 0;
  for (int i = 0; i < MANY; i++) n += (known[i].what & OPENED) != 0;
  return n;
}

/* ---- extended entry points ------------------------------------------------------------------- */

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  int status = base_attribute(value, attribute, device);
  if (attribute == 125) *value = has_ipc;
  if (attribute == 102 || attribute == 103) *value = has_descriptors;
  return status;
}

int cuPointerGetAttribute(void* value, int attribute, uint64_t address) {
  if (attribute < 10) return base_pointer(value, attribute, address);
  ENTER("cuPointerGetAttribute");
  CONTEXT_OR(201);
  size_t size;
  uint64_t base = base_of(address, &size, NULL);
  if (base == 0) LEAVE(1);
  int what = known[know(base)].what;
  if (attribute == 10) *(char*)value = what == 0;
  if (attribute == 11) *(uint64_t*)value = base;
  if (attribute == 12) *(size_t*)value = size;
  if (attribute == 14) *(unsigned long long*)value = (what & ADDRESSES) != 0;
  LEAVE(0);
}

static int pooled(int status, const uint64_t* address) {
  if (status == 0) {
    int i = know(*address);
    known[i].address = *address;
    known[i].what = POOLED;
  }
  return status;
}

int cuMemAllocAsync(uint64_t* address, size_t n, uint64_t handle) {
  return pooled(base_alloc_async(address, n, handle), address);
}

int cuMemAllocFromPoolAsync(uint64_t* address, size_t n, pool* from, uint64_t handle) {
  return pooled(base_alloc_from_pool(address, n, from, handle), address);
}

/* Return 1 if another process has a file open: each holds a lock on its own descriptor. */
static int is_open_abroad(int fd) {
  int own = open_file(getpid(), fd), found = own >= 0 && flock(own, LOCK_EX | LOCK_NB) != 0;
  if (own >= 0) close(own);
  return found;
}

static void check_free(uint64_t address) {
  int fd = -1;
  if (base_of(address, NULL, &fd) == address && is_open_abroad(fd)) {
    misuses++;
    complain("memory was freed that another process has open; ");
  }
}

int cuMemFree_v2(uint64_t address) {
  check_free(address);
  return base_free(address);
}

/* A framework frees memory that it has allocated without a pool. */
void fake_free(uint64_t address) {
  check_free(address);
  base_fake_free(address);
}

int cuEventCreate(event** made, unsigned flags) {
  int status = base_event(made, flags == 6 ? 2 : flags);
  if (status == 0 && flags == 6) {
    int i = 0;
    while (shared_events[i].event) i++;
    shared_events[i].event = *made;
    shared_events[i].fd = memfd_create("fake_event", MFD_CLOEXEC);
    shared_events[i].opened = 0;
  }
  return status;
}

int cuEventDestroy_v2(event* e) {
  for (int i = 0; i < MANY; i++)
    if (shared_events[i].event == e) {
      if (!shared_events[i].opened && is_open_abroad(shared_events[i].fd)) {
        misuses++;
        complain("an event was destroyed that another process has open; ");
      }
      close(shared_events[i].fd);
      memset(&shared_events[i], 0, sizeof shared_events[i]);
    }
  return base_event_destroy(e);
}

/* ---- handles --------------------------------------------------------------------------------- */

/* cuda.h's handle is 64 chars, which a caller may put at any address. */
typedef struct __attribute__((packed)) {
  int kind, process, fd, device;
  size_t size;
  char rest[40];
} ipc_handle;

_Static_assert(sizeof(ipc_handle) == 64 && _Alignof(ipc_handle) == 1, "as cuda.h says");

int cuDeviceGetUuid_v2(void* uuid, int device) {
  ENTER("cuDeviceGetUuid");
  memset(uuid, 0, 16); /* the caller compares all bytes */
  snprintf(uuid, 16, "fake device %d", device);
  LEAVE(0);
}

int cuIpcGetMemHandle(ipc_handle* handle, uint64_t address) {
  ENTER("cuIpcGetMemHandle");
  CONTEXT_OR(201);
  int fd;
  size_t size;
  if (!has_ipc) LEAVE(801);
  if (base_of(address, &size, &fd) != address || known[know(address)].what) LEAVE(1);
  block* b = find_block((void*)(uintptr_t)address);
  *handle = (ipc_handle){.kind = 1, .process = getpid(), .fd = fd, .device = b->device};
  handle->size = size;
  LEAVE(0);
}

/* By cuda.h, opening twice returns the same address; dlx opens once, so a second call is a
 * misuse. */
int cuIpcOpenMemHandle_v2(uint64_t* address, ipc_handle handle, unsigned flags) {
  {
    ENTER("cuIpcOpenMemHandle");
    CONTEXT_OR(201);
    note("cuIpcOpenMemHandle %d\n", handle.device);
    if (flags != 1 || handle.kind != 1 || handle.process == getpid()) LEAVE(201);
    if (handle.device != fake_current()) LEAVE(1);
    pthread_mutex_unlock(&lock);
  }
  int fd = open_file(handle.process, handle.fd);
  if (fd < 0) return 400;
  *address = block_over(fd, handle.size);
  close(fd);
  fd = open_file(handle.process, handle.fd);
  flock(fd, LOCK_SH);
  int i = know(*address);
  known[i].address = *address;
  known[i].what = OPENED;
  known[i].lock = fd;
  written_abroad(*address, handle.size);
  return 0;
}

static int forget(uint64_t address) {
  int i = know(address);
  if (known[i].lock > 0) close(known[i].lock);
  known[i].lock = known[i].what = 0;
  return INNER(base_free(address));
}

int cuIpcCloseMemHandle(uint64_t address) {
  {
    ENTER("cuIpcCloseMemHandle");
    CONTEXT_OR(201);
    note("cuIpcCloseMemHandle\n");
    if (known[know(address)].what != OPENED) LEAVE(1);
    pthread_mutex_unlock(&lock);
  }
  return forget(address);
}

int cuIpcGetEventHandle(ipc_handle* handle, void* event) {
  ENTER("cuIpcGetEventHandle");
  for (int i = 0; i < MANY; i++)
    if (shared_events[i].event == event) {
      *handle = (ipc_handle){.kind = 2, .process = getpid(), .fd = shared_events[i].fd};
      LEAVE(0);
    }
  LEAVE(400);
}

int cuIpcOpenEventHandle(void** made, ipc_handle handle) {
  {
    ENTER("cuIpcOpenEventHandle");
    CONTEXT_OR(201);
    if (handle.kind != 2 || handle.process == getpid()) LEAVE(400);
    pthread_mutex_unlock(&lock);
  }
  int fd = open_file(handle.process, handle.fd), i = 0;
  if (fd < 0) return 400;
  event* e;
  int status = INNER(base_event(&e, 2));
  if (status != 0) return status;
  flock(fd, LOCK_SH);
  while (shared_events[i].event) i++;
  shared_events[i].event = e;
  shared_events[i].fd = fd;
  shared_events[i].opened = 1;
  *made = e;
  int device = fake_current();
  return abroad[device] ? INNER(cuEventRecord(e, abroad[device])) : 0;
}

/* ---- allocations with descriptors ------------------------------------------------------------ */

typedef struct {
  int kind, handles, place, device;
  void* windows;
  char rest[8];
} properties;

int cuMemGetAllocationGranularity(size_t* bytes, const properties* p, int option) {
  ENTER("cuMemGetAllocationGranularity");
  *bytes = PAGE;
  LEAVE(p->kind != 1 || p->place != 1 || option != 0);
}

static unsigned long long new_allocation(int fd) {
  int i = 1;
  while (allocations[i].used) i++;
  allocations[i].used = allocations[i].counts = 1;
  allocations[i].maps = 0;
  allocations[i].fd = fd;
  return (unsigned long long)i;
}

static void drop_allocation(unsigned long long i) {
  if (allocations[i].counts || allocations[i].maps) return;
  close(allocations[i].fd);
  allocations[i].used = 0;
}

int cuMemCreate(unsigned long long* made, size_t size, const properties* p,
                unsigned long long flags) {
  ENTER("cuMemCreate");
  if (!has_descriptors) LEAVE(801);
  if (p->kind != 1 || p->handles != 1 || p->place != 1 || flags || size == 0 || size % PAGE)
    LEAVE(1);
  int fd = memfd_create("fake_allocation", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size) != 0) LEAVE(2);
  *made = new_allocation(fd);
  LEAVE(0);
}

int cuMemRelease(unsigned long long allocation) {
  ENTER("cuMemRelease");
  if (allocation >= MANY || allocations[allocation].counts == 0) {
    misuses++;
    complain("an allocation was released too often; ");
    LEAVE(1);
  }
  allocations[allocation].counts--;
  drop_allocation(allocation);
  LEAVE(0);
}

int cuMemAddressReserve(uint64_t* address, size_t size, size_t alignment, uint64_t wish,
                        unsigned long long flags) {
  {
    ENTER("cuMemAddressReserve");
    CONTEXT_OR(201);
    if (size == 0 || size % PAGE || alignment || wish || flags) LEAVE(1);
    pthread_mutex_unlock(&lock);
  }
  int status = INNER(cuMemAlloc_v2(address, size));
  if (status == 0) {
    int i = know(*address);
    known[i].address = *address;
    known[i].what = ADDRESSES;
    known[i].lock = 0;
  }
  return status;
}

int cuMemAddressFree(uint64_t address, size_t size) {
  {
    ENTER("cuMemAddressFree");
    size_t found = 0;
    int what = known[know(address)].what;
    if (base_of(address, &found, NULL) != address || found != size || !(what & ADDRESSES) ||
        what & MAPPED_HERE) {
      misuses++;
      complain("addresses were given back that are mapped, or were never reserved; ");
      LEAVE(1);
    }
    pthread_mutex_unlock(&lock);
  }
  return forget(address);
}

int cuMemMap(uint64_t address, size_t size, size_t offset, unsigned long long allocation,
             unsigned long long flags) {
  int opened;
  {
    ENTER("cuMemMap");
    struct stat found;
    size_t reserved = 0;
    int i = know(address);
    if (offset || flags || base_of(address, &reserved, NULL) != address || reserved != size ||
        known[i].what != ADDRESSES || allocation >= MANY || !allocations[allocation].used ||
        fstat(allocations[allocation].fd, &found) != 0 || (size_t)found.st_size < size)
      LEAVE(1);
    char* bytes = bytes_of((void*)(uintptr_t)address);
    int fd = allocations[allocation].fd;
    mmap(bytes, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    known[i].what |= MAPPED_HERE;
    known[i].lock = -(int)allocation; /* no lock: the allocation lives as long as a mapping of it */
    allocations[allocation].maps++;
    opened = allocations[allocation].used == 2;
    pthread_mutex_unlock(&lock);
  }
  if (opened) written_abroad(address, size);
  return 0;
}

int cuMemUnmap(uint64_t address, size_t size) {
  ENTER("cuMemUnmap");
  size_t reserved = 0;
  int i = know(address);
  if (base_of(address, &reserved, NULL) != address || reserved != size ||
      !(known[i].what & MAPPED_HERE))
    LEAVE(1);
  unsigned long long allocation = (unsigned long long)-known[i].lock;
  known[i].what = ADDRESSES;
  known[i].lock = 0;
  allocations[allocation].maps--;
  drop_allocation(allocation);
  LEAVE(0);
}

typedef struct {
  int place, device, flags;
} access_to;

int cuMemSetAccess(uint64_t address, size_t size, const access_to* access, size_t count) {
  ENTER("cuMemSetAccess");
  size_t reserved;
  int i = know(address);
  if (count != 1 || access->place != 1 || access->flags != 3 ||
      base_of(address, &reserved, NULL) != address || reserved != size ||
      !(known[i].what & MAPPED_HERE))
    LEAVE(1);
  known[i].what |= USABLE;
  LEAVE(0);
}

int cuMemRetainAllocationHandle(unsigned long long* found, void* address) {
  ENTER("cuMemRetainAllocationHandle");
  int i = know(base_of((uint64_t)(uintptr_t)address, NULL, NULL));
  if (!(known[i].what & MAPPED_HERE)) LEAVE(1);
  *found = (unsigned long long)-known[i].lock;
  allocations[*found].counts++;
  LEAVE(0);
}

int cuMemExportToShareableHandle(int* fd, unsigned long long allocation, int kind,
                                 unsigned long long flags) {
  ENTER("cuMemExportToShareableHandle");
  if (kind != 1 || flags || allocation >= MANY || !allocations[allocation].used) LEAVE(1);
  *fd = fcntl(allocations[allocation].fd, F_DUPFD_CLOEXEC, 3);
  LEAVE(0);
}

int cuMemImportFromShareableHandle(unsigned long long* made, void* handle, int kind) {
  ENTER("cuMemImportFromShareableHandle");
  int fd = fcntl((int)(intptr_t)handle, F_DUPFD_CLOEXEC, 3);
  if (kind != 1 || fd < 0) LEAVE(1);
  *made = new_allocation(fd);
  allocations[*made].used = 2;
  LEAVE(0);
}
