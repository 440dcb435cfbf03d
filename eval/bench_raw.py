"""Raw loops in C that read 4 KiB pages of a file: what the disk store's reads are compared with in `engram bench`.

    with raw_reader("aio", depth=128, fd=fd, folder=folder) as read:     # or a text that says why there is none
        read(offsets_p, buffer)

One loop a way of the store: io_uring and kernel aio by raw system calls, which wait for a quarter of the depth as ours
do, and POSIX threads with one `pread` each. All are compiled together when the first is asked for.

Shapes: p pages.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np

Reader: TypeAlias = "Callable[[np.ndarray, np.ndarray], None]"
"""Byte offsets of pages [p] int64, and the memory they go to (uint8, from a page border on, p pages)."""
RAW = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#define PAGE 4096
typedef struct { int fd; const int64_t *at; int64_t n; char *to; } Pages;  /* page i from byte at[i], to + i * PAGE */
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct { Pages pages; atomic_long next, bad; } Job;
static void *serve(void *given) {
  Job *job = given;
  for (;;) {
    int64_t i = atomic_fetch_add(&job->next, 1);
    if (i >= job->pages.n) return NULL;
    if (pread(job->pages.fd, job->pages.to + i * PAGE, PAGE, job->pages.at[i]) != PAGE) atomic_fetch_add(&job->bad, 1);
  }
}
void *threads_open(int depth) { int *kept = malloc(sizeof *kept); *kept = depth; return kept; }
void threads_close(void *way) { free(way); }
int64_t threads_read(void *way, int fd, const int64_t *at, int64_t n, char *to) {
  int depth = *(int *)way, made = 0;
  Job job = {{fd, at, n, to}, 0, 0};
  pthread_t ids[depth];
  while (made < depth && !pthread_create(&ids[made], NULL, serve, &job)) made++;
  for (int i = 0; i < made; i++) pthread_join(ids[i], NULL);
  return made < depth ? -EAGAIN : job.bad;
}

typedef struct {
  aio_context_t context;
  int depth, *free;
  struct iocb *blocks, **list;
  struct io_event *found;
} Aio;
void *aio_open(int depth) {
  Aio *a = calloc(1, sizeof *a);
  if (syscall(__NR_io_setup, depth, &a->context) < 0) { free(a); return NULL; }
  a->depth = depth, a->blocks = calloc(depth, sizeof *a->blocks), a->list = calloc(depth, sizeof *a->list);
  a->found = calloc(depth, sizeof *a->found), a->free = calloc(depth, sizeof *a->free);
  return a;
}
void aio_close(void *way) {
  Aio *a = way;
  syscall(__NR_io_destroy, a->context);
  free(a->blocks), free(a->list), free(a->found), free(a->free), free(a);
}
int64_t aio_read(void *way, int fd, const int64_t *at, int64_t n, char *to) {
  Aio *a = way;
  int64_t given = 0, done = 0, bad = 0, idle = a->depth;
  for (int i = 0; i < a->depth; i++) a->free[i] = i;
  while (done < n) {
    long put = 0;
    for (; given < n && idle; given++) {
      int slot = a->free[--idle];
      struct iocb *block = &a->blocks[slot];
      memset(block, 0, sizeof *block);
      block->aio_lio_opcode = IOCB_CMD_PREAD, block->aio_fildes = fd, block->aio_nbytes = PAGE, block->aio_data = slot;
      block->aio_offset = at[given], block->aio_buf = (uintptr_t)(to + given * PAGE);
      a->list[put++] = block;
    }
    for (long k = 0; k < put;) {
      long taken = syscall(__NR_io_submit, a->context, put - k, a->list + k);
      if (taken < 0 && errno != EAGAIN && errno != EINTR) return -errno;
      if (taken > 0) k += taken;
    }
    long wanted = least(a->depth / 4, n - done);
    long got = syscall(__NR_io_getevents, a->context, wanted, (long)a->depth, a->found, NULL);
    if (got < 0 && errno != EINTR) return -errno;
    for (long k = 0; k < got; k++, done++) bad += a->found[k].res != PAGE, a->free[idle++] = a->found[k].data;
  }
  return bad;
}

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
typedef struct {
  int fd, depth;
  unsigned *sq_head, *sq_tail, *cq_head, *cq_tail, sq_mask, cq_mask;
  size_t ring_bytes, entry_bytes;
  char *ring;
  struct io_uring_cqe *cqes;
  struct io_uring_sqe *sqes;
} Ring;
void *io_uring_open(int depth) {
  struct io_uring_params p = {0};
  Ring *r = calloc(1, sizeof *r);
  r->fd = syscall(425, depth, &p), r->depth = depth;
  if (r->fd < 0) { free(r); return NULL; }
  size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned), cq = p.cq_off.cqes + p.cq_entries * sizeof *r->cqes;
  r->ring_bytes = sq > cq ? sq : cq, r->entry_bytes = p.sq_entries * sizeof *r->sqes;
  r->ring = mmap(0, r->ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_SQ_RING);
  r->sqes = mmap(0, r->entry_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_SQES);
  if (r->ring == MAP_FAILED || (void *)r->sqes == MAP_FAILED) return NULL;
  r->sq_head = (unsigned *)(r->ring + p.sq_off.head), r->sq_tail = (unsigned *)(r->ring + p.sq_off.tail);
  r->cq_head = (unsigned *)(r->ring + p.cq_off.head), r->cq_tail = (unsigned *)(r->ring + p.cq_off.tail);
  r->sq_mask = *(unsigned *)(r->ring + p.sq_off.ring_mask), r->cq_mask = *(unsigned *)(r->ring + p.cq_off.ring_mask);
  r->cqes = (struct io_uring_cqe *)(r->ring + p.cq_off.cqes);
  for (unsigned i = 0; i < p.sq_entries; i++) ((unsigned *)(r->ring + p.sq_off.array))[i] = i;
  return r;
}
void io_uring_close(void *way) {
  Ring *r = way;
  munmap(r->ring, r->ring_bytes), munmap(r->sqes, r->entry_bytes), close(r->fd), free(r);
}
int64_t io_uring_read(void *way, int fd, const int64_t *at, int64_t n, char *to) {
  Ring *r = way;
  int64_t given = 0, done = 0, bad = 0;
  while (done < n) {
    unsigned tail = *r->sq_tail;
    for (; given < n && given - done < r->depth; given++, tail++) {
      struct io_uring_sqe *entry = &r->sqes[tail & r->sq_mask];
      memset(entry, 0, sizeof *entry);
      entry->opcode = 22, entry->fd = fd, entry->len = PAGE;  /* IORING_OP_READ, which older headers lack */
      entry->off = at[given], entry->addr = (uintptr_t)(to + given * PAGE);
    }
    __atomic_store_n(r->sq_tail, tail, __ATOMIC_RELEASE);
    unsigned waiting = tail - __atomic_load_n(r->sq_head, __ATOMIC_ACQUIRE);
    unsigned wanted = least(r->depth / 4, n - done);
    if (syscall(426, r->fd, waiting, wanted, IORING_ENTER_GETEVENTS, NULL, 0) < 0 && errno != EINTR && errno != EAGAIN)
      return -errno;
    unsigned head = *r->cq_head, end = __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE);
    for (; head != end; head++, done++) bad += r->cqes[head & r->cq_mask].res != PAGE;
    __atomic_store_n(r->cq_head, head, __ATOMIC_RELEASE);
  }
  return bad;
}
#endif
"""


def compile_library(source: str, library: Path, *options: str) -> ctypes.CDLL | None:
    """C source and the path of the library to be made -> the loaded library; None where no compiler takes it."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    if not library.exists():
        text = library.with_suffix(".c")
        text.write_text(source, encoding="utf-8")
        command = [compiler, "-O3", "-shared", "-fPIC", *options, "-o", str(library), str(text)]
        if subprocess.run(command, capture_output=True).returncode:
            return None
    return ctypes.CDLL(str(library))


@contextmanager
def raw_reader(way: str, depth: int, fd: int, folder: Path) -> Iterator[Reader | str]:
    """A way, its requests in flight, an open file, a folder to compile in -> the loop, or a text why there is none.

    The loop raises RuntimeError when a page could not be read whole.
    """
    library = compile_library(RAW, folder / "raw.so", "-pthread")
    if library is None:
        yield "no C compiler, or none that takes the loop"
        return
    if not hasattr(library, f"{way}_open"):
        yield "the system's C headers lack it"
        return
    make, read, end = (getattr(library, f"{way}_{name}") for name in ("open", "read", "close"))
    make.restype, end.argtypes, read.restype = ctypes.c_void_p, [ctypes.c_void_p], ctypes.c_int64
    read.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    handle = make(depth)
    if not handle:
        yield "the kernel refuses it"
        return

    def reader(offsets_p: np.ndarray, to: np.ndarray) -> None:
        bad = read(handle, fd, offsets_p.ctypes.data, len(offsets_p), to.ctypes.data)
        if bad:
            raise RuntimeError(f"bench: the C loop of {way} could not read {bad} pages")

    try:
        yield reader
    finally:
        end(handle)
